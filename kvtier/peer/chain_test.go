package peer

import (
	"bytes"
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// storeChain stores blocks of which each follows the one before.
func storeChain(t *testing.T, n *kvtier.Namespace, count, size int) []block.Key {
	t.Helper()
	var keys []block.Key
	for i := range count {
		opts := kvtier.PutOptions{HasParent: i > 0}
		if i > 0 {
			opts.Parent = keys[i-1]
		}
		p, err := n.Put(keyOf(i), size, opts)
		if err != nil {
			t.Fatal(err)
		}
		copy(p.Bytes(), content(i, size))
		p.Fill(size)
		if err := p.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, keyOf(i))
	}
	return keys
}

// chained says whether each block here follows the one before it.
func chained(n *kvtier.Namespace, keys []block.Key) bool {
	parents, known := make([]block.Key, len(keys)), make([]bool, len(keys))
	n.Parents(keys, parents, known)
	for i := range keys {
		if known[i] != (i > 0) || i > 0 && parents[i] != keys[i-1] {
			return false
		}
	}
	return true
}

func TestBlocksComeWithTheirPlaceInTheChainWhateverTheOrder(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	keys := storeChain(t, giver.Namespace, 8, 5000)
	for name, places := range map[string][]int{"in order": {0, 1, 2, 3, 4, 5, 6, 7}, "odd ones last": {0, 2, 4, 6, 1, 3, 5, 7}} {
		taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}, Connections: 1})
		for _, i := range places {
			if got := comes(t, taker, keys[i]); !bytes.Equal(got, content(i, 5000)) {
				t.Fatalf("%s: block %d is another", name, i)
			}
		}
		if !chained(taker.Namespace, keys) {
			t.Errorf("%s: blocks that came are no chain", name)
		}
	}
}

func TestWhatAPeerTakesIsGivenAndNoHitOfTheGivers(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, 5000))
	before := giver.Tenant().Stats()
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: giver.addr}}})
	comes(t, taker, keyOf(1))
	if gotten(t, taker, keyOf(2)) != nil {
		t.Fatal("a block is found that no node has")
	}
	if after := giver.Tenant().Stats(); after != before {
		t.Errorf("the giver's tenant has\n%+v, before it had\n%+v", after, before)
	}
	if s := giver.server.Stats(); s.Blocks != 1 || s.BlockBytes != 5000 {
		t.Errorf("given are %+v", s)
	}
	if s := taker.Tenant().Stats(); s.RAM.Hits != 1 || s.Misses != 1 {
		t.Errorf("of one hit and one miss %d and %d are counted where the blocks came", s.RAM.Hits, s.Misses)
	}
}

func TestACallerOfVersion1IsGivenBlocksWithoutParents(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	keys := storeChain(t, giver.Namespace, 2, 100)
	for version, want := range map[uint16]kind{1: kindBlock, 2: kindChild} {
		c := dial(t, giver)
		c.send(hello{1, version}.append(nil))
		if h, err := parseHello(c.read(helloSize)); err != nil || h != (hello{version, version}) {
			t.Fatalf("the answer to version %d is %+v, %v", version, h, err)
		}
		c.send(request{kindGet, 1, giver.ID(), []entry{{keys[1], 100}, {keys[0], 100}}}.append(nil))
		h, err := parseHead(c.read(blockSize))
		if err != nil || h.kind != want {
			t.Fatalf("version %d: %+v, %v", version, h, err)
		}
		if want == kindChild {
			if parent, err := parseParent(c.read(parentSize)); err != nil || parent != keys[0] {
				t.Fatalf("the parent is %v, %v", parent, err)
			}
		}
		if !bytes.Equal(c.read(100), content(1, 100)) {
			t.Fatalf("version %d: other bytes", version)
		}
		if h, err = parseHead(c.read(blockSize)); err != nil || h.kind != kindBlock {
			t.Fatalf("version %d: the first of the chain is %+v, %v", version, h, err)
		}
	}
}

func TestAPeerOfVersion1IsUnderstoodAndMayTellNoParents(t *testing.T) {
	t.Parallel()
	for tells, want := range map[bool]bool{false: true, true: false} {
		addr := rogueOf(t, 1, func(r request, to net.Conn) bool {
			if r.kind == kindHas {
				return write(to, yes(r, 100))
			}
			data := content(1, 100)
			h := right(r, 0, data)
			if !tells {
				return write(to, h.append(nil), data)
			}
			h.kind = kindChild
			return write(to, appendParent(h.append(nil), keyOf(0)), data)
		})
		taker := newTaker(t, Options{List: []Peer{{Name: "old", Addr: addr}}})
		if came := gotten(t, taker, keyOf(1)) != nil; came != want {
			t.Errorf("a block came: %t, want %t", came, want)
		}
		if s := taker.peers.Stats(); (s.Damaged == 1) != tells {
			t.Errorf("counted are %+v", s)
		}
	}
}

// A parent is a hint: no lie about it brings more than another order of eviction.
func TestLiesAboutParentsDoNoHarm(t *testing.T) {
	t.Parallel()
	lies := map[int]block.Key{1: keyOf(1), 2: keyOf(3), 3: keyOf(2), 4: keyOf(99)}
	addr := rogue(t, func(r request, to net.Conn) bool {
		if r.kind == kindHas {
			return write(to, yes(r, 100))
		}
		for i, e := range r.entries {
			data := content(int(e.key.Group), 100)
			h := right(r, i, data)
			h.kind = kindChild
			if !write(to, appendParent(h.append(nil), lies[int(e.key.Group)]), data) {
				return false
			}
		}
		return true
	})
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: addr}}})
	for n := 1; n <= 4; n++ {
		if got := comes(t, taker, keyOf(n)); !bytes.Equal(got, content(n, 100)) {
			t.Errorf("block %d is another", n)
		}
	}
	for n := 1; n <= 4; n++ {
		if removed, err := taker.Delete(context.Background(), keyOf(n)); removed != 1 || err != nil {
			t.Errorf("block %d: %d, %v", n, removed, err)
		}
	}
	if s := taker.Tenant().Stats(); s.Total != 0 || s.RAM.Used != 0 || s.RAM.Budget != 64*units.MiB {
		t.Errorf("left is %+v", s)
	}
}

func TestWhatWasDroppedIsNotGivenBackForAMinute(t *testing.T) {
	t.Parallel()
	for name, drop := range map[string]func(b *Blocks){
		"a block": func(b *Blocks) { b.peers.Dropped(b.ID(), keyOf(1)) },
		"all":     func(b *Blocks) { b.peers.DroppedAll(b.ID()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				let := make(chan struct{})
				b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) {
					converse(conn, Version, func(r request, to net.Conn) bool {
						if r.kind == kindHas {
							return write(to, yes(r, 100))
						}
						<-let
						data := content(1, 100)
						return write(to, right(r, 0, data).append(nil), data)
					})
				})
				defer b.end()
				if _, ok := b.Lookup(keyOf(1)); !ok {
					t.Fatal("not found")
				}
				synctest.Wait() // the block is on its way
				drop(b.Blocks)
				let <- struct{}{}
				synctest.Wait()
				if local(t, b.Blocks, keyOf(1)) != nil {
					t.Error("what was on its way is stored")
				}
				time.Sleep(deletedFor - time.Second)
				if _, ok := b.Lookup(keyOf(1)); ok || gotten(t, b.Blocks, keyOf(1)) != nil {
					t.Error("it is given back within a minute")
				}
				if want := name == "a block"; want {
					if _, ok := b.Lookup(keyOf(2)); !ok {
						t.Error("another block is not found")
					}
				}
				close(let)
				time.Sleep(2 * time.Second)
				if _, ok := b.Lookup(keyOf(1)); !ok {
					t.Error("it is never given again")
				}
			})
		})
	}
}
