//go:build root

package bpf

import (
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// meanwhile runs an act over and over until the test calls what it gives.
func meanwhile(act func(round uint64)) (end func()) {
	stop := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		for round := uint64(0); ; round++ {
			select {
			case <-stop:
				return
			default:
				act(round)
			}
		}
	})
	return func() { close(stop); running.Wait() }
}

func TestFoldingWhileOthersTakeEveryFreeKeyLosesNothing(t *testing.T) {
	p := opened(t, Options{Scope: 1 << 50}) // of which no socket is
	const keys, each = 300, 1000
	for flight := range uint32(keys) {
		key := netattrKey{Cgroup: 7 + uint64(flight), Flight: 1 + flight, Class: uint8(traffic.Weights), Locality: uint8(traffic.OffNode)}
		if err := p.maps.Acct.Put(key, netattrCounts{Received: each}); err != nil {
			t.Fatal(err)
		}
	}
	fill := func(round uint64) {
		_ = p.maps.Acct.Update(netattrKey{Cgroup: 1<<40 + round}, netattrCounts{}, ebpf.UpdateNoExist)
	}
	for round := range uint64(MaxKeys) {
		fill(1<<30 + round)
	}
	end := meanwhile(fill)
	for flight := range uint32(keys) {
		key := Key{Cgroup: 7 + uint64(flight), Flight: 1 + flight, Class: traffic.Weights, Locality: traffic.OffNode}
		into := Key{Cgroup: Folded, Class: key.Class, Locality: key.Locality}
		if flight%2 == 0 {
			into = key
			into.Flight = 0
		}
		_ = p.Fold(key, into) // that there is no room is no loss
	}
	end()
	counts, err := p.Counts()
	if err != nil {
		t.Fatal(err)
	}
	var sum uint64
	for _, c := range counts {
		sum += c.Received
	}
	if sum != keys*each {
		t.Errorf("%d bytes are left of %d", sum, keys*each)
	}
	if got := counts[Key{Cgroup: Folded, Class: traffic.Weights, Locality: traffic.OffNode}].Received; got != keys/2*each {
		t.Errorf("%d bytes are folded though there is always room for them, want %d", got, keys/2*each)
	}
}

func TestCountsAreReadOnceWhileAnotherProcessTakesKeysOut(t *testing.T) {
	p := opened(t, Options{Scope: 1 << 50})
	const keys = 2000
	for cgroup := range uint64(keys) {
		if err := p.maps.Acct.Put(netattrKey{Cgroup: 1 + cgroup}, netattrCounts{Received: 1000}); err != nil {
			t.Fatal(err)
		}
	}
	end := meanwhile(func(round uint64) {
		key := netattrKey{Cgroup: 1 + round%keys}
		_ = p.maps.Acct.Delete(key)
		_ = p.maps.Acct.Put(key, netattrCounts{Received: 1000})
	})
	defer end()
	for range 100 {
		counts, err := p.Counts()
		if err != nil {
			t.Fatal(err)
		}
		for key, c := range counts {
			if c.Received > 1000 {
				t.Fatalf("%+v has %d bytes, want 1000", key, c.Received)
			}
		}
	}
}
