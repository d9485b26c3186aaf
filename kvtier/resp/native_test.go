package resp

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// worker is a model of one worker of LMCache's native client: it reads exactly
// as many bytes as the answer it expects has, without timeout and without ever
// connecting again.
type worker struct {
	conn  net.Conn
	stuck bool
}

// outcome is what LMCache sees of one call; nil is a call that never ends.
type outcome struct {
	ok      bool
	present bool
}

var errStuck = errors.New("no completion within 2 s")

// exchange sends a command and reads n bytes.
func (w *worker) exchange(command string, n int) ([]byte, error) {
	if w.stuck {
		return nil, errStuck
	}
	_ = w.conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := io.WriteString(w.conn, command); err != nil {
		return nil, w.failed(err)
	}
	return w.read(n)
}

func (w *worker) read(n int) ([]byte, error) {
	got := make([]byte, n)
	if _, err := io.ReadFull(w.conn, got); err != nil {
		return nil, w.failed(err)
	}
	return got, nil
}

func (w *worker) failed(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		w.stuck = true
		return errStuck
	}
	return err
}

// get fetches a value of exactly size bytes.
func (w *worker) get(key string, size int) (value []byte, seen *outcome) {
	header := fmt.Sprintf("$%d\r\n", size)
	got, err := w.exchange(wire("GET", key), len(header))
	if errors.Is(err, errStuck) {
		return nil, nil
	}
	if err != nil || string(got) != header {
		return nil, &outcome{ok: true}
	}
	value, err = w.read(size + 2)
	if errors.Is(err, errStuck) {
		return nil, nil
	}
	if err != nil {
		return nil, &outcome{ok: true}
	}
	return value[:size], &outcome{ok: true, present: true}
}

func (w *worker) number(verb, key string) *outcome {
	got, err := w.exchange(wire(verb, key), 4)
	switch {
	case errors.Is(err, errStuck):
		return nil
	case err != nil || string(got) != ":0\r\n" && string(got) != ":1\r\n":
		return &outcome{}
	}
	return &outcome{ok: true, present: got[1] == '1'}
}

func (w *worker) set(key, value string) *outcome {
	got, err := w.exchange(wire("SET", key, value), 5)
	if errors.Is(err, errStuck) {
		return nil
	}
	return &outcome{ok: err == nil && string(got) == "+OK\r\n"}
}

// oddReply is what the recorder's server answered to the first command of a kind,
// and whether it closed then.
type oddReply struct {
	verb, reply string
	always      bool
	closes      bool
}

func oddReplies() map[string]oddReply {
	return map[string]oddReply{
		"normal":                                   {},
		"GET nil $-1 (4096 buffer)":                {verb: "GET", reply: "$-1\r\n", always: true},
		"GET RESP3 nil _":                          {verb: "GET", reply: "_\r\n", always: true},
		"GET nil once, padded to 7 bytes $-001":    {verb: "GET", reply: "$-001\r\n"},
		"GET -ERR once":                            {verb: "GET", reply: "-ERR something went wrong here\r\n"},
		"GET nil then close once":                  {verb: "GET", reply: "$-1\r\n", closes: true},
		"GET: close without reply once":            {verb: "GET", closes: true},
		"GET: close without reply once, 2 workers": {verb: "GET", closes: true},
		"GET short value then close":               {verb: "GET", reply: "$4096\r\n" + strings.Repeat("x", 100), closes: true},
		"GET smaller value once":                   {verb: "GET", reply: bulk(strings.Repeat("x", 100))},
		"GET larger value once":                    {verb: "GET", reply: bulk(strings.Repeat("x", 8192))},
		"SET -OOM once":                            {verb: "SET", reply: "-OOM command not allowed when used memory > 'maxmemory'.\r\n"},
		"SET -ER\\r\\n (5-byte error) once":        {verb: "SET", reply: "-ER\r\n"},
		"SET close once":                           {verb: "SET", closes: true},
		"EXISTS :2":                                {verb: "EXISTS", reply: ":2\r\n", always: true},
	}
}

// The model of the native client behaves as the real one was seen to, so that
// what it bears from our server, the real one does.
func TestTheModelOfTheNativeClientReactsAsTheRealOne(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("testdata/native_client_reactions.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Cases []struct {
			Case    string `json:"case"`
			Workers int    `json:"workers"`
			Ops     []struct {
				Op     string          `json:"op"`
				Buffer int             `json:"buffer"`
				Result json.RawMessage `json:"result"`
			} `json:"ops"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(raw, &table); err != nil {
		t.Fatal(err)
	}
	replies := oddReplies()
	if len(table.Cases) != len(replies) {
		t.Fatalf("%d cases were recorded, %d are played", len(table.Cases), len(replies))
	}
	for _, recorded := range table.Cases {
		odd, known := replies[recorded.Case]
		if !known {
			t.Fatalf("case %q is not played", recorded.Case)
		}
		t.Run(recorded.Case, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := &oddServer{odd: odd}
				workers := make([]*worker, recorded.Workers)
				for i := range workers {
					mine, theirs := net.Pipe()
					workers[i] = &worker{conn: mine}
					go server.serve(theirs)
				}
				for i, op := range recorded.Ops {
					// Of two workers the second was seen to take the second call alone.
					w := workers[0]
					if i == 1 {
						w = workers[len(workers)-1]
					}
					var seen *outcome
					switch op.Op {
					case "get":
						_, seen = w.get("k", op.Buffer)
					case "exists", "del":
						seen = w.number(strings.ToUpper(op.Op), "k")
					case "set":
						seen = w.set("k", strings.Repeat("v", 4096))
					default:
						t.Fatalf("operation %q", op.Op)
					}
					var want *outcome
					var result struct {
						OK     bool   `json:"ok"`
						PerKey []bool `json:"per_key"`
					}
					if json.Unmarshal(op.Result, &result) == nil {
						want = &outcome{ok: result.OK, present: len(result.PerKey) > 0 && result.PerKey[0]}
					}
					if (seen == nil) != (want == nil) || seen != nil && *seen != *want {
						t.Errorf("operation %d, %s: the model sees %+v, the real client %s", i, op.Op, seen, op.Result)
					}
				}
				for _, w := range workers {
					_ = w.conn.Close()
				}
			})
		})
	}
}

// oddServer is the recorder's server: right answers but for one.
type oddServer struct {
	odd  oddReply
	mu   sync.Mutex
	done bool
}

func (s *oddServer) serve(conn net.Conn) {
	defer conn.Close()
	// The kernel's buffers between the two: a client that reads less is no hindrance.
	replies := make(chan string, 16)
	defer close(replies)
	go func() {
		for reply := range replies {
			_, _ = io.WriteString(conn, reply)
		}
	}()
	r := newReader(conn)
	for {
		cmd, err := r.next()
		if err != nil {
			return
		}
		verb := string(cmd.args[0])
		if cmd.streams && r.skip(cmd.size) != nil {
			return
		}
		reply := map[string]string{
			"GET": bulk(strings.Repeat("v", 4096)), "SET": "+OK\r\n", "EXISTS": ":1\r\n", "DEL": ":1\r\n",
		}[verb]
		s.mu.Lock()
		odd := verb == s.odd.verb && (s.odd.always || !s.done)
		s.done = s.done || odd
		s.mu.Unlock()
		if odd {
			reply = s.odd.reply
		}
		if odd && s.odd.closes {
			_, _ = io.WriteString(conn, reply)
			return
		}
		replies <- reply
	}
}

// inSync fails where the server has sent more than was read.
func (w *worker) inSync(t *testing.T, after string) {
	t.Helper()
	_ = w.conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	var one [1]byte
	if n, _ := w.conn.Read(one[:]); n > 0 {
		t.Fatalf("%s: the server said more than the client expects, %q", after, one)
	}
}

// Whatever happens to the tier, each call of a native client ends, and with the
// right bytes where it ends with bytes.
func TestNativeClientsAreNeverStuckNorOutOfStep(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 6))
			tier := newMemory(64 << 10)
			tenant := tenantOf("t", tier)
			s := servePipes(t, Options{}, Access{Tenant: tenant})
			// Two models with sizes whose headers differ in length, two workers.
			workers := []*worker{{conn: s.dial()}, {conn: s.dial()}}
			sizes := map[string]int{"small": 17, "middle": 4096, "large": 20000}
			latest := make(map[string]string)
			stored := make(map[string]bool) // a value of the model was stored, so its size is known
			promised := make(map[string]bool)
			for step := range 400 {
				w := workers[random.IntN(len(workers))]
				names := []string{"small", "middle", "large"}
				model := names[random.IntN(len(names))]
				key := fmt.Sprintf("%s@1@0@%x@half", model, random.IntN(6))
				what := fmt.Sprintf("seed %d step %d key %s", seed, step, key)
				switch choice := random.IntN(10); {
				case choice < 3:
					value := strings.Repeat(string(rune('a'+random.IntN(26))), sizes[model])
					if seen := w.set(key, value); seen == nil || !seen.ok {
						t.Fatalf("%s: SET ends with %+v", what, seen)
					}
					latest[key], stored[model] = value, true
				case choice < 6:
					seen := w.number("EXISTS", key)
					if seen == nil || !seen.ok {
						t.Fatalf("%s: EXISTS ends with %+v", what, seen)
					}
					if promised[key] = promised[key] || seen.present; seen.present && !stored[model] {
						t.Fatalf("%s: a block exists that nobody stored", what)
					}
				case choice < 8 && stored[model]:
					value, seen := w.get(key, sizes[model])
					if seen == nil || !seen.ok {
						t.Fatalf("%s: GET ends with %+v", what, seen)
					}
					if promised[key] && !seen.present {
						t.Fatalf("%s: EXISTS promised it, and GET misses", what)
					}
					if seen.present && (len(value) != sizes[model] || value[0] != value[len(value)-1]) {
						t.Fatalf("%s: GET gives other bytes", what)
					}
					promised[key] = false
				case choice < 9:
					tier.pressure()
				default:
					seen := w.number("DEL", key)
					if seen == nil || !seen.ok {
						t.Fatalf("%s: DEL ends with %+v", what, seen)
					}
					promised[key] = false
				}
				w.inSync(t, what)
			}
			for _, w := range workers {
				_ = w.conn.Close()
			}
			s.end()
			if tier.openPuts() != 0 {
				t.Errorf("%d puts were never ended", tier.openPuts())
			}
		})
	}
}

// native opens a connection that has stored a value of the size in the family of
// the key form that is given, so that the server knows what it awaits.
func (s *serving) native(keyForm string, size int) *worker {
	s.t.Helper()
	w := &worker{conn: s.dial()}
	s.t.Cleanup(func() { _ = w.conn.Close() })
	if seen := w.set(fmt.Sprintf(keyForm, "0123456789abcdef"), strings.Repeat("s", size)); seen == nil || !seen.ok {
		s.t.Fatalf("SET ends with %+v", seen)
	}
	return w
}

const (
	inProcess    = "m@8@3@%s@half"
	multiprocess = "m@01000100@0@%s"
)

func TestAMissIsAsLongAsTheHeaderThatTheNativeClientAwaits(t *testing.T) {
	t.Parallel()
	for size, header := range map[int]string{
		7: "$-\r\n", 28: "$-1\r\n", 999: "$-01\r\n", 4096: "$-001\r\n", 65536: "$-0001\r\n", 2 << 20: "$-000001\r\n",
	} {
		t.Run(header, func(t *testing.T) {
			t.Parallel()
			tier := newMemory(8 << 20)
			s := serve(t, Options{}, Access{Tenant: tenantOf("t", tier)})
			c := s.client()
			c.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("v", size))
			c.do(header, "GET", "m@1@0@cd@half")
			// A value's header must not be taken for it.
			if want := fmt.Sprintf("$%d\r\n", size); len(want) != len(header) || want == header {
				t.Fatalf("%q does not stand for %q", header, want)
			}
		})
	}
}

func TestAValueOfAnotherSizeThanItsFamilysIsAMissToANativeClient(t *testing.T) {
	t.Parallel()
	tenant := tenantOf("t", newMemory(1<<20))
	s := serve(t, Options{}, Access{Tenant: tenant})
	old := s.client()
	old.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("o", 100))
	// The engine's layout changes: what it stores from now on is larger.
	c := s.client()
	c.do("+OK\r\n", "SET", "m@1@0@cd@half", strings.Repeat("n", 4096))
	c.do(":0\r\n", "EXISTS", "m@1@0@ab@half")
	c.do("$-001\r\n", "GET", "m@1@0@ab@half")
	c.do(":1\r\n", "EXISTS", "m@1@0@cd@half")
	// Another client sees what is there.
	other := s.client()
	other.do("+PONG\r\n", "PING")
	other.do(bulk(strings.Repeat("o", 100)), "GET", "m@1@0@ab@half")
	// The old one has its own buffers still.
	old.do("$-01\r\n", "GET", "m@1@0@ee@half")
	old.do(":1\r\n", "EXISTS", "m@1@0@ab@half")
	if got := tenant.Stats().SizeMismatches; got != 2 {
		t.Errorf("%d mismatches were counted, not 2", got)
	}
}

func TestTheSizeOfAFamilyIsLearnedFromWhatIsThereAfterARestart(t *testing.T) {
	t.Parallel()
	tier := newMemory(1 << 20)
	before := serve(t, Options{}, Access{Tenant: tenantOf("t", tier)}).client()
	before.do("+OK\r\n", "SET", "m@01000100@0@0123456789abcdef@salt", strings.Repeat("v", 4096))
	after := serve(t, Options{}, Access{Tenant: tenantOf("t", tier)}).client()
	after.do("$-1\r\n", "GET", "m@01000100@0@0123456789abcdee")
	after.do(":1\r\n", "EXISTS", "m@01000100@0@0123456789abcdef@salt")
	after.do("$-001\r\n", "GET", "m@01000100@0@0123456789abcdee")
}

func TestOnlyANativeClientTeachesAgainstWhatIsKnown(t *testing.T) {
	t.Parallel()
	s := serve(t, Options{}, Access{Tenant: tenantOf("t", newMemory(1<<20))})
	native := s.client()
	native.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("v", 4096))
	person := s.client()
	person.do("+PONG\r\n", "PING")
	person.do("+OK\r\n", "SET", "m@1@0@cd@half", "x")
	third := s.client()
	third.do("$-001\r\n", "GET", "m@1@0@ee@half")
	third.do(":0\r\n", "EXISTS", "m@1@0@cd@half")
}

func TestASetThatFindsNoRoomIsAnsweredOKAndCounted(t *testing.T) {
	t.Parallel()
	tenant := tenantOf("t", newMemory(1000))
	s := serve(t, Options{}, Access{Tenant: tenant})
	c := s.client()
	c.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("v", 4096))
	c.do(":0\r\n", "EXISTS", "m@1@0@ab@half")
	c.do("$-001\r\n", "GET", "m@1@0@ab@half") // its size is known for all that
	c.do("+OK\r\n", "SET", "m@1@0@ab@half", "")
	hello := s.client()
	hello.do("+PONG\r\n", "PING")
	hello.do("+OK\r\n", "SET", "m@1@0@ab@half", strings.Repeat("v", 4096))
	got := tenant.Stats()
	if got.Dropped != 3 || got.Models["m"].Dropped != 3 || got.Stored != 0 {
		t.Errorf("%d SETs were counted as dropped, %d of the model, %d as stored, not 3, 3, 0", got.Dropped, got.Models["m"].Dropped, got.Stored)
	}
}
