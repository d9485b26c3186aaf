package local_test

import (
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
)

// await asks for a pull, again after each signal, until it is as wanted.
func (n *node) await(what string, name, claim string, wanted func(stock.Progress) bool) stock.Progress {
	n.t.Helper()
	changed, end := n.data.Cache().Subscribe()
	defer end()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		p, err := n.data.Cache().Pull(n.t.Context(), refOf(name), claim)
		n.must(err)
		if wanted(p) {
			return p
		}
		select {
		case <-changed:
		case <-deadline.C:
			n.t.Fatalf("no signal told of %s: %+v", what, p)
		}
	}
}

// What is published of a drive's free space is a few seconds old: two claims may
// be allocated what is there for one.
func TestAClaimAllocatedSpaceThatIsGoneIsToldSoAndGetsItOnceAnotherClaimEnds(t *testing.T) {
	t.Parallel()
	for name, apart := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, url := newOrigin(t)
			n := newNode(t, url, apart, func(n *node) { n.weight = 3 * units.MiB / 2 })
			ready := func(p stock.Progress) bool { return p.Ready }
			n.await("the first claim's weights", "cold", "a", ready)
			failed := n.await("the second claim's failure", "warm", "b", func(p stock.Progress) bool { return p.Final })
			if failed.Reason != "NoSpace" || failed.Failed == "" || failed.Ready {
				t.Errorf("the second claim is told %+v", failed)
			}
			n.must(n.data.Cache().Release(t.Context(), "a"))
			n.await("the second claim's weights", "warm", "b", ready)
			n.must(n.data.Cache().Release(t.Context(), "b"))
			claims, err := n.data.Cache().Holds(t.Context())
			if err != nil || len(claims) > 0 {
				t.Errorf("claims %v hold something, %v", claims, err)
			}
		})
	}
}

func TestAPullForAClaimSaysForWhich(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	flights := make(chan weightcache.Flight, 2)
	n := newNode(t, url, false, func(n *node) {
		n.began = func(f weightcache.Flight) func(weightcache.FlightEnd) {
			flights <- f
			return func(weightcache.FlightEnd) {}
		}
	})
	n.await("the claim's weights", "cold", "uid-1", func(p stock.Progress) bool { return p.Ready })
	if f := <-flights; f.Reason != "claim uid-1" || f.Ref != refOf("cold").String() || f.Missing <= 0 {
		t.Errorf("the flight is told as %+v", f)
	}
}
