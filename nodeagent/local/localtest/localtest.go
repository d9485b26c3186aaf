// Package localtest holds the suite that every implementation of local.Data
// passes, besides those of its Cache and KV in dradriver/stock/stocktest.
// Tests call it; it makes nothing itself.
package localtest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// patience bounds the wait for an event that comes by itself.
const patience = time.Minute

// Rig is one node to test a Data on.
type Rig struct {
	Data local.Data
	// Good is Ready on the node, and nothing holds it.
	Good *artifact.Manifest
	// Remove tries to take an artifact off the node.
	Remove func(artifact.Digest) error
	// Leases are the holders on the data role's side, sorted.
	Leases func() []string
	// Warm makes one more ref Ready.
	Warm func()
}

// Data checks one implementation.
func Data(t *testing.T, rig Rig) {
	t.Helper()
	ctx := t.Context()
	changed, cancel := rig.Data.Subscribe()
	defer cancel()
	until(t, changed, "the ref that is Ready", func() bool {
		state, ok := rig.Data.Snapshot()
		return ok && state.Epoch != 0 && state.Space.Capacity > 0 && ready(state) == 1
	})
	state, _ := rig.Data.Snapshot()
	if s := state.Models[0]; s.Ref != rig.Good.Ref || s.Digest != rig.Good.Digest || s.Present != s.Size || s.Size != rig.Good.Size() || len(s.Views) != 2 {
		t.Errorf("the state tells %+v of %s", s, rig.Good.Ref)
	}
	rig.Warm()
	until(t, changed, "a second ref", func() bool {
		state, ok := rig.Data.Snapshot()
		return ok && ready(state) == 2
	})
	checkLend(t, rig)

	ended, end := context.WithCancel(ctx)
	end()
	if _, err := rig.Data.Lend(ended, map[string]artifact.Digest{"late": rig.Good.Digest}); !errors.Is(err, context.Canceled) {
		t.Errorf("Lend under an ended context gave %v", err)
	}
	if err := rig.Remove(rig.Good.Digest); err != nil {
		t.Errorf("what nothing holds could not be removed: %v", err)
	}
}

func ready(state local.State) (n int) {
	for _, s := range state.Models {
		if s.State == weightcache.Ready && len(s.Views) == 2 {
			n++
		}
	}
	return n
}

// checkLend sets, swaps and ends leases.
func checkLend(t *testing.T, rig Rig) {
	t.Helper()
	for _, step := range []struct {
		holders map[string]artifact.Digest
		missing []string
		leases  []string
	}{
		{map[string]artifact.Digest{"a": rig.Good.Digest, "b": rig.Good.Digest}, nil, []string{"a", "b"}},
		{map[string]artifact.Digest{"a": rig.Good.Digest, "b": rig.Good.Digest}, nil, []string{"a", "b"}},
		{map[string]artifact.Digest{"b": {1}, "c": rig.Good.Digest, "d": {1}}, []string{"b", "d"}, []string{"b", "c"}},
		{map[string]artifact.Digest{"c": rig.Good.Digest}, nil, []string{"c"}},
	} {
		missing, err := rig.Data.Lend(t.Context(), step.holders)
		if err != nil || !slices.Equal(missing, step.missing) {
			t.Errorf("Lend of %v gave %v, %v, want missing %v", step.holders, missing, err, step.missing)
		}
		if got := rig.Leases(); !slices.Equal(got, step.leases) {
			t.Errorf("after Lend of %v the leases are %v, want %v", step.holders, got, step.leases)
		}
		if err := rig.Remove(rig.Good.Digest); err == nil {
			t.Fatal("an artifact went while it was lent")
		}
	}
	if _, err := rig.Data.Lend(t.Context(), nil); err != nil || len(rig.Leases()) != 0 {
		t.Errorf("after an empty Lend (%v) the leases are %v", err, rig.Leases())
	}
}

// until waits for a state, at its signals.
func until(t *testing.T, changed <-chan struct{}, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for !holds() {
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("no signal told of %s", what)
		}
	}
}
