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
