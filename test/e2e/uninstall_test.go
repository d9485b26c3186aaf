package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// The last of all, since its file is: it takes Hearth off the cluster.
func TestFullUninstallRefusesWhileClaimsArePreparedAndLeavesNothing(t *testing.T) {
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	c.prepared(t, p)
	node := c.node(t, p.Spec.NodeName)
	if out, err := c.kubectlExec(t, p.Spec.NodeName, "hearth", "uninstall", "--config", "/etc/hearth/agent.yaml", "--node", p.Spec.NodeName, "--check"); err == nil {
		t.Errorf("an uninstall is fine with a prepared claim: %s", out)
	} else if !strings.Contains(out+err.Error(), "one-gpu") {
		t.Errorf("the refusal does not name the claim: %s %v", out, err)
	}
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
	c.settled(t)
	c.kubectl(t, "delete", "-k", filepath.Join(root, "deployments/overlays/lab"), "--ignore-not-found", "--wait")
	eventually(t, "no slice of the driver", func(ctx context.Context) error {
		pools, err := c.pools(ctx)
		if err == nil && len(pools) != 0 {
			var names []string
			for name := range pools {
				names = append(names, name)
			}
			slices.Sort(names)
			err = fmt.Errorf("%w: %v", errAgain, names)
		}
		return err
	})
	if files := specs(t, node); len(files) != 0 {
		t.Errorf("CDI files stay: %v", files)
	}
	for _, n := range c.Nodes() {
		uninstalled(t, n)
	}
}

// uninstalled runs `hearth uninstall --weights` on a node, outside of pods, and
// looks at what is left.
func uninstalled(t *testing.T, node *lab.Node) {
	t.Helper()
	for to, from := range map[string]string{
		"usr-hearth": filepath.Join(root, "bin/hearth"),
		"agent.yaml": filepath.Join(root, "deployments/overlays/lab/agent.yaml"),
	} {
		data, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		// What describes devices stays in the ConfigMap, which is gone.
		data = bytes.ReplaceAll(data, []byte("inventory:\n  sim: /etc/hearth/gpus.yaml\n"), nil)
		if err := os.WriteFile(filepath.Join(node.Root(), "tmp", to), data, 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	out, err := node.Run(t.Context(), "/tmp/usr-hearth", "uninstall", "--config", "/tmp/agent.yaml", "--node", node.Name(), "--weights")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, dir := range []string{"var/lib/hearth", "run/hearth", "sys/fs/bpf/hearth", "var/run/cdi", "var/lib/kubelet/plugins", "var/lib/kubelet/plugins_registry"} {
		err := filepath.WalkDir(filepath.Join(node.Root(), dir), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && !d.IsDir() {
				t.Errorf("%s stays on %s", strings.TrimPrefix(path, node.Root()), node.Name())
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
