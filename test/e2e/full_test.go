package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

func TestFullTwoPodsShareOneWeightsDevice(t *testing.T) {
	c.begin(t)
	node := c.Node(0)
	c.only(t, "demo/tiny", node)
	c.apply(t, example(t, "warm-replicas-sim"))
	pods := c.ready(t, "warm-replicas", 2)
	one, two := c.prepared(t, pods[0]), c.prepared(t, pods[1])
	device1, share1 := one.device("weights")
	device2, share2 := two.device("weights")
	if device1 != device2 || device1 == "" || share1 == "" || share1 == share2 {
		t.Errorf("the pods have %s (share %s) and %s (share %s), want two shares of one device", device1, share1, device2, share2)
	}
	gpu1, _ := one.device("gpu")
	gpu2, _ := two.device("gpu")
	if gpu1 == gpu2 {
		t.Errorf("both pods have the GPU %s", gpu1)
	}
}

func TestFullUnmodifiedPodGetsAGPUByItsExtendedResource(t *testing.T) {
	c.begin(t)
	c.apply(t, example(t, "extended-resource-sim"))
	p := c.ready(t, "extended-resource", 1)[0]
	if gpu, _ := c.prepared(t, p).device("gpu"); gpu == "" {
		t.Error("the pod's claim has no GPU")
	}
	c.answered(t, "tiny")
}

func TestFullClaimOutlivesARestartOfTheKubelet(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	before := c.prepared(t, p)
	node := c.node(t, p.Spec.NodeName)
	if err := node.Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.slicesAgree(t)
	if again := c.ready(t, "one-gpu", 1)[0]; again.Metadata.UID != p.Metadata.UID {
		t.Error("the pod is another one")
	}
	if after := c.prepared(t, p); fmt.Sprint(after.Devices) != fmt.Sprint(before.Devices) {
		t.Errorf("the claim has %+v and had %+v", after.Devices, before.Devices)
	}
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
}

func TestFullWithTheDataRoleDeadPodsEndAndReportsGoOn(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	c.prepared(t, p)
	// A stopped process is worse than a dead one: its socket still takes connections.
	pid := c.signal(t, p.Spec.NodeName, "data", syscall.SIGSTOP)
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	c.answered(t, "tiny")
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
	if _, err := c.hearth(t.Context(), c.node(t, p.Spec.NodeName), "devices", "--json"); err != nil {
		t.Errorf("control does not answer while data is stopped: %v", err)
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

func TestFullWithTheControlRoleDeadPullsGoOnAndEnginesServe(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	pid := c.signal(t, p.Spec.NodeName, "control", syscall.SIGSTOP)
	c.answered(t, "tiny")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.roleBack(t, p.Spec.NodeName, "control", pid)
	c.prepared(t, p)
	c.answered(t, "tiny")
}

func TestFullUpdateAndDowngradeUnderLoadLoseNoRequestAndNoClaim(t *testing.T) {
	c.begin(t)
	c.apply(t, example(t, "warm-replicas-sim"))
	pods := c.ready(t, "warm-replicas", 2)
	c.answered(t, "tiny")
	ctx, cancel := context.WithCancel(t.Context())
	var sent, failed atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			status, err := c.ask(ctx, "tiny")
			if ctx.Err() != nil {
				return
			}
			sent.Add(1)
			if err != nil || status != http.StatusOK {
				failed.Add(1)
				t.Logf("request %d: %d %v", sent.Load(), status, err)
			}
		}
	}()
	// The update changes the pod's template; the downgrade goes back to the revision before.
	for _, step := range [][]string{
		{"-n", system, "set", "env", "daemonset/hearth-agent", "HEARTH_E2E_REVISION=next"},
		{"-n", system, "rollout", "status", "daemonset/hearth-agent", "--timeout=4m"},
		{"-n", system, "rollout", "undo", "daemonset/hearth-agent"},
		{"-n", system, "rollout", "status", "daemonset/hearth-agent", "--timeout=4m"},
	} {
		c.kubectl(t, step...)
	}
	cancel()
	<-done
	if sent.Load() == 0 || failed.Load() != 0 {
		t.Errorf("%d of %d requests failed while the agents were updated", failed.Load(), sent.Load())
	}
	for _, p := range pods {
		c.prepared(t, p)
	}
	for i, again := range c.ready(t, "warm-replicas", 2) {
		if again.Metadata.UID != pods[i].Metadata.UID {
			t.Errorf("the pod %s is another one", again.Metadata.Name)
		}
	}
}

func TestFullAgentThatIsReplacedIsRegisteredAgainBeforeItsSlicesGo(t *testing.T) {
	c.begin(t)
	node := c.Node(0)
	before, err := c.sliceUIDs(t.Context(), node.Name())
	if err != nil {
		t.Fatal(err)
	}
	old := c.agentPod(t, node.Name())
	was, err := c.control(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	pid := c.processes(t, old, "--role", "control")[0]
	c.kubectl(t, "-n", system, "delete", "pod", old.Metadata.Name, "--wait=false")
	began := time.Now()
	var ended time.Duration
	eventually(t, "another agent that the kubelet has registered", func(ctx context.Context) error {
		if ended == 0 && syscall.Kill(pid, 0) != nil {
			ended = time.Since(began)
		}
		is, err := c.control(ctx, node)
		if err == nil && (is.Epoch == was.Epoch || !is.Kubernetes.Registered) {
			err = fmt.Errorf("%w: %+v", errAgain, is)
		}
		return err
	})
	t.Logf("registered again %s after the order to stop, %s after control's end (aim: 10 s; the kubelet keeps slices for 30 s)",
		time.Since(began).Round(100*time.Millisecond), (time.Since(began) - ended).Round(100*time.Millisecond))
	after, err := c.sliceUIDs(t.Context(), node.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(before, after) {
		t.Errorf("the node's slices are %v and were %v: they went meanwhile", after, before)
	}
	c.agentPod(t, node.Name())
}

// control is what `hearth status --json` tells of a node's role control.
type control struct {
	Epoch      uint64 // another one with each start
	Kubernetes struct{ Registered bool }
}

func (c cluster) control(ctx context.Context, node *lab.Node) (control, error) {
	out, err := c.hearth(ctx, node, "status", "--json")
	if err != nil {
		return control{}, err
	}
	var status struct{ Nodes []struct{ Node control } }
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		return control{}, err
	}
	if len(status.Nodes) != 1 {
		return control{}, fmt.Errorf("%w: %s", errAgain, out)
	}
	return status.Nodes[0].Node, nil
}

// sliceUIDs are those of a node's slices of this driver, sorted.
func (c cluster) sliceUIDs(ctx context.Context, node string) ([]string, error) {
	var list struct {
		Items []struct {
			Metadata struct{ UID string }
			Spec     struct{ Driver string }
		}
	}
	if err := c.get(ctx, &list, "resourceslices", "--field-selector", "spec.nodeName="+node); err != nil {
		return nil, err
	}
	var uids []string
	for _, s := range list.Items {
		if s.Spec.Driver == "hearth.dev" {
			uids = append(uids, s.Metadata.UID)
		}
	}
	slices.Sort(uids)
	if len(uids) == 0 {
		return nil, fmt.Errorf("%w: no slice", errAgain)
	}
	return uids, nil
}

func TestFullPodDeletedByForceLeavesNothing(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	c.kubectl(t, "-n", workloads, "scale", "deployment/one-gpu", "--replicas=0")
	c.kubectl(t, "-n", workloads, "delete", "pod", p.Metadata.Name, "--force", "--grace-period=0", "--ignore-not-found")
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
}

func TestFullAgentStartsWhileTheAPIServerIsDown(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	before := c.prepared(t, p)
	pids := map[string]int{}
	for _, role := range []string{"control", "data"} {
		pids[role] = c.processes(t, c.agentPod(t, p.Spec.NodeName), "--role", role)[0]
	}
	agent := c.agentPod(t, p.Spec.NodeName)
	if err := c.Stop(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	node := c.node(t, p.Spec.NodeName)
	// The kubelet starts the containers again by itself; the roles must come up
	// and tell what they hold with nobody to ask.
	eventually(t, "an agent without an API server", func(ctx context.Context) error {
		list, err := c.claims(ctx, node)
		if err == nil && (len(list) != 1 || list[0].State != "prepared") {
			err = fmt.Errorf("%w: %+v", errAgain, list)
		}
		return err
	})
	if err := c.Start(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := c.agentPod(t, p.Spec.NodeName); again.Metadata.UID != agent.Metadata.UID {
		t.Errorf("the agent's pod is another one")
	}
	c.slicesAgree(t)
	if after := c.prepared(t, p); fmt.Sprint(after.Devices) != fmt.Sprint(before.Devices) {
		t.Errorf("the claim has %+v and had %+v", after.Devices, before.Devices)
	}
	c.answered(t, "tiny")
}

func TestFullNodeThatBootedAgainPreparesItsClaimsAgain(t *testing.T) {
	c.begin(t)
	manifest := example(t, "one-gpu-sim")
	c.apply(t, manifest)
	p := c.ready(t, "one-gpu", 1)[0]
	before := c.prepared(t, p)
	node := c.node(t, p.Spec.NodeName)
	boot := node.BootID()
	if err := node.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if node.BootID() == boot {
		t.Fatal("the node has the boot id that it had")
	}
	p = c.ready(t, "one-gpu", 1)[0]
	if after := c.prepared(t, p); fmt.Sprint(after.Devices) != fmt.Sprint(before.Devices) || after.UID != before.UID {
		t.Errorf("the claim is %+v and was %+v", after, before)
	}
	c.slicesAgree(t)
	c.answered(t, "tiny")
	c.remove(t, manifest)
	c.gone(t, "one-gpu")
}

func TestFullBadClaimConfigIsRefusedWithATextForPeople(t *testing.T) {
	c.begin(t)
	for name, test := range map[string]struct{ from, to, said string }{
		"host":  {"ref: hub://demo/tiny@main", "ref: hub://demo/tiny@main\n              containerPath: /etc", "/etc"},
		"field": {"ref: hub://demo/tiny@main", "ref: hub://demo/tiny@main\n              hostPath: /root", "hostPath"},
		"kind":  {"kind: WeightsConfig", "kind: WeightConfig", "WeightConfig"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, n := range c.Nodes() {
				c.drop(t, "demo/tiny", n)
			}
			c.warm(t, "demo/tiny")
			c.apply(t, strings.NewReplacer("one-gpu", "bad-"+name, test.from, test.to).Replace(example(t, "one-gpu-sim")))
			var p pod
			eventually(t, "a pod that is placed", func(ctx context.Context) error {
				list, err := c.pods(ctx, workloads, "app=bad-"+name)
				if err == nil && (len(list) != 1 || list[0].Spec.NodeName == "") {
					err = errAgain
				}
				if err == nil {
					p = list[0]
				}
				return err
			})
			c.told(t, p, test.said, "weights")
		})
	}
}

func TestFullAForeignAccountMayNotPublishSlices(t *testing.T) {
	const slice = `
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: foreign}
spec:
  driver: hearth.dev
  nodeName: node-0
  pool: {name: foreign, generation: 1, resourceSliceCount: 1}
  devices: [{name: gpu-0}]
`
	// The administrator, and the agent's account with a token that is bound to no pod.
	for _, as := range [][]string{nil, {"--as=system:serviceaccount:" + system + ":hearth-agent"}} {
		out, err := c.try(t.Context(), []byte(slice), append([]string{"create", "-f", "-"}, as...)...)
		if err == nil {
			c.kubectl(t, "delete", "resourceslice", "foreign")
			t.Errorf("%v may publish slices of the driver: %s", as, out)
		} else if !strings.Contains(err.Error(), "hearth") {
			t.Errorf("%v is refused without a word of why: %v", as, err)
		}
	}
}

// Last by its name in the file's order: it takes Hearth off the cluster.
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
	for _, dir := range []string{"var/lib/hearth", "run/hearth", "var/run/cdi", "var/lib/kubelet/plugins", "var/lib/kubelet/plugins_registry"} {
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

// kubectlExec runs a command in the control container of a node's agent.
func (c cluster) kubectlExec(t *testing.T, node string, argv ...string) (string, error) {
	t.Helper()
	agent := c.agentPod(t, node)
	args := append([]string{"exec", "-n", system, agent.Metadata.Name, "-c", "control", "--"}, argv...)
	return c.try(t.Context(), nil, args...)
}
