package resp

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// onBothTiers runs a test on the small tier of these tests and on the real one.
func onBothTiers(t *testing.T, test func(t *testing.T, tenant func(name string) *Tenant)) {
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, func(name string) *Tenant { return tenantOf(name, newMemory(256<<20)) })
	})
	t.Run("kvtier", func(t *testing.T) {
		t.Parallel()
		cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: t.TempDir(), Memory: 256 * units.MiB, VerifyEvery: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := cache.Close(); err != nil {
				t.Error(err)
			}
		})
		test(t, func(name string) *Tenant {
			of, err := cache.AddTenant(t.Context(), kvtier.TenantSpec{Kind: kvtier.TenantCredential, Name: name, Memory: 128 * units.MiB})
			if err != nil {
				t.Fatal(err)
			}
			tenant, err := Open(t.Context(), of, nil)
			if err != nil {
				t.Fatal(err)
			}
			return tenant
		})
	})
}

const helloReply3 = "%7\r\n$6\r\nserver\r\n$6\r\nhearth\r\n$7\r\nversion\r\n$5\r\n7.2.0\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:1\r\n" +
	"$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n"

// One conversation per protocol: each command and its exact answer.
func TestCommandsAreAnsweredAsThePageSays(t *testing.T) {
	t.Parallel()
	type exchange struct {
		args  []string
		reply string
	}
	say := func(reply string, args ...string) exchange { return exchange{args, reply} }
	script := func(null, hello, dict, info string) []exchange {
		return []exchange{
			say(hello, "HELLO"),
			say("+PONG\r\n", "PING"),
			say("$2\r\nhi\r\n", "ping", "hi"),
			say("$3\r\nabc\r\n", "ECHO", "abc"),
			say(null, "GET", "k"),
			say("+OK\r\n", "SET", "k", "value"),
			say("$5\r\nvalue\r\n", "GET", "k"),
			say("*3\r\n$5\r\nvalue\r\n"+null+"$5\r\nvalue\r\n", "MGET", "k", "none", "k"),
			say(":2\r\n", "EXISTS", "k", "none", "k"),
			say(":5\r\n", "STRLEN", "k"),
			say(":0\r\n", "STRLEN", "none"),
			say(":-1\r\n", "TTL", "k"),
			say(":-2\r\n", "PTTL", "none"),
			say(":1\r\n", "EXPIRE", "k", "10"),
			say(":0\r\n", "PEXPIRE", "none", "10"),
			say("-ERR value is not an integer or out of range\r\n", "EXPIRE", "k", "x"),
			say("+string\r\n", "TYPE", "k"),
			say("+none\r\n", "TYPE", "none"),
			say(":1\r\n", "DBSIZE"),
			say(null, "SET", "k", "other", "NX"),
			say(null, "SET", "none", "other", "XX"),
			say("$5\r\nvalue\r\n", "SET", "k", "second", "XX", "GET"),
			say(null, "SET", "new", "first", "GET", "NX"),
			say("$5\r\nfirst\r\n", "SET", "new", "x", "NX", "GET"),
			say("$6\r\nsecond\r\n", "GET", "k"),
			say("+OK\r\n", "SET", "k", "v", "EX", "3600"),
			say("+OK\r\n", "SET", "k", "v", "px", "1"),
			say("+OK\r\n", "SET", "k", "v", "EXAT", "1"),
			say("+OK\r\n", "SET", "k", "v", "PXAT", "1"),
			say("+OK\r\n", "SET", "k", "v", "KEEPTTL"),
			say("$1\r\nv\r\n", "GET", "k"),
			say("-ERR syntax error\r\n", "SET", "k", "w", "EX"),
			say("-ERR syntax error\r\n", "SET", "k", "w", "EX", "1", "PX", "1"),
			say("-ERR syntax error\r\n", "SET", "k", "w", "NX", "XX"),
			say("-ERR syntax error\r\n", "SET", "k", "w", "what"),
			say("-ERR value is not an integer or out of range\r\n", "SET", "k", "w", "EX", "soon"),
			say("-ERR invalid expire time in 'set' command\r\n", "SET", "k", "w", "EX", "0"),
			say("-ERR a value has at least one byte\r\n", "SET", "k", ""),
			say("$1\r\nv\r\n", "GET", "k"),
			say("+OK\r\n", "SELECT", "2"),
			say(null, "GET", "k"),
			say("+OK\r\n", "SET", "k", "two"),
			say("+OK\r\n", "SELECT", "0"),
			say("$1\r\nv\r\n", "GET", "k"),
			say("-ERR DB index is out of range\r\n", "SELECT", "65536"),
			say("-ERR DB index is out of range\r\n", "SELECT", "-1"),
			say("-ERR value is not an integer or out of range\r\n", "SELECT", "x"),
			say(":2\r\n", "DEL", "k", "none", "new"),
			say(":0\r\n", "UNLINK", "k"),
			say(null, "GET", "k"),
			say("+OK\r\n", "CLIENT", "SETINFO", "LIB-NAME", "GlidePySync(lmcache:0.5.6)"),
			say("+OK\r\n", "CLIENT", "SETINFO", "lib-ver", "8.1.0"),
			say("-ERR lib-name cannot contain spaces, newlines or special characters.\r\n", "CLIENT", "SETINFO", "LIB-NAME", "a b"),
			say("-ERR Unrecognized option 'x'\r\n", "CLIENT", "SETINFO", "X", "y"),
			say(null, "CLIENT", "GETNAME"),
			say("+OK\r\n", "CLIENT", "SETNAME", "me"),
			say("$2\r\nme\r\n", "CLIENT", "GETNAME"),
			say("-ERR Client names cannot contain spaces, newlines or special characters.\r\n", "CLIENT", "SETNAME", "a\nb"),
			say(":1\r\n", "CLIENT", "ID"),
			say("+OK\r\n", "CLIENT", "NO-EVICT", "on"),
			say("-ERR unknown subcommand 'MAINT_NOTIFICATIONS'. Try CLIENT HELP.\r\n", "CLIENT", "MAINT_NOTIFICATIONS", "ON", "moving-endpoint-type", "internal-ip"),
			say("-ERR wrong number of arguments for 'client|id' command\r\n", "CLIENT", "ID", "x"),
			say(info, "INFO", "REPLICATION"),
			say("*0\r\n", "COMMAND"),
			say(dict, "COMMAND", "DOCS"),
			say("*0\r\n", "COMMAND", "INFO", "get"),
			say("-ERR unknown subcommand 'x'. Try COMMAND HELP.\r\n", "COMMAND", "x"),
			say(dict, "CONFIG", "GET", "save"),
			say("-ERR unknown subcommand 'set'. Try CONFIG HELP.\r\n", "CONFIG", "SET", "save", ""),
			say("-ERR flushing is not allowed for this tenant\r\n", "FLUSHALL"),
			say("-ERR flushing is not allowed for this tenant\r\n", "FLUSHDB", "ASYNC"),
			say("+OK\r\n", "AUTH", "whatever"), // the socket decides
			say("-ERR wrong number of arguments for 'get' command\r\n", "GET"),
			say("-ERR wrong number of arguments for 'get' command\r\n", "GET", "a", "b"),
			say("-ERR wrong number of arguments for 'set' command\r\n", "SET", "a"),
			say("-ERR unknown command 'nope', with args beginning with: 'a' 'b?c' \r\n", "nope", "a", "b\nc"),
			say("-ERR Protocol version is not an integer or out of range\r\n", "HELLO", "x"),
			say("-NOPROTO unsupported protocol version\r\n", "HELLO", "4"),
			say("-ERR Syntax error in HELLO option 'auth'\r\n", "HELLO", "3", "AUTH", "x"),
		}
	}
	hello2 := strings.Replace(strings.Replace(helloReply3, "%7", "*14", 1), ":3", ":2", 1)
	const replication = "# Replication\r\nrole:master\r\nconnected_slaves:0\r\n"
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		for name, of := range map[string][]exchange{
			"RESP2": script("$-1\r\n", hello2, "*0\r\n", bulk(replication)),
			"RESP3": append([]exchange{say(helloReply3, "HELLO", "3")},
				script("_\r\n", helloReply3, "%0\r\n", fmt.Sprintf("=%d\r\ntxt:%s\r\n", len(replication)+4, replication))...),
		} {
			t.Run(name, func(t *testing.T) {
				c := serve(t, Options{}, Access{Tenant: tenant(name)}).client()
				for _, e := range of {
					c.send(wire(e.args...))
					c.expect(e.reply)
					if c.in.Buffered() > 0 {
						t.Fatalf("%q is answered by more than %q", e.args, e.reply)
					}
				}
				c.do("+OK\r\n", "QUIT")
				c.closed()
			})
		}
	})
}

func TestPeopleMayTypeCommands(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		c := serve(t, Options{}, Access{Tenant: tenant("t")}).client()
		for _, e := range [][2]string{
			{"ping\r\n", "+PONG\r\n"},
			{"set k value\n", "+OK\r\n"},
			{"get k\r\n", "$5\r\nvalue\r\n"},
			{"set k x nx\r\n", "$-1\r\n"},
			{"exists k k\r\n", ":2\r\n"},
			{"client list\r\n", ""},
		} {
			c.send(e[0])
			c.expect(e[1])
		}
		c.line()
		if line := c.line(); !strings.HasPrefix(line, "id=1 addr=") || !strings.Contains(line, " db=0 resp=2 ") {
			t.Errorf("CLIENT LIST says %q", line)
		}
	})
}

func TestResetForgetsWhatTheConnectionSaid(t *testing.T) {
	t.Parallel()
	var credentials Credentials
	tenant := tenantOf("t", newMemory(1<<20))
	if err := credentials.Add(tenant, "pw"); err != nil {
		t.Fatal(err)
	}
	c := serve(t, Options{}, Access{Authenticate: credentials.Authenticate}).client()
	c.send(wire("HELLO", "3", "AUTH", "default", "pw", "SETNAME", "me"))
	c.expect(helloReply3)
	c.do("+OK\r\n", "SELECT", "3")
	c.do("+RESET\r\n", "RESET")
	c.do("-NOAUTH Authentication required.\r\n", "GET", "k")
	c.do("+OK\r\n", "AUTH", "pw")
	c.do("$-1\r\n", "CLIENT", "GETNAME")
	c.do("$-1\r\n", "GET", "k")
}

func TestRepliesComeInTheOrderOfThePipeline(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		c := serve(t, Options{}, Access{Tenant: tenant("t")}).client()
		c.do("+PONG\r\n", "PING")
		var asked, answered strings.Builder
		for i := range 200 {
			key, value := fmt.Sprint("k", i%7), strings.Repeat(fmt.Sprint(i%10), 1+i*137%30_000)
			asked.WriteString(wire("SET", key, value) + wire("GET", key) + wire("ECHO", key) + wire("EXISTS", key, "none"))
			answered.WriteString("+OK\r\n" + bulk(value) + bulk(key) + ":1\r\n")
		}
		go func() { _, _ = c.conn.Write([]byte(asked.String())) }()
		c.expect(answered.String())
	})
}

func TestSetTakesBlocksOfAnySizeUpTo64MiB(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		of := tenant("t")
		s := serve(t, Options{}, Access{Tenant: of})
		c := s.client()
		c.do("+PONG\r\n", "PING")
		largest := strings.Repeat("0123456789abcdef", 4<<20)
		for _, size := range []int{1, 28, 4094, 4095, 4096, 4097, 8192, 131072, 131073, 1 << 20, 64 << 20} {
			value := largest[:size-1] + "!"
			c.do("+OK\r\n", "SET", "k", value)
			c.do(bulk(value), "GET", "k")
			c.do("+OK\r\n", "SET", "k", value, "EX", "60")
		}
		c.do("-ERR string exceeds maximum allowed size (64 MiB)\r\n", "SET", "k", largest+"!")
		c.do(":67108864\r\n", "STRLEN", "k")
		native := s.client()
		native.do("+OK\r\n", "SET", "k", largest+"!")
		native.do("+OK\r\n", "SET", "k", "v")
		native.do("$1\r\nv\r\n", "GET", "k")
		if got := of.Stats(); got.Dropped != 1 || got.Refused != 1 {
			t.Errorf("%d dropped and %d refused, not one each", got.Dropped, got.Refused)
		}
	})
}

func TestServesTCPAsWell(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serveOn(t, Options{}, Access{Tenant: tenantOf("t", newMemory(16<<20))}, listener, func() net.Conn {
		c, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return c
	})
	c := s.client()
	value := strings.Repeat("v", 5<<20)
	c.do("+OK\r\n", "SET", "k", value)
	c.do(bulk(value), "GET", "k")
	c.do(":1\r\n", "EXISTS", "k") // by now the GET has been counted
	stats := s.server.Stats()
	if stats.BytesIn < 5<<20 || stats.BytesOut < 5<<20 || stats.Commands["get"] != 1 || stats.Commands["set"] != 1 || stats.Native != 1 {
		t.Errorf("stats are %+v", stats)
	}
}

func TestFlushIsForTenantsThatMay(t *testing.T) {
	t.Parallel()
	tier := newMemory(1 << 20)
	flushed := 0
	tenant := NewTenant(TenantOptions{Name: "t", Blocks: tier, Flush: func(_ context.Context) error {
		flushed++
		tier.pressure()
		return nil
	}})
	c := serve(t, Options{}, Access{Tenant: tenant}).client()
	c.do("+OK\r\n", "SET", "k", "v")
	c.do("+OK\r\n", "FLUSHALL", "SYNC")
	c.do("-ERR syntax error\r\n", "FLUSHALL", "x")
	c.do("$-1\r\n", "GET", "k")
	c.do("-ERR the number of values is not known\r\n", "DBSIZE")
	if flushed != 1 {
		t.Errorf("flushed %d times", flushed)
	}
}

// Every command of the table is told in the figures by its own name.
func TestEveryCommandHasItsFigure(t *testing.T) {
	t.Parallel()
	if len(verbs) != otherCommand {
		t.Fatalf("%d commands, %d figures", len(verbs), otherCommand)
	}
	seen := make(map[int]string)
	for name, verb := range verbs {
		if commandNames[verb.index] != name || seen[verb.index] != "" {
			t.Errorf("%s is counted as %s, and so is %q", name, commandNames[verb.index], seen[verb.index])
		}
		seen[verb.index] = name
	}
}
