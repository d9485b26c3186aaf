package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
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

func TestFullPullThatCannotSucceedIsToldOnTheClaimAndKeepsOthersAway(t *testing.T) {
	c.begin(t)
	c.apply(t, strings.NewReplacer("one-gpu", "lost", "demo/tiny", "demo/lost").Replace(example(t, "one-gpu-sim")))
	var p pod
	eventually(t, "a pod that is placed", func(ctx context.Context) error {
		list, err := c.pods(ctx, workloads, "app=lost")
		if err == nil && (len(list) != 1 || list[0].Spec.NodeName == "" || len(list[0].Status.ResourceClaimStatuses) != 1) {
			err = errAgain
		}
		if err == nil {
			p = list[0]
		}
		return err
	})
	c.told(t, p, "demo/lost")
	name := p.Status.ResourceClaimStatuses[0].ResourceClaimName
	eventually(t, "a condition of the claim's cold device", func(ctx context.Context) error {
		var claim struct {
			Status struct {
				Devices []struct {
					Driver, Device string
					Conditions     []struct{ Type, Status, Reason, Message string }
				}
			}
		}
		if err := c.get(ctx, &claim, "resourceclaim", "-n", workloads, name); err != nil {
			return err
		}
		for _, d := range claim.Status.Devices {
			for _, is := range d.Conditions {
				if d.Device == "cold" && is.Type == "Prepared" && is.Status == "False" && is.Reason != "" && strings.Contains(is.Message, "demo/lost") {
					return nil
				}
			}
		}
		return fmt.Errorf("%w: %+v", errAgain, claim.Status.Devices)
	})
	eventually(t, "an event on the claim", func(ctx context.Context) error {
		texts, err := c.events(ctx, workloads, "ResourceClaim", name)
		if err == nil && !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, "demo/lost") }) {
			err = fmt.Errorf("%w: %q", errAgain, texts)
		}
		return err
	})
	eventually(t, "a taint on the cold device of "+p.Spec.NodeName, func(ctx context.Context) error {
		pools, err := c.pools(ctx)
		if err != nil {
			return err
		}
		for _, d := range pools[p.Spec.NodeName+"/weights"] {
			for _, taint := range d.Taints {
				if d.Name == "cold" && taint.Key == "hearth.dev/pull-failed" && taint.Effect == "NoSchedule" {
					return nil
				}
			}
		}
		return fmt.Errorf("%w: %+v", errAgain, pools[p.Spec.NodeName+"/weights"])
	})
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

// kubectlExec runs a command in the control container of a node's agent.
func (c cluster) kubectlExec(t *testing.T, node string, argv ...string) (string, error) {
	t.Helper()
	agent := c.agentPod(t, node)
	args := append([]string{"exec", "-n", system, agent.Metadata.Name, "-c", "control", "--"}, argv...)
	return c.try(t.Context(), nil, args...)
}
