package pool

import (
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/pick"
)

func TestTheTurnsOfAConversationStayWithTheTargetThatItsFirstOneDrew(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "old", Weight: 90}, {Pool: "new", Weight: 10}}}}})
	f.snapshot("o", &report.Report{Endpoints: []*report.Endpoint{engine("a", "old")}})
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "new")}})
	tie, share := uint64(0), map[string]int{}
	for conversation := uint64(1); conversation <= 1000; conversation++ {
		first := ""
		for range 5 {
			tie++
			r := f.acquire(&pick.Request{Model: "m", Tie: tie * 7919, Conversation: conversation * 0x9e3779b97f4a7c15})
			r.Done(Outcome{})
			if first == "" {
				first = r.Pool
				share[first]++
			}
			if r.Pool != first {
				t.Fatalf("conversation %d went from %s to %s", conversation, first, r.Pool)
			}
		}
	}
	if share["new"] < 60 || share["new"] > 150 {
		t.Errorf("the conversations are shared %v", share)
	}
}

func TestATargetThatIsNotReadyMovesNoConversationBetweenTheOthers(t *testing.T) {
	t.Parallel()
	m := &model{targets: []target{
		{TargetConfig: TargetConfig{Pool: "a", Weight: 50}, ready: true},
		{TargetConfig: TargetConfig{Pool: "b", Weight: 40}, ready: true},
		{TargetConfig: TargetConfig{Pool: "c", Weight: 10}},
	}}
	drawn := func(conversation uint64, ready bool) string {
		m.targets[2].ready = ready
		order, _ := m.order(&pick.Request{Conversation: conversation}, nil)
		for _, i := range order {
			if m.targets[i].ready {
				return m.targets[i].Pool
			}
		}
		return ""
	}
	share := map[string]int{}
	for i := range uint64(2000) {
		conversation := (i + 1) * 0x9e3779b97f4a7c15
		with, without := drawn(conversation, true), drawn(conversation, false)
		share["with "+with]++
		share["without "+without]++
		if with != "c" && with != without {
			t.Fatalf("conversation %d goes to %s, and to %s while c is not ready", i, with, without)
		}
	}
	for name, want := range map[string]int{"with a": 1000, "with b": 800, "with c": 200, "without a": 1111, "without b": 889, "without c": 0} {
		if got := share[name]; got < want*8/10 || got > want*12/10 {
			t.Errorf("%s: %d of 2000 conversations, want about %d", name, got, want)
		}
	}
}
