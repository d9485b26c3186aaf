package peer

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

func TestABlockOfAnotherNodeIsFoundAndFetchedOnce(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	giver := newGiver(t, ServerOptions{TLS: a.server(identity.RoleAgent)})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}, TLS: a.client(identity.RoleAgent)})
	for key, size := range []int{1, 4096, 300 * kib, 3 << 20} {
		store(t, giver.Namespace, keyOf(key), content(key, size))
		if got, ok := taker.Lookup(keyOf(key)); !ok || got != size {
			t.Fatalf("a lookup gives %d, %t, want %d", got, ok, size)
		}
		for range 3 {
			if got := gotten(t, taker, keyOf(key)); !bytes.Equal(got, content(key, size)) {
				t.Fatalf("a block of %d bytes came with %d bytes that differ", size, len(got))
			}
		}
		pin, ok := taker.Pin(keyOf(key))
		if !ok || pin.Size() != size {
			t.Fatal("a block that has come is not pinned")
		}
		pin.Release()
	}
	if _, ok := taker.Lookup(keyOf(99)); ok || gotten(t, taker, keyOf(99)) != nil {
		t.Error("a block is found that no node has")
	}
	s, g := taker.peers.Stats(), giver.server.Stats()
	if s.Blocks != 4 || g.Blocks != 4 || s.Asked != 5 || s.Found != 4 || s.Tokens != 64 {
		t.Errorf("4 blocks of 5 went over: %+v, %+v", s, g)
	}
	if want := int64(1 + 4096 + 300*kib + 3<<20); s.BlockBytes != want || s.BytesIn < want || g.BytesOut < want || s.BytesIn > want+want/50+16*kib {
		t.Errorf("counted %d bytes in and %d out for %d", s.BytesIn, g.BytesOut, want)
	}
	if s.Failed+s.Absent+s.Damaged+s.Gated+s.Full+s.NoRoom != 0 || s.Peers[0].Failures != 0 || !s.Peers[0].Asked || s.Awaited != 0 {
		t.Errorf("nothing failed, told is %+v", s)
	}
}

func TestAPinTakesABlockThatIsOnItsWay(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}})
	store(t, giver.Namespace, keyOf(1), content(1, 5<<20))
	pin, ok := taker.Pin(keyOf(1))
	if !ok {
		t.Fatal("not pinned")
	}
	defer pin.Release()
	if got := local(t, taker, keyOf(1)); !bytes.Equal(got, content(1, 5<<20)) {
		t.Error("what is pinned is not here")
	}
}

func TestPeersOfOtherZonesAreAskedOnlyWhereThatIsSaidAndAfterTheNearOnes(t *testing.T) {
	t.Parallel()
	near, far := newGiver(t, ServerOptions{}), newGiver(t, ServerOptions{})
	store(t, far.Namespace, keyOf(1), content(1, 100))
	store(t, near.Namespace, keyOf(2), content(2, 100))
	store(t, far.Namespace, keyOf(2), content(2, 100))
	list := []Peer{{Name: "far", Addr: far.addr, Zone: "z2"}, {Name: "near", Addr: near.addr, Zone: "z1"}}

	own := newTaker(t, Options{List: list, Zone: "z1"})
	if gotten(t, own, keyOf(1)) != nil {
		t.Error("a block of another zone came")
	}
	comes(t, own, keyOf(2))
	if far.server.Stats().Accepted != 0 {
		t.Error("a peer of another zone was called")
	}

	all := newTaker(t, Options{List: list, Zone: "z1", AllZones: true})
	comes(t, all, keyOf(1))
	comes(t, all, keyOf(2))
	if s := far.server.Stats(); s.Blocks != 1 || s.Found+s.NotFound != 1 {
		t.Errorf("the far peer was asked for what a near one has: %+v", s)
	}
}

func TestOfThreeNodesAnyGivesABlock(t *testing.T) {
	t.Parallel()
	first, second := newGiver(t, ServerOptions{}), newGiver(t, ServerOptions{})
	store(t, first.Namespace, keyOf(1), content(1, 100*kib))
	store(t, second.Namespace, keyOf(2), content(2, 100*kib))
	taker := newTaker(t, Options{List: []Peer{{Name: "1", Addr: first.addr}, {Name: "2", Addr: second.addr}}})
	for key := 1; key <= 2; key++ {
		if got := comes(t, taker, keyOf(key)); !bytes.Equal(got, content(key, 100*kib)) {
			t.Errorf("block %d came with other bytes", key)
		}
	}
}

func TestManyWhoWantABlockMakeOneQuestionAndOneTransfer(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, 2<<20))
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}})
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			if got := gotten(t, taker, keyOf(1)); !bytes.Equal(got, content(1, 2<<20)) {
				t.Error("it did not come to one of them")
			}
		})
	}
	all.Wait()
	if s := giver.server.Stats(); s.Blocks != 1 || s.Found != 1 || s.NotFound != 0 {
		t.Errorf("more than one question or transfer for a block: %+v", s)
	}
}

func TestOnlyTenantsThatShareAreServedAndOthersLookLikeNothing(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	cache := newCache(t, units.MiB)
	hidden := addTenant(t, cache, kvtier.TenantSpec{Name: "b", Memory: 64 * units.KiB})
	claim := addTenant(t, cache, kvtier.TenantSpec{Kind: kvtier.TenantClaim, Name: "a", Memory: 64 * units.KiB})
	for _, n := range []*kvtier.Namespace{hidden, claim, giver.Namespace} {
		store(t, n, keyOf(1), content(1, 100))
	}
	c := call(t, giver)
	var answers [][]byte
	for i, space := range []block.Namespace{hidden.ID(), claim.ID(), {1, 2, 3}} {
		c.send(request{kindHas, uint32(2*i + 1), space, []entry{{key: keyOf(1)}}}.append(nil))
		answer := c.read(hasSize + 4)
		c.send(request{kindGet, uint32(2*i + 2), space, []entry{{keyOf(1), 100}}}.append(nil))
		answer = append(answer, c.read(blockSize)...)
		// But for the numbers of the requests, and the sums over them.
		for _, at := range []int{4, 8, 9, 10, 11, 12, 13, 14, 15, 24} {
			answer[at] = 0
		}
		answers = append(answers, answer[:hasSize+4+64])
	}
	if !bytes.Equal(answers[0], answers[2]) || !bytes.Equal(answers[1], answers[2]) {
		t.Errorf("a tenant that does not share is told from nothing:\n%x\n%x\n%x", answers[0], answers[1], answers[2])
	}
	if s := giver.server.Stats(); s.Blocks != 0 || s.Absent != 3 || s.Found != 0 {
		t.Errorf("told of it: %+v", s)
	}
}

func TestWhoIsNoAgentIsRefusedOnBothSides(t *testing.T) {
	t.Parallel()
	a, other := newAuthority(t), newAuthority(t)
	giver := newGiver(t, ServerOptions{TLS: a.server(identity.RoleAgent)})
	store(t, giver.Namespace, keyOf(1), content(1, 100))
	for name, config := range map[string]Options{
		"a router calls":               {TLS: a.client(identity.RoleRouter)},
		"a client calls":               {TLS: a.client(identity.RoleClient)},
		"one of another authority":     {TLS: other.client(identity.RoleAgent)},
		"somebody without certificate": {},
	} {
		config.List = []Peer{{Name: "g", Addr: giver.addr}}
		taker := newTaker(t, config)
		if gotten(t, taker, keyOf(1)) != nil {
			t.Errorf("%s and gets a block", name)
		}
		if s := taker.peers.Stats(); s.Peers[0].Failures != 1 || s.Peers[0].Asked {
			t.Errorf("%s, and the peer does not count as failed: %+v", name, s)
		}
	}
	for giver.server.Stats().Connections > 0 {
		runtime.Gosched()
	}
	if s := giver.server.Stats(); s.Strangers != 4 || s.Found+s.NotFound != 0 {
		t.Errorf("4 strangers called, counted are %+v", s)
	}
	router := newGiver(t, ServerOptions{TLS: a.server(identity.RoleRouter)})
	store(t, router.Namespace, keyOf(1), content(1, 100))
	taker := newTaker(t, Options{List: []Peer{{Name: "r", Addr: router.addr}}, TLS: a.client(identity.RoleAgent)})
	if gotten(t, taker, keyOf(1)) != nil || router.server.Stats().Found != 0 {
		t.Error("a server that is no agent is asked")
	}
}

func TestAPeerThatBeganAnewGivesBlocksAtOnce(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}, Connections: 1})
	store(t, giver.Namespace, keyOf(1), content(1, 100))
	if gotten(t, taker, keyOf(1)) == nil {
		t.Fatal("the first block does not come")
	}
	giver.end()
	l, err := identity.ListenTCP(context.Background(), giver.addr, identity.StalledTimeout)
	if err != nil {
		t.Fatal(err)
	}
	second := NewServer(ServerOptions{})
	second.Share(giver.Tenant())
	serve(t, second, l)
	store(t, giver.Namespace, keyOf(2), content(2, 100))
	if got := gotten(t, taker, keyOf(2)); !bytes.Equal(got, content(2, 100)) {
		t.Error("no block came from a peer that began anew")
	}
	if s := taker.peers.Stats(); s.Peers[0].Failures != 0 || second.Stats().Blocks != 1 {
		t.Errorf("its restart counts as a failure: %+v", s)
	}
}

func TestNothingIsAskedBeforeAndAfterRun(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, 100))
	p := New(Options{List: []Peer{{Name: "g", Addr: giver.addr}}})
	b := p.Blocks(addTenant(t, newCache(t, units.MiB), kvtier.TenantSpec{Name: "a", Memory: units.MiB}))
	check := func() {
		if _, ok := b.Lookup(keyOf(1)); ok || gotten(t, b, keyOf(1)) != nil || giver.server.Stats().Accepted != 0 {
			t.Error("a peer is asked while nothing runs")
		}
	}
	check()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.Run(ctx); err != nil {
		t.Fatal(err)
	}
	check()
}

func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	for range maxOfCaller {
		c := call(t, giver)
		c.send(request{kindHas, 1, giver.ID(), []entry{{key: keyOf(1)}}}.append(nil))
		c.read(hasSize + 4) // by now it is counted
	}
	c := dial(t, giver)
	c.send(hello{lowest, Version}.append(nil))
	c.read(helloSize)
	c.ended()
	giver.end()
	if s := giver.server.Stats(); s.Refused != 1 {
		t.Errorf("refused are %d", s.Refused)
	}
}

func TestATenantThatSharesNoMoreLooksLikeNothingAtOnce(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, 100))
	c := call(t, giver)
	for number, want := range []int{100, 0} {
		c.send(request{kindHas, uint32(number + 1), giver.ID(), []entry{{key: keyOf(1)}}}.append(nil))
		sizes := make([]int, 1)
		if err := parseSizes(c.read(hasSize+4), uint32(number+1), sizes); err != nil || sizes[0] != want {
			t.Errorf("told %d bytes, want %d: %v", sizes[0], want, err)
		}
		giver.server.Unshare(giver.Tenant())
	}
}
