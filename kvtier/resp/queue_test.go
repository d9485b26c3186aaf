package resp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"path"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// onBothNetworks runs a test over a unix socket and over TCP.
func onBothNetworks(t *testing.T, test func(t *testing.T, start func(t *testing.T, options Options, access Access) *serving)) {
	t.Run("unix", func(t *testing.T) {
		t.Parallel()
		test(t, serve)
	})
	t.Run("tcp", func(t *testing.T) {
		t.Parallel()
		test(t, func(t *testing.T, options Options, access Access) *serving {
			t.Helper()
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			return serveOn(t, options, access, listener, func() net.Conn {
				c, err := net.Dial("tcp", listener.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				return c
			})
		})
	})
}

// pipeline is commands and what they are answered together.
type pipeline struct{ commands, replies strings.Builder }

func (p *pipeline) say(reply string, args ...string) {
	p.commands.WriteString(wire(args...))
	p.replies.WriteString(reply)
}

// sendAll sends without reading a reply.
func (c *client) sendAll(raw string) {
	c.t.Helper()
	_ = c.conn.SetWriteDeadline(time.Now().Add(20 * time.Second))
	c.send(raw)
}

// expectAll reads exactly these bytes, and tells where others come.
func (c *client) expectAll(raw string) {
	c.t.Helper()
	got := make([]byte, len(raw))
	_ = c.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	n, err := io.ReadFull(c.in, got)
	if err != nil {
		c.t.Fatalf("%d bytes of %d came: %v", n, len(raw), err)
	}
	for i := range got {
		if got[i] != raw[i] {
			c.t.Fatalf("from byte %d on the server answered %.80q, not %.80q", i, got[i:], raw[i:])
		}
	}
}

// redis-py sends all commands of a pipeline before it reads the first reply.
func TestAPipelineIsTakenWholeBeforeItsRepliesAreRead(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		onBothNetworks(t, func(t *testing.T, start func(*testing.T, Options, Access) *serving) {
			of := tenant(path.Base(t.Name()))
			s := start(t, Options{}, Access{Tenant: of})
			const name = "k"
			var p pipeline
			p.say("+PONG\r\n", "PING")
			for i := range 300 {
				key, value := fmt.Sprint(name, i), strings.Repeat(string(rune('a'+i%26)), 1+97*i)
				p.say("+OK\r\n", "SET", key, value)
				p.say(bulk(value), "GET", key)
				p.say(":1\r\n", "EXISTS", key)
				p.say("$-1\r\n", "GET", key+" of nobody")
				p.say(":1\r\n", "DEL", key, key+" of nobody")
				p.say("$-1\r\n", "GET", key)
			}
			// A value that is overwritten is still the one that was there when its GET came.
			for i := range 12 {
				value := strings.Repeat(string(rune('A'+i)), 1<<20)
				p.say("+OK\r\n", "SET", name, value)
				p.say(bulk(value), "GET", name)
				p.say("*2\r\n"+bulk(value)+"$-1\r\n", "MGET", name, name+" of nobody")
				p.say(bulk(value[:50_000]), "ECHO", value[:50_000])
			}
			p.say(":1\r\n", "DEL", name)
			c := s.client()
			c.sendAll(p.commands.String())
			c.expectAll(p.replies.String())
			c.do("+PONG\r\n", "PING")
			if held := of.Stats().HeldBytes; held != 0 {
				t.Errorf("%d bytes are held though all is read", held)
			}
		})
	})
}

// Beyond the bound the server reads no more, and goes on once replies are taken.
func TestAPipelineBeyondTheBoundWaitsForItsReader(t *testing.T) {
	t.Parallel()
	onBothNetworks(t, func(t *testing.T, start func(*testing.T, Options, Access) *serving) {
		tier := newMemory(64 << 20)
		const size, bound, count = 1 << 20, 8 << 20, 40
		tenant := NewTenant(TenantOptions{Name: "t", Blocks: tier, HoldBytes: func() int64 { return bound }})
		s := start(t, Options{}, Access{Tenant: tenant})
		c, watcher := s.client(), s.client()
		watcher.do("+PONG\r\n", "PING")
		var p pipeline
		p.say("+PONG\r\n", "PING")
		for i := range count {
			value := strings.Repeat(string(rune('A'+i)), size)
			p.say("+OK\r\n", "SET", "k", value)
			p.say(bulk(value), "GET", "k")
		}
		sent := make(chan error, 1)
		go func() {
			_, err := io.WriteString(c.conn, p.commands.String())
			sent <- err
		}()
		for tenant.Stats().HeldBytes < bound {
			watcher.do("+PONG\r\n", "PING")
		}
		if held := tenant.Stats().HeldBytes; held > bound {
			t.Errorf("%d bytes are held of at most %d", held, bound)
		}
		select {
		case err := <-sent:
			t.Fatalf("all was taken beyond the bound (%v)", err)
		default:
		}
		c.expectAll(p.replies.String())
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		c.do("+PONG\r\n", "PING")
		if held := tenant.Stats().HeldBytes; held != 0 {
			t.Errorf("%d bytes are held though all is read", held)
		}
	})
}

// unread sends a command again and again until the server takes no more.
func unread(c *client, command string) (sent chan int) {
	sent = make(chan int, 1)
	go func() {
		for n := 0; ; n++ {
			if _, err := io.WriteString(c.conn, command); err != nil {
				sent <- n
				return
			}
		}
	}()
	return sent
}

func TestAReaderThatNeverReadsIsBoundedAndClosedUnlessNative(t *testing.T) {
	t.Parallel()
	const size = 100_000
	value := strings.Repeat("v", size)
	for _, test := range []struct {
		name, first, reply string
		native             bool
		command            string
		atMost             int // commands that are read
	}{
		{"values", "PING", "+PONG\r\n", false, wire("GET", "m@1@0@ab@half"), 10 + 3},
		{"values of a native client", "", "", true, wire("GET", "m@1@0@ab@half"), 10 + 3},
		{"replies without a value", "PING", "+PONG\r\n", false, wire("ECHO", value[:50_000]), queueSmall/50_000 + 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				tier := newMemory(1 << 20)
				tenant := NewTenant(TenantOptions{Name: "t", Blocks: tier, HoldBytes: func() int64 { return 10 * size }})
				s := servePipes(t, Options{}, Access{Tenant: tenant})
				c, other := s.client(), s.client()
				other.do("+OK\r\n", "SET", "m@1@0@ab@half", value)
				if test.first != "" {
					c.do(test.reply, test.first)
				}
				sent := unread(c, test.command)
				time.Sleep(29 * time.Second)
				synctest.Wait()
				stats := tenant.Stats()
				if held := stats.HeldBytes; held > 10*size || s.server.queued.Load() > queueSmallAll || s.server.queued.Load() == 0 {
					t.Errorf("%d bytes of values are held, %d of replies", held, s.server.queued.Load())
				}
				if test.command[:10] == wire("GET")[:10] && stats.HeldBytes != 10*size {
					t.Errorf("%d bytes of values are held, not %d", stats.HeldBytes, 10*size)
				}
				time.Sleep(24 * time.Hour)
				synctest.Wait()
				left := s.server.Stats()
				if test.native {
					if left.SlowReaders != 0 || left.Connections != 2 {
						t.Fatalf("%d slow readers were closed, %d connections are left", left.SlowReaders, left.Connections)
					}
					for range 5 {
						c.expect(bulk(value))
					}
					_ = c.conn.Close()
					synctest.Wait()
				} else if left.SlowReaders != 1 || left.Connections != 1 {
					t.Fatalf("%d slow readers were closed, %d connections are left", left.SlowReaders, left.Connections)
				}
				if n := <-sent; n > test.atMost+5 || n < 5 {
					t.Errorf("%d commands were read", n)
				}
				other.do(":1\r\n", "DEL", "m@1@0@ab@half")
				if held := tenant.Stats().HeldBytes; held != 0 || tier.used != 0 || s.server.queued.Load() != 0 {
					t.Errorf("%d bytes of values are held still, %d of the tier, %d of replies", held, tier.used, s.server.queued.Load())
				}
			})
		})
	}
}

// The time to take a reply is not that of sending a long pipeline.
func TestWhoSendsIsNotTakenForASlowReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tenant := tenantOf("t", newMemory(16<<20))
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		c := s.client()
		value := strings.Repeat("v", 100_000)
		c.do("+PONG\r\n", "PING")
		c.do("+OK\r\n", "SET", "k", value)
		for range 15 {
			c.send(wire("GET", "k"))
			time.Sleep(25 * time.Second)
		}
		for range 15 {
			c.expect(bulk(value))
		}
		c.send(wire("GET", "k"))
		time.Sleep(31 * time.Second)
		if got := s.server.Stats().SlowReaders; got != 1 {
			t.Errorf("%d slow readers were closed, not the one that neither reads nor sends", got)
		}
	})
}

func TestAConnectionThatIsNativeNoMoreHasATimeToRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tenant := tenantOf("t", newMemory(16<<20))
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		c := s.client()
		c.do("+OK\r\n", "SET", "k", strings.Repeat("v", 100_000))
		c.send(wire("GET", "k"))
		time.Sleep(time.Hour)
		if got := s.server.Stats(); got.Connections != 1 {
			t.Fatal("a native client was closed")
		}
		c.send(wire("PING"))
		time.Sleep(31 * time.Second)
		if got := s.server.Stats(); got.Connections != 0 || got.SlowReaders != 1 {
			t.Errorf("%d connections are left, %d slow readers were closed", got.Connections, got.SlowReaders)
		}
	})
}

func TestRepliesThatWaitAreSentToAClientThatSendsNoMore(t *testing.T) {
	t.Parallel()
	onBothNetworks(t, func(t *testing.T, start func(*testing.T, Options, Access) *serving) {
		s := start(t, Options{}, Access{Tenant: tenantOf("t", newMemory(128<<20))})
		c := s.client()
		var p pipeline
		value := strings.Repeat("v", 1<<20)
		p.say("+OK\r\n", "SET", "k", value)
		for range 20 {
			p.say(bulk(value), "GET", "k")
		}
		p.say("+OK\r\n", "QUIT")
		c.sendAll(p.commands.String())
		if err := c.conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		c.expectAll(p.replies.String())
		c.closed()
	})
}

func TestTheEndOfServeDoesNotWaitForRepliesThatNobodyTakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier := newMemory(16 << 20)
		tenant := tenantOf("t", tier)
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		reads, stalls := s.client(), s.client()
		value := strings.Repeat("v", 100_000)
		reads.do("+OK\r\n", "SET", "k", value)
		for _, c := range []*client{reads, stalls} {
			c.send(strings.Repeat(wire("GET", "k"), 20))
			time.Sleep(time.Minute)
		}
		if held := tenant.Stats().HeldBytes; held != 2*19*100_000 {
			t.Errorf("%d bytes are held", held)
		}
		began := time.Now()
		s.stop()
		synctest.Wait()
		for range 20 { // is finished in the time that is left
			reads.expect(bulk(value))
		}
		reads.closed()
		s.end()
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("it ended after %v, not when the slow reader's 2 s were over", took)
		}
		if tier.drop(block.Key{Hash: block.HashOf([]byte("k"))}); tier.used != 0 || tenant.Stats().HeldBytes != 0 {
			t.Errorf("%d bytes of the tier are held, %d for replies", tier.used, tenant.Stats().HeldBytes)
		}
	})
}

// What the real tier lent comes back when the client is gone.
func TestBlocksThatWaitedAreTheTiersAgainWhenTheClientIsGone(t *testing.T) {
	t.Parallel()
	onBothNetworks(t, func(t *testing.T, start func(*testing.T, Options, Access) *serving) {
		cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: t.TempDir(), Memory: 64 * units.MiB})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := cache.Close(); err != nil {
				t.Error(err)
			}
		})
		of, err := cache.AddTenant(t.Context(), kvtier.TenantSpec{Kind: kvtier.TenantCredential, Name: "t", Memory: 64 * units.MiB})
		if err != nil {
			t.Fatal(err)
		}
		tenant, err := Open(t.Context(), of, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := start(t, Options{}, Access{Tenant: tenant})
		c, watcher := s.client(), s.client()
		watcher.do("+PONG\r\n", "PING")
		const count = 20
		for i := range count {
			watcher.do("+OK\r\n", "SET", fmt.Sprint(i), strings.Repeat(fmt.Sprint(i%10), 1<<20))
		}
		for i := range count {
			c.sendAll(wire("GET", fmt.Sprint(i)))
		}
		for tenant.Stats().Hits < count {
			watcher.do("+PONG\r\n", "PING")
		}
		for i := range count {
			watcher.do(":1\r\n", "DEL", fmt.Sprint(i))
		}
		if used := of.Stats().RAM.Used; used == 0 {
			t.Error("nothing is held though nothing was read")
		}
		_ = c.conn.Close()
		for s.server.Stats().Connections != 1 {
			watcher.do("+PONG\r\n", "PING")
		}
		if used, held := of.Stats().RAM.Used, tenant.Stats().HeldBytes; used != 0 || held != 0 {
			t.Errorf("%v of the tier are held, %d bytes for replies", used, held)
		}
	})
}

// A client that reads is served by one goroutine: no queue is made.
func TestNoReplyWaitsForAClientThatReads(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mine, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, mine) }()
		c := newConn(&listening{server: New(Options{})}, theirs)
		for range 100 {
			if err := c.value(bytes.Repeat([]byte("v"), 100_000), nil); err != nil || c.queue != nil {
				t.Fatalf("value: %v, queue %v", err, c.queue)
			}
		}
		_ = mine.Close()
	})
}
