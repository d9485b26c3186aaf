package peer

import (
	"bytes"
	"net"
	"testing"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/gate"
)

// holding is a peer that has every block, and sends it when it is let.
func holding(t *testing.T, size int) (addr string, asked chan request, let chan struct{}) {
	t.Helper()
	asked, let = make(chan request, 16), make(chan struct{})
	addr = rogue(t, func(r request, to net.Conn) bool {
		if r.kind == kindHas {
			return write(to, yes(r, size))
		}
		asked <- r
		<-let
		for i, e := range r.entries {
			data := content(int(e.key.Group), size)
			if !write(to, right(r, i, data).append(nil), data) {
				return false
			}
		}
		return true
	})
	return addr, asked, let
}

func TestABlockDeletedHereWhileItIsOnItsWayIsNotStored(t *testing.T) {
	t.Parallel()
	addr, asked, let := holding(t, 100)
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: addr}}})
	if _, ok := taker.Lookup(keyOf(1)); !ok {
		t.Fatal("not found")
	}
	<-asked
	if removed, err := taker.Delete(t.Context(), keyOf(1)); removed != 0 || err != nil {
		t.Fatal(removed, err)
	}
	taker.peers.mu.Lock()
	f := taker.peers.flights[name{taker.ID(), keyOf(1)}]
	taker.peers.mu.Unlock()
	close(let)
	<-f.done
	if local(t, taker, keyOf(1)) != nil {
		t.Error("it came back")
	}
	if _, ok := taker.Lookup(keyOf(1)); ok || gotten(t, taker, keyOf(1)) != nil || taker.peers.Stats().Asked != 1 {
		t.Error("what was deleted here is fetched again at once")
	}
}

func TestWhatIsStoredHereStandsOverWhatComes(t *testing.T) {
	t.Parallel()
	addr, asked, let := holding(t, 100)
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: addr}}})
	if _, ok := taker.Lookup(keyOf(1)); !ok {
		t.Fatal("not found")
	}
	<-asked
	store(t, taker.Namespace, keyOf(1), content(7, 300))
	taker.peers.mu.Lock()
	f := taker.peers.flights[name{taker.ID(), keyOf(1)}]
	taker.peers.mu.Unlock()
	close(let)
	<-f.done
	if got := gotten(t, taker, keyOf(1)); !bytes.Equal(got, content(7, 300)) {
		t.Error("the block that was stored here is gone")
	}
}

func TestABlockThatIsComputedSoonerIsNotFetched(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, 1<<20))
	// 16 tokens take 1 ms, the transfer 500 us and a MiB at 1.2 GB/s: 1.37 ms.
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}}, func(s *kvtier.TenantSpec) { s.PrefillRate = 16_000 })
	if _, ok := taker.Lookup(keyOf(1)); ok || gotten(t, taker, keyOf(1)) != nil {
		t.Error("it is fetched")
	}
	if s := taker.peers.Stats(); s.Gated != 2 || s.Blocks != 0 || s.Asked != 1 || giver.server.Stats().Blocks != 0 {
		t.Errorf("%+v", s)
	}
}

func TestTheGateKnowsWhatWaitsBeforeABlock(t *testing.T) {
	t.Parallel()
	p := New(Options{List: []Peer{{Name: "g"}}})
	p.running = true
	r := p.remotes[0]
	n := addTenant(t, newCache(t, 1<<20), kvtier.TenantSpec{Name: "a", Memory: 1 << 20})
	anew := gate.Recompute{Tokens: 16, Rate: 1600} // 10 ms: 11.4 MB
	flying := 0
	for key := range 100 {
		if p.flyLocked(n, name{n.ID(), keyOf(key)}, r, 1<<20, anew) != nil {
			flying++
		}
	}
	if flying != 10 || p.Stats().Gated != 90 {
		t.Errorf("%d blocks are fetched of which each waits for those before, %d are gated", flying, p.Stats().Gated)
	}
	// Nobody knows how long computing takes: 2 s are the bound.
	flying = 0
	for key := range 100 {
		if p.flyLocked(n, name{n.ID(), keyOf(1000 + key)}, r, 64<<20, gate.Recompute{}) != nil {
			flying++
		}
	}
	if flying != 35 {
		t.Errorf("%d blocks of 64 MiB are fetched", flying)
	}
	p.abandon()
	if load := r.speed.Load(0); load.Queued != 0 || len(p.flights) != 0 {
		t.Errorf("%d bytes wait in the end", load.Queued)
	}
}

func TestARowThatIsFullIsAMiss(t *testing.T) {
	t.Parallel()
	p := New(Options{List: []Peer{{Name: "g"}}})
	p.running = true
	r := p.remotes[0]
	n := addTenant(t, newCache(t, 1<<20), kvtier.TenantSpec{Name: "a", Memory: 1 << 20})
	for key := range rowLimit + 10 {
		_, _ = p.seek(n, name{n.ID(), keyOf(key)}, newHope())
		p.flyLocked(n, name{n.ID(), keyOf(key)}, r, 1, gate.Recompute{})
	}
	if len(p.questions) != rowLimit || len(p.flights) != rowLimit || p.Stats().Full != 10 {
		t.Errorf("%d questions, %d flights, %d too many", len(p.questions), len(p.flights), p.Stats().Full)
	}
	p.abandon()
}

func TestABlockGoneFromThePeerIsAbsent(t *testing.T) {
	t.Parallel()
	addr := rogue(t, func(r request, to net.Conn) bool {
		if r.kind == kindHas {
			return write(to, yes(r, 100))
		}
		return write(to, head{kindAbsent, 0, r.number, r.entries[0].key, 0, [16]byte{}}.append(nil))
	})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: addr}}})
	if gotten(t, taker, keyOf(1)) != nil {
		t.Error("it came")
	}
	if s := taker.peers.Stats(); s.Absent != 1 || s.Peers[0].Failures != 0 || s.Awaited != 0 {
		t.Errorf("%+v", s)
	}
}

func TestALookupThatComesWithTheBlockFindsIt(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}})
	for key := range 200 {
		store(t, giver.Namespace, keyOf(key), content(key, 64))
		if size, ok := taker.Lookup(keyOf(key)); !ok || size != 64 {
			t.Fatalf("block %d is not found: it was on its way, or had come", key)
		}
	}
}

func TestAPeerOfOtherVersionsIsLeftAloneAndTold(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	c := dial(t, giver)
	c.send(hello{Version + 1, Version + 3}.append(nil))
	if h, err := parseHello(c.read(helloSize)); err != nil || h != (hello{}) {
		t.Errorf("the answer is %+v, %v", h, err)
	}
	c.ended()
	c = dial(t, giver)
	c.send(hello{lowest, Version + 3}.append(nil))
	if h, err := parseHello(c.read(helloSize)); err != nil || h != (hello{Version, Version}) {
		t.Errorf("the answer is %+v, %v", h, err)
	}
	for h, want := range map[hello]uint16{{0, 0}: 0, {1, 1}: 1, {1, 9}: 2, {2, 9}: 2, {3, 9}: 0, {3, 1}: 0} {
		if got := h.common(); got != want {
			t.Errorf("%+v speaks %d with us, want %d", h, got, want)
		}
	}
}

func TestRequestsAheadAreAnsweredInTheirOrder(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	var sent []byte
	for key := range 40 {
		store(t, giver.Namespace, keyOf(key), content(key, 5000))
		sent = request{kindGet, uint32(key + 1), giver.ID(), []entry{{keyOf(key), 5000}, {keyOf(key), 4999}}}.append(sent)
	}
	c := call(t, giver)
	c.send(sent)
	for key := range 40 {
		h, err := parseHead(c.read(blockSize))
		if err != nil || !h.answers(uint32(key+1), 0, entry{keyOf(key), 5000}) || !bytes.Equal(c.read(5000), content(key, 5000)) {
			t.Fatalf("answer %d is %+v, %v", key, h, err)
		}
		if h, err = parseHead(c.read(blockSize)); err != nil || h.kind != kindAbsent || h.place != 1 {
			t.Fatalf("a block of another length is given: %+v, %v", h, err)
		}
	}
}
