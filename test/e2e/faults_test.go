package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

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

func TestFullWithTheControlRoleDeadEnginesServeAndClaimsStand(t *testing.T) {
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
