package fabric

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

func TestNodesGetTheSimulatedGPUsThatWereAskedFor(t *testing.T) {
	t.Parallel()
	model := filepath.Join(t.TempDir(), "model")
	if err := hub.WriteModel(model, hub.ModelOptions{Size: units.MiB, Shards: 1, Seed: 1}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "gpus.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\ngpus: [{product: a100, count: 1}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "hu") //nolint:usetesting // t.TempDir is too long a path for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for gpus, want := range map[string]int{"h100x2": 2, file: 1, "": 0} {
		f, err := New(t.Context(), Options{
			Program: "/bin/false", Dir: dir, Nodes: 1, Engines: 3, Ref: "dir://" + model, Served: "demo", EngineKind: "sim", GPUs: gpus,
		})
		if err != nil {
			t.Fatalf("--gpus %q: %v", gpus, err)
		}
		c := nodeagent.Default()
		if err := configfile.Load(filepath.Join(dir, "node-1.yaml"), nodeagent.Kind, &c); err != nil {
			t.Fatal(err)
		}
		c.Node = "node-1"
		if err := c.Validate(); err != nil {
			t.Errorf("--gpus %q: %v", gpus, err)
		}
		if n := f.Nodes[0]; len(n.gpus) != want || (c.Inventory.Sim != "") != (want > 0) || (len(c.Devices) > 0) != (want == 0) {
			t.Errorf("--gpus %q: the node has %q, its agent's inventory is %q and devices are %v", gpus, n.gpus, c.Inventory.Sim, c.Devices)
		}
		for i, e := range f.Engines {
			if want > 0 && e.Device != f.Nodes[0].gpus[i%want] {
				t.Errorf("--gpus %q: engine %d runs on %s", gpus, i, e.Device)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err = New(t.Context(), Options{Program: "/bin/false", Dir: dir, Nodes: 1, Engines: 1, Ref: "dir://" + model, Served: "demo", EngineKind: "sim", GPUs: "teapotx2"})
	if err == nil || !strings.Contains(err.Error(), "read GPUs of node-1") {
		t.Errorf("GPUs of no known product gave %v", err)
	}
}
