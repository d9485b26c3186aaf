package kube

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/router/feed"
)

func slice(name string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	port, portName := int32(7411), "report"
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "hearth-system", Name: name, Labels: map[string]string{serviceLabel: "hearth-agents"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port}},
	}
}

func agentAt(node, address string, terminating bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{address}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Terminating: &terminating}}
}

func TestAgentsAreFoundByNode(t *testing.T) {
	t.Parallel()
	v6 := slice("v6", agentAt("node-1", "fd00::1", false), agentAt("node-3", "fd00::3", false))
	v6.AddressType = discoveryv1.AddressTypeIPv6
	nameless := agentAt("", "10.0.0.9", false)
	nameless.NodeName = nil
	objects := []any{
		slice("a", agentAt("node-1", "10.0.0.1", false), agentAt("node-2", "10.0.0.2", true), nameless),
		slice("b", agentAt("node-2", "10.0.0.22", false)), v6, "something else",
	}
	var stripped []any
	for _, o := range objects {
		s, err := stripSlice(o)
		if err != nil {
			t.Fatal(err)
		}
		stripped = append(stripped, s)
	}
	want := map[string]string{"node-1": "10.0.0.1:7411", "node-2": "10.0.0.22:7411", "node-3": "[fd00::3]:7411"}
	for _, port := range []string{"report", "7411"} {
		if diff := cmp.Diff(want, agentsOf(stripped, port)); diff != "" {
			t.Errorf("port %s: %s", port, diff)
		}
	}
	if got := agentsOf(stripped, "other"); len(got) != 0 {
		t.Errorf("agents %v of a port that is not there", got)
	}
}

func TestAnAgentThatIsNotListedIsLookedForWhereItWas(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_800_000_000, 0)
	k := known{}
	if next := k.take(map[string]string{"a": "10.0.0.1:1", "b": "10.0.0.2:1"}, now); next != 0 {
		t.Errorf("look again in %v", next)
	}
	// An update of a: gone, then back at another address.
	if next := k.take(map[string]string{"b": "10.0.0.2:1"}, now); next != forgetAgentAfter {
		t.Errorf("look again in %v", next)
	}
	if diff := cmp.Diff([]feed.Node{{Address: "10.0.0.1:1", Name: "a"}, {Address: "10.0.0.2:1", Name: "b"}}, k.nodes()); diff != "" {
		t.Error(diff)
	}
	k.take(map[string]string{"a": "10.0.0.3:1", "b": "10.0.0.2:1"}, now.Add(time.Minute))
	if diff := cmp.Diff([]feed.Node{{Address: "10.0.0.3:1", Name: "a"}, {Address: "10.0.0.2:1", Name: "b"}}, k.nodes()); diff != "" {
		t.Error(diff)
	}
	// A node goes, and another gets its agent's address.
	k.take(map[string]string{"b": "10.0.0.2:1", "c": "10.0.0.3:1"}, now.Add(2*time.Minute))
	if diff := cmp.Diff([]feed.Node{{Address: "10.0.0.2:1", Name: "b"}, {Address: "10.0.0.3:1", Name: "c"}}, k.nodes()); diff != "" {
		t.Error(diff)
	}
	// A node that stays away is forgotten, no sooner.
	k.take(map[string]string{"b": "10.0.0.2:1"}, now.Add(3*time.Minute))
	if next := k.take(map[string]string{"b": "10.0.0.2:1"}, now.Add(4*time.Minute)); next != forgetAgentAfter-time.Minute {
		t.Errorf("look again in %v", next)
	}
	k.take(map[string]string{"b": "10.0.0.2:1"}, now.Add(3*time.Minute+forgetAgentAfter))
	if diff := cmp.Diff([]feed.Node{{Address: "10.0.0.2:1", Name: "b"}}, k.nodes()); diff != "" {
		t.Error(diff)
	}
}
