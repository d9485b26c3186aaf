package fakekubelet_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/stock"
)

// story is a random run of what happens to a node, with what must hold at
// every step: one owner for each GPU, one answer for each claim while it is
// prepared, and at the end nothing left.
type story struct {
	c       *crashing
	b       *built
	random  *rand.Rand
	claims  []*resourceapi.ResourceClaim
	answers map[types.UID]kubeletplugin.PrepareResult // of claims that are prepared
	asleep  map[types.UID]bool                        // and were so before the last boot only
	down    bool                                      // the data role is
	log     []string
}

func (s *story) note(format string, args ...any) { s.log = append(s.log, fmt.Sprintf(format, args...)) }

func (s *story) open(t *testing.T) {
	t.Helper()
	b, err := s.c.build()
	if err != nil {
		t.Fatalf("%v\n%v", err, s.log)
	}
	s.b = b
	b.Restore()
	// What cannot be recovered now is recovered later.
	_ = b.Recover(t.Context())
}

func (s *story) prepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	all, err := s.b.call(t, c)
	s.note("prepare %s: %v", c.Name, err)
	if err != nil {
		// What a boot may have taken has to be held again first.
		if _, was := s.answers[c.UID]; was && !(s.down && s.asleep[c.UID] && errors.Is(err, stock.ErrUnavailable)) {
			t.Errorf("a claim that was prepared is refused: %v\n%v", err, s.log)
		}
		return
	}
	stripPaths(all)
	if was, ok := s.answers[c.UID]; ok {
		if diff := cmp.Diff(was, all[c.UID]); diff != "" {
			t.Errorf("another answer: %s\n%v", diff, s.log)
		}
	}
	s.answers[c.UID] = all[c.UID]
	delete(s.asleep, c.UID)
	for uid, other := range s.answers {
		if uid == c.UID {
			continue
		}
		for _, d := range other.Devices {
			for _, own := range all[c.UID].Devices {
				if d.PoolName == node && own.PoolName == node && d.DeviceName == own.DeviceName {
					t.Errorf("%s and %s both have %s\n%v", uid, c.UID, d.DeviceName, s.log)
				}
			}
		}
	}
}

func (s *story) step(t *testing.T) {
	t.Helper()
	c := s.claims[s.random.IntN(len(s.claims))]
	switch s.random.IntN(12) {
	case 0, 1, 2, 3, 4:
		s.prepare(t, c)
	case 5, 6, 7:
		err := s.b.end(t, c)
		s.note("unprepare %s: %v", c.Name, err)
		if err != nil {
			t.Errorf("unprepare: %v\n%v", err, s.log)
		}
		delete(s.answers, c.UID)
	case 8:
		down := s.random.IntN(2) == 0
		s.note("data role down: %t", down)
		s.down = down
		s.c.cache.SetDown(down)
		s.c.kv.SetDown(down)
	case 9:
		err := s.b.Recover(t.Context())
		s.note("recover: %v", err)
	case 10:
		s.note("plugin is killed")
		s.c.drive.Revive()
		s.open(t)
	case 11:
		s.note("node crashes")
		s.c.reboot(s.random.Uint64())
		for uid := range s.answers {
			s.asleep[uid] = true
		}
		s.open(t)
	}
}

func TestWhateverHappensEachGPUHasOneClaimAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		s := &story{c: newCrashing(t), random: rand.New(rand.NewPCG(seed, 11)), answers: map[types.UID]kubeletplugin.PrepareResult{}, asleep: map[types.UID]bool{}}
		s.claims = []*resourceapi.ResourceClaim{
			full("a"), claim("b", gpu("gpu", 0)), claim("c", gpu("gpu", 1), gpu("gpu", 2)), claim("d", weights("model", "share-d")),
			claim("e", gpu("gpu", 2), kvSpace("kv", "share-e", "60Gi")),
			says(claim("f", gpu("gpu", 3), coldWeights("model", "share-f")), resourceapi.AllocationConfigSourceClaim, refConfig(cold.Ref.String())),
		}
		s.open(t)
		for step := range 60 {
			s.step(t)
			if step == 30 {
				if err := s.c.cache.Advance(cold.Ref, stock.Progress{Present: cold.Size, Size: cold.Size}); err != nil {
					t.Fatal(err)
				}
			}
		}
		s.c.cache.SetDown(false)
		s.c.kv.SetDown(false)
		if err := s.b.end(t, s.claims...); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if err := s.b.Recover(t.Context()); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if found := s.c.left(t, s.b.ledger); len(found) > 0 {
			t.Errorf("seed %d: left at the end %v\n%v", seed, found, s.log)
		}
	}
}
