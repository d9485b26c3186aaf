//go:build root

package bpf

import (
	"testing"

	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestWhatIsDeepBelowTheScopeIsCounted(t *testing.T) {
	t.Parallel()
	client, server := two(t)
	scope, away := netns.NewCgroup(t), netns.NewCgroup(t)
	deep := scope
	for range 40 {
		deep = deep.Below(t, "deeper")
	}
	p := opened(t, Options{Scope: scope.ID})
	serve, call := mover.Start(t, server, away), mover.Start(t, client, deep)
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"})})
	call.Exchange(mover.Request{Up: 3000, Down: 50_000})
	call.Hangup(false)
	serve.Ended(1)
	exactly(t, p, in(deep), call.Totals())
	if counts := walked(t, p, in(away)); len(counts) > 0 {
		t.Errorf("outside of the scope %v is counted", counts)
	}
}
