package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestCoreOneClaimInjectsGPUWeightsAndKVAndARequestReachesItsEngine(t *testing.T) {
	c.begin(t)
	c.apply(t, example(t, "one-gpu-sim"))
	p := c.ready(t, "one-gpu", 1)[0]
	cl := c.prepared(t, p)
	gpu, _ := cl.device("gpu")
	if !strings.HasPrefix(gpu, "gpu-") {
		t.Errorf("the claim has the GPU %q", gpu)
	}
	if cl.KV == nil || cl.KV.Memory != 128<<20 || cl.KV.NVMe != 128<<20 {
		t.Errorf("the claim has the KV space %+v, it asked for 128Mi of each", cl.KV)
	}
	// What settled looks for at the end of each test is there now.
	h, err := c.held(t.Context(), t, c.node(t, p.Spec.NodeName))
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Claims) != 1 || len(h.Specs) != 1 || len(h.KV) != 1 || h.Leases != 1 {
		t.Errorf("the node has %+v of its claim, want one of each", h)
	}
	pid := c.processes(t, p, "engine-sim")[0]
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		t.Fatal(err)
	}
	variables := strings.Split(string(env), "\x00")
	for _, want := range []string{"HEARTH_MODEL_DIR=/hearth/model", "HEARTH_KV_DIR=/hearth/kv", "HF_HUB_OFFLINE=1", "HEARTH_MODEL_DIGEST=" + cl.Artifacts[0].Digest} {
		if !slices.Contains(variables, want) {
			t.Errorf("the container lacks the variable %s", want)
		}
	}
	for path, want := range map[string][]string{"/hearth/model": {"ro", "nosuid", "nodev"}, "/hearth/kv": {"rw", "nosuid", "nodev"}} {
		options := mountOptions(t, pid, path)
		for _, option := range want {
			if !slices.Contains(options, option) {
				t.Errorf("%s is mounted with %v, want %s too", path, options, option)
			}
		}
	}
	inside := fmt.Sprintf("/proc/%d/root", pid)
	if _, err := os.Stat(filepath.Join(inside, "hearth/model/config.json")); err != nil {
		t.Errorf("the model is not at its path: %v", err)
	}
	if err := os.WriteFile(filepath.Join(inside, "hearth/kv/block"), []byte("kv"), 0o600); err != nil {
		t.Errorf("the KV directory takes no file: %v", err)
	}
	c.answered(t, "tiny")
}

// mountOptions gives how a path is mounted in a process's view.
func mountOptions(t *testing.T, pid int, path string) []string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 5 && fields[4] == path {
			return strings.Split(fields[5], ",")
		}
	}
	t.Fatalf("nothing is mounted at %s:\n%s", path, data)
	return nil
}

func TestCoreNodeWithTheWeightsIsPreferred(t *testing.T) {
	c.begin(t)
	// Either node in turn, so that no order of names or of load explains it.
	for _, node := range c.Nodes() {
		c.only(t, "demo/tiny", node)
		manifest := example(t, "warm-replicas-sim")
		c.apply(t, manifest)
		for _, p := range c.ready(t, "warm-replicas", 2) {
			if p.Spec.NodeName != node.Name() {
				t.Errorf("%s runs on %s, the weights are on %s", p.Metadata.Name, p.Spec.NodeName, node.Name())
			}
		}
		c.answered(t, "tiny")
		c.remove(t, manifest)
		c.gone(t, "warm-replicas")
	}
}

// gone waits until an app has no pods.
func (c cluster) gone(t *testing.T, app string) {
	t.Helper()
	eventually(t, "the end of the pods of "+app, func(ctx context.Context) error {
		list, err := c.pods(ctx, workloads, "app="+app)
		if err == nil && len(list) != 0 {
			err = fmt.Errorf("%w: there are %d", errAgain, len(list))
		}
		return err
	})
}

func TestCoreColdPodWaitsForItsWeightsAndStarts(t *testing.T) {
	c.begin(t)
	for _, n := range c.Nodes() {
		c.drop(t, "demo/other", n)
	}
	c.warm(t, "demo/other")
	manifest := strings.NewReplacer("one-gpu", "cold", "demo/tiny", "demo/other").Replace(example(t, "one-gpu-sim"))
	c.apply(t, manifest)
	p := c.ready(t, "cold", 1)[0]
	if _, share := c.prepared(t, p).device("cold"); share == "" {
		t.Error("the cold device is shared, and the claim has no share of it")
	}
	c.warm(t, "demo/other", p.Spec.NodeName)
}

func TestCoreKilledAgentComesBackAndLosesNoClaim(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	before, files := c.prepared(t, p), specs(t, c.node(t, p.Spec.NodeName))
	for _, role := range []string{"control", "data"} {
		pid := c.signal(t, p.Spec.NodeName, role, syscall.SIGKILL)
		c.roleBack(t, p.Spec.NodeName, role, pid)
	}
	if after := c.prepared(t, p); fmt.Sprint(after.Devices) != fmt.Sprint(before.Devices) || fmt.Sprint(after.Artifacts) != fmt.Sprint(before.Artifacts) {
		t.Errorf("the claim is %+v and was %+v", after, before)
	}
	if got := specs(t, c.node(t, p.Spec.NodeName)); !slices.Equal(got, files) {
		t.Errorf("CDI files are %v and were %v", got, files)
	}
	if again := c.ready(t, "one-gpu", 1)[0]; again.Metadata.UID != p.Metadata.UID {
		t.Errorf("the pod is another one: %+v", again)
	}
	c.answered(t, "tiny")
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
}
