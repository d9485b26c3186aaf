package nodeagent

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/nodeagent/local"
)

// eyes is a data role that sees more or less of the network.
type eyes struct {
	local.Data
	mu      sync.Mutex
	network *local.Network
	away    bool
	changed chan struct{}
}

func (e *eyes) Snapshot() (local.State, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return local.State{Epoch: 1, Network: e.network}, !e.away
}

func (e *eyes) Subscribe() (<-chan struct{}, func()) { return e.changed, func() {} }

func (e *eyes) become(network *local.Network, away bool) {
	e.mu.Lock()
	e.network, e.away = network, away
	e.mu.Unlock()
	e.changed <- struct{}{}
}

func TestLessSightOfTheNetworkIsAnEventOfTheNodeAndAStopLeavesTheCondition(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
		client := kube.New(kube.Options{Client: server, Node: "node-1"})
		data := &eyes{changed: make(chan struct{}, 1), away: true}
		a := &Agent{config: Config{Node: "node-1"}, data: data, log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		go func() { done <- client.Run(ctx) }()
		go func() { done <- (&cluster{client: client}).tellAccounting(ctx, a) }()
		expect := func(when, reason string, events int) {
			t.Helper()
			synctest.Wait()
			node, err := server.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, c := range node.Status.Conditions {
				got = string(c.Status) + " " + c.Reason
			}
			list, err := server.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
			if err != nil || got != reason || len(list.Items) != events {
				t.Errorf("%s: the condition is %q and there are %d events, %v; want %q and %d", when, got, len(list.Items), err, reason, events)
			}
			for _, e := range list.Items {
				if e.InvolvedObject.Kind != "Node" || e.InvolvedObject.Name != "node-1" || e.Reason != "NetworkAccountingLost" || e.Type != corev1.EventTypeWarning {
					t.Errorf("%s: the event %+v", when, e)
				}
			}
		}
		partial := &local.Network{Sight: "partial", Off: []local.Sensor{{Name: "seed", Reason: "no hostPID"}}}
		expect("at the start", "", 0)
		data.become(partial, false)
		expect("with less than all from the start", "False Partial", 0)
		data.become(&local.Network{Sight: "full"}, false)
		expect("with all", "True Full", 0)
		data.become(&local.Network{Sight: "devices", Off: []local.Sensor{{Name: "sockets", Reason: "lost while it ran"}}}, false)
		expect("when it is lost", "False DevicesOnly", 1)
		data.become(&local.Network{Sight: "full"}, false)
		expect("when it is back", "True Full", 1)
		data.become(nil, true)
		time.Sleep(accountingSilent - time.Second)
		expect("while the data role may come back", "True Full", 1)
		time.Sleep(time.Hour)
		expect("when it does not", "Unknown Unavailable", 1)
		data.become(&local.Network{Sight: "full"}, false)
		expect("when it does", "True Full", 1)
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		expect("after the agent stopped", "True Full", 1)
	})
}

func TestTheNodesConditionSaysWhatOfTheNetworkIsNotSeenAndWhy(t *testing.T) {
	t.Parallel()
	many := make([]local.Sensor, 8)
	for i := range many {
		many[i] = local.Sensor{Name: fmt.Sprintf("sensor-%d", i), Reason: strings.Repeat("ü", 600)}
	}
	for name, c := range map[string]struct {
		seen   *local.Network
		status corev1.ConditionStatus
		reason string
		words  []string
	}{
		"all":         {&local.Network{Sight: "full"}, corev1.ConditionTrue, "Full", nil},
		"some":        {&local.Network{Sight: "partial", Off: []local.Sensor{{Name: "seed", Reason: "no hostPID"}, {Name: "pins", Reason: "no bpffs"}}}, corev1.ConditionFalse, "Partial", []string{"seed is off (no hostPID); ", "pins is off (no bpffs)"}},
		"devices":     {&local.Network{Sight: "devices", Reason: "sockets: no", Off: []local.Sensor{{Name: "sockets", Reason: "no"}}}, corev1.ConditionFalse, "DevicesOnly", []string{"have no owners: sockets is off (no)"}},
		"not wanted":  {&local.Network{Sight: "devices"}, corev1.ConditionFalse, "DevicesOnly", []string{"network.enabled"}},
		"nothing":     {&local.Network{Sight: "none", Reason: "no sysfs"}, corev1.ConditionFalse, "Unavailable", []string{"no sysfs"}},
		"not told":    {nil, corev1.ConditionUnknown, "Unavailable", []string{"does not say"}},
		"a long tale": {&local.Network{Sight: "none", Reason: strings.Repeat("ü", 5000)}, corev1.ConditionFalse, "Unavailable", nil},
		"many":        {&local.Network{Sight: "partial", Off: many}, corev1.ConditionFalse, "Partial", []string{"sensor-0 is off (ü", "sensor-7 is off (ü"}},
	} {
		got := accounting(c.seen)
		if got.Type != "hearth.dev/NetworkAccounting" || got.Status != c.status || got.Reason != c.reason || got.Message == "" ||
			len(got.Message) > maxAccounting || !utf8.ValidString(got.Message) {
			t.Errorf("%s: %+v", name, got)
		}
		for _, word := range c.words {
			if !strings.Contains(got.Message, word) {
				t.Errorf("%s: %q does not say %q", name, got.Message, word)
			}
		}
	}
	ranks := []string{"", "devices", "partial", "full"}
	for i, sight := range ranks[1:] {
		if sightRank(sight) <= sightRank(ranks[i]) {
			t.Errorf("%s is no more than %s", sight, ranks[i])
		}
	}
}
