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

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// crashing is a machine whose drive forgets what was not synced.
type crashing struct {
	*machine
	drive *durabletest.FS
	boots int
}

func newCrashing(t *testing.T) *crashing {
	t.Helper()
	m := newMachine(t)
	c := &crashing{machine: m, drive: durabletest.New()}
	m.fsys = c.drive
	if err := errors.Join(c.drive.MkdirAll(m.dir, 0o700), c.drive.Mkdir(m.dir+"/cdi", 0o755)); err != nil {
		t.Fatal(err)
	}
	for dir := m.dir; dir != "/"; dir = parent(dir) {
		if err := c.drive.SyncDir(parent(dir)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.drive.SyncDir(m.dir); err != nil {
		t.Fatal(err)
	}
	return c
}

func parent(dir string) string {
	for i := len(dir) - 1; i > 0; i-- {
		if dir[i] == '/' {
			return dir[:i]
		}
	}
	return "/"
}

// reboot puts the drive where the next boot finds it.
func (c *crashing) reboot(seed uint64) {
	var random *rand.Rand
	if seed > 0 {
		random = rand.New(rand.NewPCG(seed, 7))
	}
	c.drive = c.drive.Crash(random)
	c.boots++
	c.fsys, c.boot = c.drive, fmt.Sprintf("boot-%d", 1+c.boots)
}

// call prepares claims directly; an error of any of them is the call's.
func (b *built) call(t *testing.T, claims ...*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	t.Helper()
	all, err := b.PrepareResourceClaims(t.Context(), claims)
	for _, result := range all {
		err = errors.Join(err, result.Err)
	}
	return all, err
}

func (b *built) end(t *testing.T, claims ...*resourceapi.ResourceClaim) error {
	t.Helper()
	var objects []kubeletplugin.NamespacedObject
	for _, c := range claims {
		objects = append(objects, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID})
	}
	all, err := b.UnprepareResourceClaims(t.Context(), objects)
	for _, e := range all {
		err = errors.Join(err, e)
	}
	return err
}

// life is what a node does: it prepares two claims, one of them again, and
// unprepares both. It stops where the drive crashes.
func (c *crashing) life(t *testing.T, claims []*resourceapi.ResourceClaim) (answers map[types.UID]kubeletplugin.PrepareResult, err error) {
	t.Helper()
	b, err := c.build()
	if err != nil {
		return nil, err
	}
	defer func() { _ = b.ledger.Close() }()
	b.Restore()
	if err := b.Recover(t.Context()); err != nil {
		return nil, err
	}
	if answers, err = b.call(t, claims...); err != nil {
		return nil, err
	}
	if _, err := b.call(t, claims[0]); err != nil {
		return nil, err
	}
	return answers, b.end(t, claims...)
}

// finish is what the kubelet does after a crash: it asks for both claims, or
// ends both, until that is done.
func (c *crashing) finish(t *testing.T, claims []*resourceapi.ResourceClaim, again bool) (map[types.UID]kubeletplugin.PrepareResult, error) {
	t.Helper()
	b, err := c.build()
	if err != nil {
		return nil, err
	}
	defer func() { _ = b.ledger.Close() }()
	b.Restore()
	var answers map[types.UID]kubeletplugin.PrepareResult
	if again {
		if answers, err = b.call(t, claims...); err != nil {
			return nil, err
		}
	}
	if err := b.end(t, claims...); err != nil {
		return nil, err
	}
	if err := b.Recover(t.Context()); err != nil {
		return nil, err
	}
	if found := c.left(t, b.ledger); len(found) > 0 {
		return nil, fmt.Errorf("left at the end: %v", found)
	}
	return answers, nil
}

func TestACrashAtAnyChangeChangesNoAnswerAndLeavesNothing(t *testing.T) {
	t.Parallel()
	claims := []*resourceapi.ResourceClaim{full("a"), claim("b", gpu("gpu", 5), weights("model", "share-b"))}
	whole := newCrashing(t)
	want, err := whole.life(t, claims)
	if err != nil {
		t.Fatal(err)
	}
	changes := whole.drive.Changes()
	stripPaths(want)
	if changes < 20 {
		t.Fatalf("a life has %d changes of the drive", changes)
	}
	for at := 1; at <= changes; at++ {
		for _, again := range []bool{true, false} {
			for seed := range uint64(2) {
				c := newCrashing(t)
				before := c.drive.Changes()
				if at <= before {
					continue // the machine's own making
				}
				c.drive.CrashAt(at, seed == 1)
				_, _ = c.life(t, claims)
				if c.drive.Changes() != at {
					t.Errorf("change %d: no crash came", at)
				}
				c.reboot(seed)
				got, err := c.finish(t, claims, again)
				if err != nil {
					t.Errorf("crash at change %d of %d, seed %d, prepared again %t: %v", at, changes, seed, again, err)
					continue
				}
				if stripPaths(got); again {
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("crash at change %d: %s", at, diff)
					}
				}
			}
		}
	}
}

// stripPaths leaves of answers what must be the same on every machine.
func stripPaths(answers map[types.UID]kubeletplugin.PrepareResult) {
	for _, result := range answers {
		for i := range result.Devices {
			result.Devices[i].Metadata = nil
		}
	}
}

func TestAKillAtAnyChangeChangesNoAnswerAndLeavesNothing(t *testing.T) {
	t.Parallel()
	claims := []*resourceapi.ResourceClaim{full("a")}
	whole := newCrashing(t)
	want, err := whole.life(t, claims)
	if err != nil {
		t.Fatal(err)
	}
	stripPaths(want)
	for at := whole.startsAt(t) + 1; at <= whole.drive.Changes(); at++ {
		c := newCrashing(t)
		c.drive.CrashAt(at, true)
		_, _ = c.life(t, claims)
		if c.drive.Changes() != at {
			t.Errorf("change %d: no kill came", at)
		}
		c.drive.Revive()
		got, err := c.finish(t, claims, true)
		if err != nil {
			t.Errorf("kill at change %d: %v", at, err)
			continue
		}
		stripPaths(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("kill at change %d: %s", at, diff)
		}
	}
}

// startsAt is the last change of a machine's making.
func (c *crashing) startsAt(t *testing.T) int {
	t.Helper()
	return newCrashing(t).drive.Changes()
}
