package resp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Of the answers without which a client was seen to fail, none is missing.
func TestTheHandshakeHasWhatTheClientsNeed(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("testdata/minimum_handshake.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Cases []struct {
			Server string `json:"server"`
			Result string `json:"result"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(raw, &table); err != nil {
		t.Fatal(err)
	}
	needs := map[string]func(c *client){
		"HELLO -ERR unknown command": func(c *client) { c.send(wire("HELLO", "3")); pairs(t, c) },
		"HELLO -NOPROTO":             func(c *client) { c.send(wire("HELLO", "3")); pairs(t, c) },
		"INFO -ERR":                  func(c *client) { c.send(wire("INFO")); needRole(t, verbatim(t, c)) },
		"INFO empty bulk":            func(c *client) { c.send(wire("INFO", "REPLICATION")); needRole(t, verbatim(t, c)) },
		"INFO role:slave":            func(c *client) { c.send(wire("INFO", "all")); needRole(t, verbatim(t, c)) },
		"nil as $-1 in RESP3":        func(c *client) { c.do("_\r\n", "GET", "k") },
	}
	failed := 0
	c := serve(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))}).client()
	c.send(wire("HELLO", "3"))
	c.expect(helloReply3)
	for _, recorded := range table.Cases {
		if !strings.HasPrefix(recorded.Result, "EXC") {
			continue
		}
		need := needs[recorded.Server]
		if need == nil {
			t.Fatalf("a client fails on %q, and no check knows it", recorded.Server)
		}
		failed++
		need(c)
	}
	if failed == 0 {
		t.Fatal("the table has no failure")
	}
}

func needRole(t *testing.T, text string) {
	t.Helper()
	if !strings.Contains(text, "\r\nrole:master\r\n") {
		t.Errorf("INFO has no role:master: %q", text)
	}
}

func TestACredentialSaysWhoseBlocksAreSeen(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		var credentials Credentials
		a, b := tenant("team-a"), tenant("team-b")
		for _, of := range []struct {
			tenant   *Tenant
			password string
		}{{a, "pa"}, {b, "pb"}, {b, "pb-next"}} {
			if err := credentials.Add(of.tenant, of.password); err != nil {
				t.Fatal(err)
			}
		}
		if credentials.Add(a, "pb") == nil || credentials.Add(a, "") == nil {
			t.Error("a password that is another's, or empty, was taken")
		}
		s := serve(t, Options{}, Access{Authenticate: credentials.Authenticate})
		for _, user := range []string{"", "default", "team-a"} {
			if got, ok := credentials.Authenticate([]byte(user), []byte("pa")); !ok || got != a {
				t.Errorf("user %q is not team-a's", user)
			}
		}
		const wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n"
		c := s.client()
		c.do("-NOAUTH Authentication required.\r\n", "GET", "k")
		c.do("-NOAUTH Authentication required.\r\n", "SET", "k", "v")
		c.do("-NOAUTH Authentication required.\r\n", "NOPE")
		c.do("-NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time\r\n", "HELLO", "3")
		c.do(wrong, "AUTH", "no")
		c.do(wrong, "AUTH", "team-b", "pa")
		c.do(wrong, "AUTH", "pa", "default") // the wrong way round
		c.do(wrong, "HELLO", "3", "AUTH", "pa", "default")
		c.do("+OK\r\n", "AUTH", "team-a", "pa")
		c.do(wrong, "AUTH", "no") // and stays who it was
		const key = "m@1@0@ab@half"
		c.do("+OK\r\n", "SET", key, "secret of a")
		// To b the key is one that is nowhere.
		other := s.client()
		other.do("+OK\r\n", "AUTH", "pb")
		other.do("+PONG\r\n", "PING")
		for _, nowhere := range []string{key, "m@1@0@cd@half"} {
			other.do("$-1\r\n", "GET", nowhere)
			other.do(":0\r\n", "EXISTS", nowhere)
			other.do(":0\r\n", "STRLEN", nowhere)
			other.do(":-2\r\n", "TTL", nowhere)
			other.do("+none\r\n", "TYPE", nowhere)
			other.do(":0\r\n", "DEL", nowhere)
			other.do("$-1\r\n", "SET", nowhere, "v", "XX")
			other.do(":0\r\n", "DBSIZE")
		}
		other.do("+OK\r\n", "SET", key, "b's")
		c.do("$11\r\nsecret of a\r\n", "GET", key)
		other.do("$3\r\nb's\r\n", "GET", key)
		// What a's native client stored tells b nothing about sizes either.
		native := s.client()
		native.do("+OK\r\n", "AUTH", "default", "pb-next")
		native.do("$-1\r\n", "GET", "n@1@0@cd@half")
		native.do("+OK\r\n", "AUTH", "pa")
		native.do("$11\r\nsecret of a\r\n", "GET", key)
		if got := s.server.Stats().AuthFailures; got != 5 {
			t.Errorf("%d failures were counted, not 5", got)
		}
		if got := a.Stats(); got.Models["m"].Stored != 1 || got.Connections != 2 {
			t.Errorf("team-a has %+v", got)
		}
	})
}

func TestWhoDoesNotAuthenticateIsDisconnectedAndWhoDidIsNot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var credentials Credentials
		if err := credentials.Add(tenantOf("t", newMemory(1<<20)), "pw"); err != nil {
			t.Fatal(err)
		}
		s := servePipes(t, Options{}, Access{Authenticate: credentials.Authenticate})
		in, out := s.client(), s.client()
		in.do("+OK\r\n", "AUTH", "pw")
		out.do("-NOAUTH Authentication required.\r\n", "PING")
		time.Sleep(10 * time.Second)
		out.closed()
		time.Sleep(24 * time.Hour)
		in.do("$-1\r\n", "GET", "k")
	})
}

func TestBeyondTheLimitConnectionsAreRefusedAndNoneIsClosed(t *testing.T) {
	t.Parallel()
	s := serve(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20)), MaxConnections: 2})
	first, second := s.client(), s.client()
	first.do(":0\r\n", "EXISTS", "k")
	second.do(":0\r\n", "EXISTS", "k")
	s.client().closed()
	first.do(":0\r\n", "EXISTS", "k")
	second.do(":0\r\n", "EXISTS", "k")
	if got := s.server.Stats(); got.RefusedConnections != 1 || got.Connections != 2 || got.Accepted != 2 {
		t.Errorf("stats are %+v", got)
	}
	_ = first.conn.Close()
	second.do(":0\r\n", "EXISTS", "k")
	for s.server.Stats().Connections != 1 { // the end of the first is seen by another goroutine
		second.do(":0\r\n", "EXISTS", "k")
	}
	second.do(":0\r\n", "EXISTS", "k")
}

// A reader that stalls keeps the bytes that it was promised, though the key is
// overwritten, deleted and its room given to others.
func TestAStalledReaderGetsTheOldBytesWhole(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		s := serve(t, Options{}, Access{Tenant: tenant("t")})
		stalled, busy := s.client(), s.client()
		const size = 8 << 20 // more than sockets buffer
		before := strings.Repeat("old bytes; ", size/11+1)[:size]
		busy.do("+OK\r\n", "SET", "m@1@0@ab@half", before)
		stalled.send(wire("GET", "m@1@0@ab@half"))
		stalled.expect(fmt.Sprintf("$%d\r\n", size) + before[:1000])
		// The reply is being written. Now everything else happens.
		for i := range 8 {
			value := strings.Repeat(fmt.Sprint(i%10), size)
			busy.do("+OK\r\n", "SET", "m@1@0@ab@half", value)
			busy.do("+OK\r\n", "SET", fmt.Sprintf("m@1@0@%x@half", i), value)
		}
		busy.do(":1\r\n", "DEL", "m@1@0@ab@half")
		stalled.expect(before[1000:] + "\r\n")
		stalled.do("$-000001\r\n", "GET", "m@1@0@ab@half")
	})
}

func TestASlowReaderIsClosedAndANativeOneIsNot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier := newMemory(1 << 20)
		s := servePipes(t, Options{}, Access{Tenant: tenantOf("t", tier)})
		native, other := s.client(), s.client()
		value := strings.Repeat("v", 100_000)
		native.do("+OK\r\n", "SET", "m@1@0@ab@half", value)
		other.do("+PONG\r\n", "PING")
		other.send(wire("GET", "m@1@0@ab@half"))
		native.send(wire("GET", "m@1@0@ab@half"))
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if got := s.server.Stats(); got.SlowReaders != 1 || got.Connections != 1 {
			t.Fatalf("%d slow readers were closed, %d connections are left", got.SlowReaders, got.Connections)
		}
		if _, err := io.ReadAll(other.in); err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("the slow reader: %v", err)
		}
		tier.drop(block.Key{Hash: block.HashOf([]byte("m@1@0@ab@half"))})
		native.expect(bulk(value))
	})
}

// A value whose bytes stop coming gives its room back. A native client is not
// closed for it: it gets its answer when it goes on.
func TestAStalledSetGivesItsRoomBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier := newMemory(1 << 20)
		tenant := tenantOf("t", tier)
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		native, other := s.client(), s.client()
		other.do("+PONG\r\n", "PING")
		whole := wire("SET", "m@1@0@ab@half", strings.Repeat("v", 300_000))
		native.send(whole[:200_000])
		other.send(whole[:200_000])
		synctest.Wait()
		if tier.openPuts() != 2 {
			t.Fatalf("%d values are being stored, not 2", tier.openPuts())
		}
		time.Sleep(31 * time.Second)
		other.closed()
		if got := tenant.Stats(); tier.openPuts() != 0 || got.StalledSets != 2 {
			t.Fatalf("%d values are being stored, %d have stalled", tier.openPuts(), got.StalledSets)
		}
		time.Sleep(24 * time.Hour)
		native.send(whole[200_000:])
		native.expect("+OK\r\n")
		native.do("$-00001\r\n", "GET", "m@1@0@ab@half")
		native.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("v", 300_000))
		native.do(bulk(strings.Repeat("v", 300_000)), "GET", "m@1@0@ab@half")
		if got := tenant.Stats(); got.Dropped != 1 || got.Stored != 1 {
			t.Errorf("%d dropped and %d stored, not one each", got.Dropped, got.Stored)
		}
	})
}

// Room is held by values that come, and not by a byte now and then.
func TestASetThatTricklesGivesItsRoomBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier := newMemory(4 << 20)
		tenant := tenantOf("t", tier)
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		trickling, steady := s.client(), s.client()
		trickling.do("+PONG\r\n", "PING")
		steady.do("+PONG\r\n", "PING")
		whole := wire("SET", "k", strings.Repeat("v", 600_000))
		trickling.send(whole[:1000])
		steady.send(whole[:1000])
		for at := 1000; at < 1004; at++ {
			time.Sleep(9 * time.Second)
			if at < 1003 {
				trickling.send(whole[at : at+1])
			}
			steady.send(whole[1000+(at-1000)*140_000:][:140_000])
		}
		synctest.Wait()
		trickling.closed()
		if got := tenant.Stats(); tier.openPuts() != 1 || got.StalledSets != 1 {
			t.Fatalf("%d values are being stored, %d have stalled, not one each", tier.openPuts(), got.StalledSets)
		}
		steady.send(whole[561_000:])
		steady.expect("+OK\r\n")
	})
}

func TestNothingIsSeenOfASetThatBreaksOff(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		s := serve(t, Options{}, Access{Tenant: tenant("t")})
		c, watcher := s.client(), s.client()
		c.do("+OK\r\n", "SET", "k", "before")
		whole := wire("SET", "k", strings.Repeat("v", 300_000))
		c.send(whole[:len(whole)-1])
		watcher.do("$6\r\nbefore\r\n", "GET", "k")
		_ = c.conn.Close()
		for s.server.Stats().Connections != 1 {
			watcher.do("$6\r\nbefore\r\n", "GET", "k")
		}
		watcher.do("$6\r\nbefore\r\n", "GET", "k")
	})
}

func TestAClientThatSendsNoMoreStillGetsItsAnswers(t *testing.T) {
	t.Parallel()
	c := serve(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))}).client()
	c.send(wire("SET", "k", "v") + wire("GET", "k") + "*2\r\n$3\r\nGET")
	if err := c.conn.(*net.UnixConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c.expect("+OK\r\n$1\r\nv\r\n")
	c.closed()
}

func TestGarbageIsToldAndClosedAndHarmsNobody(t *testing.T) {
	t.Parallel()
	s := serve(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))})
	good := s.client()
	good.do("+OK\r\n", "SET", "k", "v")
	c := s.client()
	c.send("*1\r\n!oops\r\n")
	c.expect("-ERR Protocol error: expected '$', got '!'\r\n")
	c.closed()
	c = s.client()
	c.send(wire("GET", "k") + "*1\r\n$-5\r\n")
	c.expect("$1\r\nv\r\n-ERR Protocol error: invalid bulk length\r\n")
	c.closed()
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		junk := make([]byte, 1+random.IntN(3000))
		for i := range junk {
			junk[i] = byte(random.Uint32())
			if i%7 == 0 {
				junk[i] = "*$\r\n0123"[random.IntN(8)]
			}
		}
		c := s.client()
		_, _ = c.conn.Write(junk)
		_ = c.conn.(*net.UnixConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c.in)
		_ = c.conn.Close()
	}
	good.do("$1\r\nv\r\n", "GET", "k")
	if got := s.server.Stats().ProtocolErrors; got < 2 {
		t.Errorf("%d protocol errors were counted", got)
	}
}

// waiting is a tier whose reads take until their context ends.
type waiting struct{ *memory }

func (w waiting) Get(ctx context.Context, _ block.Key) (Block, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestServeEndsSoonAfterItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier := newMemory(1 << 20)
		tenant := NewTenant(TenantOptions{Name: "t", Blocks: tier})
		s := servePipes(t, Options{}, Access{Tenant: tenant})
		idle, half, reader := s.client(), s.client(), s.client()
		reader.do("+OK\r\n", "SET", "k", strings.Repeat("v", 100_000))
		idle.do(":1\r\n", "EXISTS", "k")
		half.send(wire("SET", "k", strings.Repeat("v", 100_000))[:5000])
		reader.send(wire("GET", "k"))
		slow := servePipes(t, Options{}, Access{Tenant: NewTenant(TenantOptions{Name: "w", Blocks: waiting{tier}})})
		held := slow.client()
		held.send(wire("GET", "k"))
		go func() { _, _ = io.Copy(io.Discard, held.in) }()
		synctest.Wait()
		began := time.Now()
		slow.end()
		if took := time.Since(began); took != 0 {
			t.Errorf("a read of the tier kept it for %v", took)
		}
		s.end()
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("it ended after %v, not when the slow reader's 2 s were over", took)
		}
		if got := s.server.Stats(); got.Connections != 0 || tier.openPuts() != 0 {
			t.Errorf("%d connections and %d values are left", got.Connections, tier.openPuts())
		}
		if got := tenant.Stats(); got.Connections != 0 || got.Pins != 0 {
			t.Errorf("the tenant has %d connections and %d pins", got.Connections, got.Pins)
		}
	})
}

func TestAReplyThatIsBeingReadIsFinishedAtTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := servePipes(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))})
		c := s.client()
		value := strings.Repeat("v", 100_000)
		c.do("+OK\r\n", "SET", "k", value)
		c.send(wire("GET", "k"))
		synctest.Wait()
		s.stop()
		synctest.Wait()
		c.expect(bulk(value))
		c.closed()
	})
}

// failing is a listener that has no descriptors left for a while, and then breaks.
type failing struct {
	*pipes
	failures int
}

func (f *failing) Accept() (net.Conn, error) {
	if f.failures--; f.failures >= 0 {
		return nil, errors.New("too many open files")
	}
	return f.pipes.Accept()
}

func TestServeOutlivesAFailureToAccept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		listener := &failing{pipes: newPipes(), failures: 5}
		s := serveOn(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))}, listener, listener.dial)
		s.client().do("+PONG\r\n", "PING")
		_ = listener.Close()
		err := <-s.ended
		close(s.ended)
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve ends with %v when its listener is closed by somebody else", err)
		}
	})
}

func TestAListenerNeedsATenantOrCredentials(t *testing.T) {
	t.Parallel()
	if err := New(Options{}).Serve(t.Context(), newPipes(), Access{}); err == nil {
		t.Error("a listener that serves nobody's blocks was taken")
	}
}

func TestModelsAreCountedByNameUpToABound(t *testing.T) {
	t.Parallel()
	tenant := tenantOf("t", newMemory(1<<20))
	c := serve(t, Options{}, Access{Tenant: tenant}).client()
	c.do("+PONG\r\n", "PING")
	for i := range maxModels + 5 {
		c.do("+OK\r\n", "SET", fmt.Sprintf("model-%d@1@0@ab@half", i), "value")
		c.do("$5\r\nvalue\r\n", "GET", fmt.Sprintf("model-%d@1@0@ab@half", i))
	}
	c.do("$-1\r\n", "GET", "no key of LMCache")
	got := tenant.Stats()
	if len(got.Models) != maxModels+1 {
		t.Fatalf("%d models are counted, not %d", len(got.Models), maxModels+1)
	}
	one := ModelStats{RAM: ModelHits{Hits: 1, Bytes: 5}, Stored: 1, BytesIn: 5}
	others := ModelStats{RAM: ModelHits{Hits: 5, Bytes: 25}, Misses: 1, Stored: 5, BytesIn: 25}
	if got.Models["model-3"] != one || got.Models["other"] != others {
		t.Errorf("model-3 has %+v, the others %+v", got.Models["model-3"], got.Models["other"])
	}
}

func TestHitsOfAModelAreCountedByTierAndInTokens(t *testing.T) {
	t.Parallel()
	tier := newMemory(1 << 20)
	tenant := tenantOf("t", tier)
	c := serve(t, Options{}, Access{Tenant: tenant}).client()
	name := "m@1@0@ab@half"
	c.do("+OK\r\n", "SET", name, "value")
	c.do("$5\r\nvalue\r\n", "GET", name)
	tier.tier, tier.tokens = kvtier.TierNVMe, 16
	c.do("*2\r\n$5\r\nvalue\r\n$5\r\nvalue\r\n", "MGET", name, name)
	want := ModelStats{RAM: ModelHits{Hits: 1, Bytes: 5}, NVMe: ModelHits{Hits: 2, Bytes: 10, Tokens: 32}, Stored: 1, BytesIn: 5}
	if got := tenant.Stats().Models["m"]; got != want {
		t.Errorf("the model has %+v, want %+v", got, want)
	}
}

// Keys stored one after the other are told to the tier as a chain.
func TestTheTierIsToldWhichBlockContinuesWhich(t *testing.T) {
	t.Parallel()
	tier := newMemory(1 << 20)
	c := serve(t, Options{}, Access{Tenant: tenantOf("t", tier)}).client()
	name := func(i int) string { return key(multiprocess, i) }
	for i := range 3 {
		c.do(":0\r\n", "EXISTS", name(i))
	}
	for i := range 3 {
		c.do("+OK\r\n", "SET", name(i), "v")
	}
	hash := func(i int) block.Key { return block.Key{Hash: block.HashOf([]byte(name(i)))} }
	if len(tier.parents) != 2 || tier.parents[hash(1)] != hash(0) || tier.parents[hash(2)] != hash(1) {
		t.Errorf("the tier was told %v", tier.parents)
	}
}

func TestOfManySetsWithNXOneStores(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		s := serve(t, Options{}, Access{Tenant: tenant("t")})
		const clients = 8
		replies := make(chan string, clients)
		for i := range clients {
			c := s.client()
			go func() {
				_, _ = io.WriteString(c.conn, wire("SET", "k", fmt.Sprint(i), "NX"))
				line, _ := c.in.ReadString('\n')
				replies <- line
			}()
		}
		stored := 0
		for range clients {
			if <-replies == "+OK\r\n" {
				stored++
			}
		}
		if stored != 1 {
			t.Errorf("%d SETs with NX stored", stored)
		}
	})
}

// The same as with a clock of its own, over real sockets: there a thread waits
// in the kernel first.
func TestARealSocketThatStallsIsGivenUpToo(t *testing.T) {
	t.Parallel()
	tier := newMemory(16 << 20)
	tenant := tenantOf("t", tier)
	s := serve(t, Options{BodyTimeout: time.Millisecond, WriteTimeout: time.Millisecond}, Access{Tenant: tenant})
	native, other, watcher := s.client(), s.client(), s.client()
	whole := wire("SET", "m@1@0@ab@half", strings.Repeat("v", 2<<20))
	other.do("+PONG\r\n", "PING")
	_, _ = io.WriteString(other.conn, whole[:500_000]) // may be given up before all of it is sent
	other.closed()
	native.send(whole[:500_000])
	for tenant.Stats().StalledSets < 2 {
		watcher.do(":0\r\n", "EXISTS", "m@1@0@ab@half")
	}
	if tier.openPuts() != 0 {
		t.Errorf("%d values are being stored", tier.openPuts())
	}
	native.send(whole[500_000:])
	native.expect("+OK\r\n")
	watcher.do("$-000001\r\n", "GET", "m@1@0@ab@half")
	s = serve(t, Options{WriteTimeout: time.Millisecond}, Access{Tenant: tenant})
	reader, watcher := s.client(), s.client()
	watcher.do("+OK\r\n", "SET", "k", strings.Repeat("w", 2<<20))
	reader.do("+PONG\r\n", "PING")
	reader.send(wire("GET", "k"))
	for s.server.Stats().SlowReaders == 0 {
		watcher.do("$-000001\r\n", "GET", "m@1@0@ab@half")
	}
	if blocked := blocking.Load(); blocked > maxBlocking {
		t.Errorf("%d threads wait", blocked)
	}
}
