package peer

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// bubble is a node that gets blocks and peers that it reaches by pipes, in a
// bubble of synctest.
type bubble struct {
	*Blocks
	dials atomic.Int64
	end   func()
}

// newBubble runs a Peers whose connections answer handles.
func newBubble(t *testing.T, opts Options, spec kvtier.TenantSpec, handle func(conn net.Conn)) *bubble {
	t.Helper()
	b := &bubble{}
	var all sync.WaitGroup
	opts.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		b.dials.Add(1)
		if handle == nil {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		ours, theirs := net.Pipe()
		all.Go(func() {
			defer func() { _ = theirs.Close() }()
			handle(theirs)
		})
		return ours, nil
	}
	if opts.List == nil {
		opts.List = []Peer{{Name: "g", Addr: "g:1"}}
	}
	spec.Name = "a"
	spec.Memory = 16 * units.MiB
	n := addTenant(t, newCache(t, 16*units.MiB), spec)
	p := New(opts)
	ctx, cancel := context.WithCancel(context.Background())
	all.Go(func() { _ = p.Run(ctx) })
	p.waitRunning()
	b.Blocks = p.Blocks(n)
	b.end = func() {
		cancel()
		all.Wait()
	}
	return b
}

func TestAPeerThatIsSilentHoldsALookupForAMomentAndNobodyAfterThat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, Options{}, kvtier.TenantSpec{}, nil)
		defer b.end()
		took := func(key int) time.Duration {
			began := time.Now()
			if _, ok := b.Lookup(keyOf(key)); ok {
				t.Error("a block is found that nobody has")
			}
			return time.Since(began)
		}
		if d := took(1); d != 2*time.Millisecond {
			t.Errorf("the first lookup waited %v, want 2ms", d)
		}
		time.Sleep(time.Millisecond)
		if d := took(1); d != 0 {
			t.Errorf("the same lookup later waited %v, want 0", d)
		}
		if d := took(2); d != 0 {
			t.Errorf("a lookup waited %v for a peer that is known to be slow", d)
		}
		time.Sleep(openWithin)
		if s := b.peers.Stats(); s.Peers[0].Failures != 1 || s.Peers[0].Asked || s.Unanswered != 2 {
			t.Errorf("the peer is not left alone: %+v", s)
		}
	})
}

func TestAPeerThatFailsIsAskedEverMoreSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, Options{}, kvtier.TenantSpec{}, func(net.Conn) {})
		defer b.end()
		key := 0
		for range 600 {
			for range 10 {
				key++
				b.Lookup(keyOf(key))
			}
			time.Sleep(time.Second)
		}
		// After 1, 2, 4, 8, 16 and then 30 seconds, in ten minutes.
		if n := b.dials.Load(); n < 20 || n > 30 {
			t.Errorf("it was called %d times in ten minutes", n)
		}
	})
}

func TestAGetWaitsNoLongerThanComputingTakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rate float64 // of prefill, tokens a second; 16 tokens are a block
		want time.Duration
	}{
		"computing takes 80 ms": {200, 80 * time.Millisecond},
		"computing takes 20 ms": {800, 20 * time.Millisecond},
		"nobody knows how long": {0, 50*time.Millisecond + 4*(500*time.Microsecond+time.Second/1200)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: c.rate}, func(conn net.Conn) {
					converse(conn, Version, func(r request, to net.Conn) bool {
						if r.kind == kindHas {
							return write(to, yes(r, 1e6))
						}
						time.Sleep(time.Hour)
						return false
					})
				})
				defer b.end()
				if size, ok := b.Lookup(keyOf(1)); !ok || size != 1e6 {
					t.Fatal("the block is not found")
				}
				began := time.Now()
				if gotten(t, b.Blocks, keyOf(1)) != nil {
					t.Error("a block came that nobody sent")
				}
				if took := time.Since(began); took < c.want-time.Microsecond || took > c.want+time.Microsecond {
					t.Errorf("waited %v, want %v", took, c.want)
				}
				time.Sleep(pieceWithin)
				synctest.Wait()
				s := b.peers.Stats()
				if s.WaitedOut != 1 || s.Failed != 1 || s.Awaited != 0 || s.Peers[0].Failures != 1 {
					t.Errorf("the transfer is not given up: %+v", s)
				}
				if used := b.Tenant().Stats().RAM.Used; used != 0 {
					t.Errorf("%d bytes of RAM are kept for it", used)
				}
			})
		})
	}
}

func TestABlockThatTricklesIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const size = 4 << 20
		b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) {
			converse(conn, Version, func(r request, to net.Conn) bool {
				if r.kind == kindHas {
					return write(to, yes(r, size))
				}
				data := content(1, size)
				if !write(to, right(r, 0, data).append(nil)) {
					return false
				}
				for len(data) > 0 {
					time.Sleep(time.Second)
					if !write(to, data[:piece]) {
						return false
					}
					data = data[piece:]
				}
				return true
			})
		})
		defer b.end()
		began := time.Now()
		if gotten(t, b.Blocks, keyOf(1)) != nil {
			t.Error("it came")
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("given up after %v", took)
		}
	})
}

func TestAPinWaitsAMomentForABlockOnItsWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t, Options{}, kvtier.TenantSpec{}, func(conn net.Conn) {
			converse(conn, Version, func(r request, to net.Conn) bool {
				if r.kind == kindHas {
					return write(to, yes(r, 100))
				}
				time.Sleep(time.Second)
				data := content(int(r.entries[0].key.Group), 100)
				return write(to, right(r, 0, data).append(nil), data)
			})
		})
		defer b.end()
		began := time.Now()
		if _, ok := b.Pin(keyOf(1)); ok || time.Since(began) != 5*time.Millisecond {
			t.Errorf("pinned %t after %v, want no after 5ms", ok, time.Since(began))
		}
		time.Sleep(2 * time.Second)
		pin, ok := b.Pin(keyOf(1))
		if !ok {
			t.Fatal("what has come since is not pinned")
		}
		pin.Release()
	})
}

func TestWhatIsKnownIsForgottenWithTimeAndFailures(t *testing.T) {
	t.Parallel()
	m, r, other := newMemory(3), &remote{}, &remote{}
	id := func(n int) name { return name{key: keyOf(n)} }
	m.learn(id(1), place{remote: r, size: 7, until: 10})
	m.learn(id(2), place{until: 5})
	for now, want := range map[time.Duration][2]bool{0: {true, true}, 4: {true, true}} {
		_, one := m.find(id(1), now)
		_, two := m.find(id(2), now)
		if [2]bool{one, two} != want {
			t.Errorf("at %d known are %t, %t", now, one, two)
		}
	}
	if _, ok := m.find(id(2), 5); ok {
		t.Error("an absence is known for ever")
	}
	if at, ok := m.find(id(1), 9); !ok || at.size != 7 || at.remote != r {
		t.Error("a place is forgotten too soon")
	}
	other.round.Add(1)
	if _, ok := m.find(id(1), 9); !ok {
		t.Error("another peer's failure counts")
	}
	r.round.Add(1)
	if _, ok := m.find(id(1), 9); ok {
		t.Error("a peer failed and is still believed")
	}
	for n := range 100 {
		m.learn(id(n), place{until: 1000})
		m.learn(id(0), place{until: 1000})
		if len(m.of) > 3 || len(m.ring) > 3 {
			t.Fatalf("%d are kept, the bound is 3", len(m.of))
		}
	}
	if _, ok := m.find(id(0), 1); !ok {
		t.Error("what was learned last is not known")
	}
}

func TestAnAbsenceIsRememberedForSecondsAndNoLonger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var questions atomic.Int64
		var has atomic.Bool
		b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) {
			converse(conn, Version, func(r request, to net.Conn) bool {
				if r.kind == kindHas {
					questions.Add(1)
					if has.Load() {
						return write(to, yes(r, 100))
					}
					return write(to, yes(r, 0))
				}
				data := content(1, 100)
				return write(to, right(r, 0, data).append(nil), data)
			})
		})
		defer b.end()
		for range 5 {
			b.Lookup(keyOf(1))
			synctest.Wait()
		}
		if n := questions.Load(); n != 1 {
			t.Errorf("asked %d times for what is absent", n)
		}
		has.Store(true)
		time.Sleep(absentFor)
		if got := gotten(t, b.Blocks, keyOf(1)); !bytes.Equal(got, content(1, 100)) {
			t.Error("it is absent for ever")
		}
	})
}

func TestNobodyWaitsForPeersThatHaveNothingUntilTheyHave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var has atomic.Bool
		b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) {
			converse(conn, Version, func(r request, to net.Conn) bool {
				if r.kind == kindHas {
					time.Sleep(time.Millisecond)
					if has.Load() {
						return write(to, yes(r, 100))
					}
					return write(to, yes(r, 0))
				}
				data := content(int(r.entries[0].key.Group), 100)
				return write(to, right(r, 0, data).append(nil), data)
			})
		})
		defer b.end()
		key := 0
		took := func() time.Duration {
			key++
			began := time.Now()
			b.Lookup(keyOf(key))
			took := time.Since(began)
			time.Sleep(10 * time.Millisecond)
			return took
		}
		for range fullHope {
			if d := took(); d != time.Millisecond {
				t.Fatalf("lookup %d waited %v for an answer, want 1ms", key, d)
			}
		}
		if d := took(); d != 0 {
			t.Errorf("a lookup waited %v for peers that have nothing", d)
		}
		has.Store(true)
		if d := took(); d != 0 {
			t.Errorf("a lookup waited %v for peers that had nothing so far", d)
		}
		if size, ok := b.Namespace.Lookup(keyOf(key)); !ok || size != 100 {
			t.Error("what a peer has did not come after all")
		}
		if d := took(); d != time.Millisecond {
			t.Errorf("a lookup waited %v for a peer that has blocks, want 1ms", d)
		}
	})
}

func TestIdleConnectionsEndOnBothSides(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := addTenant(t, newCache(t, units.MiB), kvtier.TenantSpec{Name: "a", Memory: units.MiB})
		store(t, n, keyOf(1), content(1, 100))
		s := NewServer(ServerOptions{})
		s.Share(n.Tenant())
		b := newBubble(t, Options{}, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) { s.serve(context.Background(), conn) })
		defer b.end()
		if gotten(t, b.Blocks, keyOf(1)) == nil {
			t.Fatal("it does not come")
		}
		time.Sleep(idleAfter - time.Second)
		if s.Stats().Connections != 2 {
			t.Errorf("%d connections before the time, want 2", s.Stats().Connections)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if s.Stats().Connections != 0 {
			t.Error("the caller keeps what it does not use")
		}
		ours, theirs := net.Pipe()
		defer func() { _ = ours.Close() }()
		began, ended := time.Now(), make(chan struct{})
		go func() {
			defer close(ended)
			s.serve(context.Background(), theirs)
		}()
		if _, err := ours.Write(hello{lowest, Version}.append(nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := ours.Read(make([]byte, helloSize)); err != nil {
			t.Fatal(err)
		}
		<-ended
		if took := time.Since(began); took != serverIdle {
			t.Errorf("the server waited %v for a request, want %v", took, serverIdle)
		}
		ours2, theirs2 := net.Pipe()
		defer func() { _ = ours2.Close() }()
		began = time.Now()
		s.serve(context.Background(), theirs2)
		if took := time.Since(began); took != openWithin || s.Stats().Strangers != 1 {
			t.Errorf("the server waited %v for a hello, want %v", took, openWithin)
		}
	})
}

func TestWhoTakesNoBytesIsClosedAndHoldsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := addTenant(t, newCache(t, units.MiB), kvtier.TenantSpec{Name: "a", Memory: units.MiB})
		store(t, n, keyOf(1), content(1, 500*kib))
		s := NewServer(ServerOptions{})
		s.Share(n.Tenant())
		ours, theirs := net.Pipe()
		defer func() { _ = ours.Close() }()
		began, ended := time.Now(), make(chan struct{})
		go func() {
			defer close(ended)
			s.serve(context.Background(), theirs)
		}()
		if _, err := ours.Write(hello{lowest, Version}.append(nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := ours.Read(make([]byte, helloSize)); err != nil {
			t.Fatal(err)
		}
		if _, err := ours.Write(request{kindGet, 1, n.ID(), []entry{{keyOf(1), 500 * kib}}}.append(nil)); err != nil {
			t.Fatal(err)
		}
		<-ended
		if took := time.Since(began); took != ofServer.piece || s.Stats().Slow != 1 {
			t.Errorf("closed after %v, want %v; counted %d", took, ofServer.piece, s.Stats().Slow)
		}
		if removed, err := n.Delete(t.Context(), keyOf(1)); removed != 1 || err != nil {
			t.Error(removed, err)
		}
		if used := n.Tenant().Stats().RAM.Used; used != 0 {
			t.Errorf("%d bytes are held for who is gone", used)
		}
	})
}

// heldBack is a limiter that counts, and holds back until it is let go.
type heldBack struct {
	mu    sync.Mutex
	taken int
	let   chan struct{}
}

func (l *heldBack) WaitN(ctx context.Context, n int) error {
	l.mu.Lock()
	l.taken += n
	l.mu.Unlock()
	select {
	case <-l.let:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (l *heldBack) sum() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken
}

func TestTheLimitersHoldBackEveryByteAndCountAgainstNobody(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"caller", "server"} {
		synctest.Test(t, func(t *testing.T) {
			const size = 3 << 20
			limiter := &heldBack{let: make(chan struct{})}
			n := addTenant(t, newCache(t, 16*units.MiB), kvtier.TenantSpec{Name: "a", Memory: 16 * units.MiB})
			store(t, n, keyOf(1), content(1, size))
			var opts Options
			var server ServerOptions
			if side == "caller" {
				opts.Limiter = limiter
			} else {
				server.Limiter = limiter
			}
			s := NewServer(server)
			s.Share(n.Tenant())
			b := newBubble(t, opts, kvtier.TenantSpec{PrefillRate: 0.001}, func(conn net.Conn) { s.serve(context.Background(), conn) })
			defer b.end()
			got := make(chan []byte, 1)
			go func() { got <- gotten(t, b.Blocks, keyOf(1)) }()
			time.Sleep(100 * time.Millisecond)
			if stats := b.peers.Stats(); stats.BlockBytes != 0 || stats.BytesIn > 32*kib {
				t.Errorf("%s: %d bytes came past the limiter", side, stats.BytesIn)
			}
			close(limiter.let)
			if !bytes.Equal(<-got, content(1, size)) {
				t.Errorf("%s: it does not come when it may", side)
			}
			synctest.Wait()
			if sum, want := limiter.sum(), size+blockSize+hasSize+4; sum != want {
				t.Errorf("%s: the limiter was asked for %d bytes, want %d", side, sum, want)
			}
			if stats := b.peers.Stats(); stats.Peers[0].Failures != 0 {
				t.Errorf("%s: to be held back counts as a failure: %+v", side, stats)
			}
		})
	}
}

func TestALimiterThatHoldsBackForLongIsNoStall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pace := ofCaller.pace(slowly{time.Minute}, 100)
		before := pace.until
		until, err := pace.take(t.Context(), 10)
		if err != nil || pace.until.Sub(before) != time.Minute || time.Until(until) != time.Second+100*time.Second/(8<<20) {
			t.Errorf("the block has %v left, %v", time.Until(until), err)
		}
		ended, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("over")
		cancel(cause)
		if _, err := pace.take(ended, 10); !errors.Is(err, cause) {
			t.Errorf("the wait does not end: %v", err)
		}
	})
}

// slowly is a limiter that takes its time.
type slowly struct{ each time.Duration }

func (l slowly) WaitN(ctx context.Context, _ int) error {
	timer := time.NewTimer(l.each)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
