package peer

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// rogue is a peer that answers as a test says. answer gets each request and may
// write anything; where it says false the connection is closed.
func rogue(t testing.TB, answer func(r request, to net.Conn) bool) (addr string) {
	t.Helper()
	return rogueOf(t, Version, answer)
}

// rogueOf speaks one version.
func rogueOf(t testing.TB, version uint16, answer func(r request, to net.Conn) bool) (addr string) {
	t.Helper()
	l := listen(t)
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
				defer func() { _ = conn.Close() }()
				converse(conn, version, answer)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

// converse speaks for a rogue on one connection.
func converse(conn net.Conn, version uint16, answer func(r request, to net.Conn) bool) {
	in := bufio.NewReader(conn)
	greeting := make([]byte, helloSize)
	if _, err := io.ReadFull(in, greeting); err != nil {
		return
	}
	if _, err := conn.Write(hello{version, version}.append(nil)); err != nil {
		return
	}
	for {
		data := make([]byte, requestSize)
		if _, err := io.ReadFull(in, data); err != nil {
			return
		}
		n, err := entriesOf(data)
		if err != nil {
			return
		}
		data = append(data, make([]byte, n*entrySize)...)
		if _, err := io.ReadFull(in, data[requestSize:]); err != nil {
			return
		}
		r, err := parseRequest(data, nil)
		if err != nil || !answer(r, conn) {
			return
		}
	}
}

// yes answers a has: all blocks are there and have a size.
func yes(r request, size int) []byte {
	sizes := make([]int, len(r.entries))
	for i := range sizes {
		sizes[i] = size
	}
	return appendSizes(nil, r.number, sizes)
}

// right is the right header of a block.
func right(r request, place int, data []byte) head {
	return head{kindBlock, uint16(place), r.number, r.entries[place].key, uint32(len(data)), xxh3.Hash128(data).Bytes()}
}

func write(to net.Conn, pieces ...[]byte) bool {
	_, err := to.Write(bytes.Join(pieces, nil))
	return err == nil
}

const rogueSize = 700 * kib

func TestABlockThatIsNotWhatWasAskedForIsAMissAndThePeerIsLeftAlone(t *testing.T) {
	t.Parallel()
	data := content(1, rogueSize)
	other := bytes.Clone(data)
	other[rogueSize-1] ^= 1
	for what, answer := range map[string]func(r request) []byte{
		"other bytes": func(r request) []byte { return append(right(r, 0, data).append(nil), other...) },
		"another key": func(r request) []byte {
			h := right(r, 0, data)
			h.key.Hash[31] ^= 1
			return append(h.append(nil), data...)
		},
		"another group": func(r request) []byte {
			h := right(r, 0, data)
			h.key.Group++
			return append(h.append(nil), data...)
		},
		"a shorter block": func(r request) []byte { return append(right(r, 0, data[1:]).append(nil), data[1:]...) },
		"a longer block": func(r request) []byte {
			longer := append(bytes.Clone(data), 0)
			return append(right(r, 0, longer).append(nil), longer...)
		},
		"a huge block": func(r request) []byte {
			h := right(r, 0, data)
			h.size = 1<<32 - 1
			return append(h.append(nil), data...)
		},
		"an empty block": func(r request) []byte {
			h := right(r, 0, data)
			h.size = 0
			return h.append(nil)
		},
		"another place":   func(r request) []byte { h := right(r, 0, data); h.place = 1; return append(h.append(nil), data...) },
		"another request": func(r request) []byte { h := right(r, 0, data); h.number++; return append(h.append(nil), data...) },
		"another kind":    func(r request) []byte { h := right(r, 0, data); h.kind = 7; return append(h.append(nil), data...) },
		"another absent": func(r request) []byte {
			return head{kindAbsent, 0, r.number, keyOf(9), 0, [16]byte{}}.append(nil)
		},
		"noise": func(request) []byte { return content(5, 2*blockSize) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			addr := rogue(t, func(r request, to net.Conn) bool {
				if r.kind == kindHas {
					return write(to, yes(r, rogueSize))
				}
				return write(to, answer(r))
			})
			taker := newTaker(t, Options{List: []Peer{{Name: "rogue", Addr: addr}}})
			if got := gotten(t, taker, keyOf(1)); got != nil {
				t.Fatalf("%d bytes came", len(got))
			}
			s := taker.peers.Stats()
			if s.Damaged != 1 || s.Blocks != 0 || s.Awaited != 0 || s.Peers[0].Damaged != 1 || s.Peers[0].Asked {
				t.Errorf("the peer is not left alone: %+v", s)
			}
			if used := taker.Tenant().Stats().RAM.Used; used != 0 {
				t.Errorf("%d bytes of RAM are kept for it", used)
			}
			if gotten(t, taker, keyOf(2)) != nil || taker.peers.Stats().Asked != 1 {
				t.Error("it is asked again at once")
			}
		})
	}
}

func TestAnAnswerAboutBlocksThatCannotBeIsNone(t *testing.T) {
	t.Parallel()
	for what, answer := range map[string]func(r request) []byte{
		"huge blocks":     func(r request) []byte { return yes(r, 1<<32-1) },
		"more answers":    func(r request) []byte { return appendSizes(nil, r.number, []int{1, 1}) },
		"another request": func(r request) []byte { return appendSizes(nil, r.number+1, []int{1}) },
		"a block at once": func(r request) []byte { return right(r, 0, []byte{1}).append(nil) },
		"another sum": func(r request) []byte {
			data := yes(r, 1)
			data[hasSize]++
			return data
		},
	} {
		addr := rogue(t, func(r request, to net.Conn) bool { return write(to, answer(r)) })
		taker := newTaker(t, Options{List: []Peer{{Name: "rogue", Addr: addr}}})
		if _, ok := taker.Lookup(keyOf(1)); ok {
			t.Errorf("%s: a block is found", what)
		}
		if s := taker.peers.Stats(); s.Peers[0].Damaged != 1 || s.Asked != 0 {
			t.Errorf("%s: %+v", what, s)
		}
	}
}

func TestAConnectionThatEndsAmidABlockIsAMiss(t *testing.T) {
	t.Parallel()
	data := content(1, rogueSize)
	for _, after := range []int{0, 1, blockSize, blockSize + 1, blockSize + 300*kib, blockSize + rogueSize - 1} {
		addr := rogue(t, func(r request, to net.Conn) bool {
			if r.kind == kindHas {
				return write(to, yes(r, rogueSize))
			}
			_ = write(to, append(right(r, 0, data).append(nil), data...)[:after])
			if tcp, ok := to.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // ends it by a reset
			}
			return false
		})
		taker := newTaker(t, Options{List: []Peer{{Name: "rogue", Addr: addr}}})
		if gotten(t, taker, keyOf(1)) != nil {
			t.Errorf("a block came though its connection ended after %d bytes", after)
		}
		if s := taker.peers.Stats(); s.Failed != 1 || s.Blocks != 0 || s.Peers[0].Failures != 1 || s.Awaited != 0 {
			t.Errorf("after %d bytes: %+v", after, s)
		}
		if used := taker.Tenant().Stats().RAM.Used; used != 0 {
			t.Errorf("%d bytes of RAM are kept for it", used)
		}
	}
}

func TestEveryByteThatTurnsOnTheWayIsAMissOrNothing(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	const size = 40
	store(t, giver.Namespace, keyOf(1), content(1, size))
	n := addTenant(t, newCache(t, units.MiB), kvtier.TenantSpec{Name: "a", Memory: units.MiB, PrefillRate: 0.001})
	// What one question and one block take, each way, on one connection each.
	for _, way := range []struct {
		name  string
		bytes int
		from  bool
	}{
		{"from the peer", helloSize + max(hasSize+4, blockSize+size), true},
		{"to the peer", helloSize + requestSize + entrySize, false},
	} {
		for at := range way.bytes {
			p := New(Options{
				List: []Peer{{Name: "g", Addr: giver.addr}}, LookupWait: patientWait, Connections: 1,
				DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
					return &turning{Conn: conn, at: at, reads: way.from}, err
				},
			})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				_ = p.Run(ctx)
			}()
			p.waitRunning()
			if got := gotten(t, p.Blocks(n), keyOf(1)); got != nil {
				t.Errorf("%s: byte %d turned and a block came, the right one: %t", way.name, at, bytes.Equal(got, content(1, size)))
			}
			cancel()
			<-done
			if s := p.Stats(); s.Peers[0].Failures == 0 {
				t.Errorf("%s: byte %d turned and nobody saw it: %+v", way.name, at, s)
			}
		}
	}
}

// turning turns one byte of what is read, or written, by its place.
type turning struct {
	net.Conn
	at    int
	reads bool
}

func (c *turning) turn(b []byte) {
	if c.at >= 0 && c.at < len(b) {
		b[c.at] ^= 0x10
	}
	c.at -= len(b)
}

func (c *turning) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.reads {
		c.turn(b[:n])
	}
	return n, err
}

func (c *turning) Write(b []byte) (int, error) {
	if !c.reads {
		b = bytes.Clone(b)
		c.turn(b)
	}
	return c.Conn.Write(b)
}

func TestWhatMemoryChangedOnTheGiverIsAMissHere(t *testing.T) {
	t.Parallel()
	giver := newGiver(t, ServerOptions{})
	store(t, giver.Namespace, keyOf(1), content(1, rogueSize))
	// The sampled check on the giver is not to see it: 1 of 64.
	cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: t.TempDir(), Memory: 4 * units.MiB, VerifyEvery: 64})
	if err != nil {
		t.Fatal(err)
	}
	n := addTenant(t, cache, kvtier.TenantSpec{Name: "a", Memory: 4 * units.MiB})
	store(t, n, keyOf(1), content(1, rogueSize))
	got, err := n.Get(t.Context(), keyOf(1))
	if err != nil {
		t.Fatal(err)
	}
	got.Bytes()[rogueSize/2] ^= 4
	got.Release()
	s := NewServer(ServerOptions{})
	s.Share(n.Tenant())
	l := listen(t)
	t.Cleanup(func() { _ = cache.Close() })
	serve(t, s, l)
	taker := newTaker(t, Options{List: []Peer{{Name: "g", Addr: l.Addr().String()}}})
	if gotten(t, taker, keyOf(1)) != nil || taker.peers.Stats().Damaged != 1 {
		t.Errorf("changed bytes came: %+v", taker.peers.Stats())
	}
}

func TestBlocksAwaitedAreBounded(t *testing.T) {
	t.Parallel()
	const blocks, size, bound = 24, 256 * kib, 1 << 20
	var mu sync.Mutex
	var asked, most int
	held := make(chan struct{})
	full := make(chan struct{}, 1)
	addr := rogue(t, func(r request, to net.Conn) bool {
		if r.kind == kindHas {
			return write(to, yes(r, size))
		}
		mu.Lock()
		asked += len(r.entries) * size
		most = max(most, asked)
		if asked >= bound {
			select {
			case full <- struct{}{}:
			default:
			}
		}
		mu.Unlock()
		<-held
		for i, e := range r.entries {
			data := content(int(e.key.Group), size)
			mu.Lock()
			asked -= size
			mu.Unlock()
			if !write(to, right(r, i, data).append(nil), data) {
				return false
			}
		}
		return true
	})
	taker := newTaker(t, Options{List: []Peer{{Name: "rogue", Addr: addr}}, InFlight: bound})
	var all sync.WaitGroup
	for key := range blocks {
		all.Go(func() {
			if got := gotten(t, taker, keyOf(key)); !bytes.Equal(got, content(key, size)) {
				t.Errorf("block %d did not come", key)
			}
		})
	}
	<-full
	if awaited := taker.peers.Stats().Awaited; awaited > bound {
		t.Errorf("%d bytes are awaited", awaited)
	}
	close(held)
	all.Wait()
	mu.Lock()
	defer mu.Unlock()
	if most > bound {
		t.Errorf("%d bytes were asked for at a time, the bound is %d", most, bound)
	}
}

func TestATenantAwaitsNoMoreThanAQuarterOfItsRAM(t *testing.T) {
	t.Parallel()
	p := New(Options{})
	n := addTenant(t, newCache(t, 4*units.MiB), kvtier.TenantSpec{Name: "a", Memory: 4 * units.MiB})
	taken, err := p.takeRoom(t.Context(), n.Tenant(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.takeRoom(ended, n.Tenant(), 1); err == nil {
		t.Error("more than a quarter is awaited")
	}
	taken.giveBack(1 << 20)
	if taken, err = p.takeRoom(t.Context(), n.Tenant(), 64<<20); err != nil {
		t.Fatal("one block that is larger than that never comes")
	}
	taken.giveBack(64 << 20)
	if _, err := p.takeRoom(t.Context(), n.Tenant(), 1<<20); err != nil {
		t.Error("what was given back is not there")
	}
	if awaited := p.Stats().Awaited; awaited != 1<<20 {
		t.Errorf("%d bytes are awaited in the end", awaited)
	}
}
