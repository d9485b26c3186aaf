// Package localtest holds the suite that every implementation of local.Data
// passes, besides those of its Cache and KV in dradriver/stock/stocktest.
// Tests call it; it makes nothing itself.
package localtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
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
	// Pods are those that the data role was told last.
	Pods func() []netattr.Pod
	// Network changes what the data role tells of the network.
	Network func(seen local.Network, records []scaleout.Record)
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
	checkPods(t, rig)
	checkNetwork(t, rig, changed)

	ended, end := context.WithCancel(ctx)
	end()
	if _, err := rig.Data.Lend(ended, map[string]artifact.Digest{"late": rig.Good.Digest}); !errors.Is(err, context.Canceled) {
		t.Errorf("Lend under an ended context gave %v", err)
	}
	if err := rig.Data.SetPods(ended, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("SetPods under an ended context gave %v", err)
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

// checkPods tells which pods there are: as often as one likes, and whole.
func checkPods(t *testing.T, rig Rig) {
	t.Helper()
	pods := []netattr.Pod{{UID: "1", Namespace: "llm", Name: "engine-0", Engine: true}, {UID: "2", Namespace: "llm", Name: "tool"}}
	for _, list := range [][]netattr.Pod{pods, pods, pods[1:], nil} {
		if err := rig.Data.SetPods(t.Context(), list); err != nil {
			t.Errorf("SetPods of %v: %v", list, err)
		}
		if got := rig.Pods(); !slices.Equal(got, list) {
			t.Errorf("after SetPods of %v the pods are %v", list, got)
		}
	}
	many := make([]netattr.Pod, local.MaxPods+1)
	long := strings.Repeat("n", 253)
	for i := range many {
		many[i] = netattr.Pod{UID: fmt.Sprintf("%0128d", i), Namespace: long, Name: long, Engine: true}
	}
	if err := rig.Data.SetPods(t.Context(), many[1:]); err != nil || len(rig.Pods()) != local.MaxPods {
		t.Errorf("SetPods of as many as there may be gave %v and %d pods", err, len(rig.Pods()))
	}
	for name, list := range map[string][]netattr.Pod{
		"more than there may be": many, "no UID": {{Name: "n"}}, "an endless UID": {{UID: strings.Repeat("u", 129)}},
		"an endless name": {{UID: "1", Name: long + "n"}}, "an endless namespace": {{UID: "1", Namespace: long + "n"}},
	} {
		if err := rig.Data.SetPods(t.Context(), list); !errors.Is(err, artifact.ErrInvalid) {
			t.Errorf("SetPods of %s gave %v", name, err)
		}
	}
	if len(rig.Pods()) != local.MaxPods {
		t.Errorf("what was refused left %d pods", len(rig.Pods()))
	}
}

// checkNetwork changes what is seen and which scale-outs there are.
func checkNetwork(t *testing.T, rig Rig, changed <-chan struct{}) {
	t.Helper()
	seen := local.Network{Sight: "partial", Reason: "seed: not permitted", Off: []local.Sensor{{Name: "seed", Reason: "not permitted"}}}
	records := []scaleout.Record{{
		ID: "1", State: scaleout.StateRunning, Start: time.Unix(5, 0).UTC(), Sources: []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin, Bytes: 4}},
		Shares: []scaleout.Share{{Pod: "llm/engine-0", Class: "serving", Locality: "off_node", Bytes: scaleout.Bytes{Received: 3}}},
		Series: []scaleout.Point{{Seconds: 1}},
	}}
	for i := range 20 {
		records = append(records, scaleout.Record{ID: strconv.Itoa(100 - i), State: scaleout.StateReady, Shares: []scaleout.Share{}})
	}
	rig.Network(seen, records)
	var state local.State
	until(t, changed, "what is seen of the network", func() bool {
		state, _ = rig.Data.Snapshot()
		return seen.Equal(state.Network)
	})
	want := slices.Clone(records[:17])
	want[0].Series = nil
	if difference := cmp.Diff(want, state.ScaleOuts); difference != "" {
		t.Errorf("the scale-outs are not those that run and the latest 16 without their course: %s", difference)
	}
	for i := range records {
		records[i].State, records[i].Shares = scaleout.StateRunning, make([]scaleout.Share, 200)
	}
	rig.Network(local.Network{Sight: "full"}, records)
	until(t, changed, "more scale-outs than there is room for", func() bool {
		state, _ = rig.Data.Snapshot()
		return state.Network != nil && state.Network.Sight == "full"
	})
	if n := len(state.ScaleOuts); n == 0 || n == len(records) || state.ScaleOuts[0].ID != "1" {
		t.Errorf("of %d large scale-outs %d were told", len(records), n)
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
