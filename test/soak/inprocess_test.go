package soak

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/sim/engine"
	"github.com/hearth-dev/hearth/units"
)

// inProcess are engines of both pools in this process, and their books.
type inProcess struct {
	pools []pool.PoolConfig

	mu    sync.Mutex
	works Works
}

// startEngines serves two engines of each pool on real sockets.
func startEngines(t *testing.T, change func(*engine.Options)) *inProcess {
	t.Helper()
	p := &inProcess{works: Works{}}
	for _, model := range Models {
		config := pool.PoolConfig{Name: model, ContinuousUsage: model == "exact"}
		for range 2 {
			url := ""
			o := engine.Options{
				ServedModel: ServedModel, Seed: EngineSeed, AllowFaults: true, KVTokens: 1 << 21, BlockTokens: 64,
				PrefillRate: 1e8, DecodeStep: time.Millisecond, DecodeSlope: time.Microsecond, MaxRunning: 64,
			}
			o.Worked = func(w engine.Work) {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.works.Tell(url, w)
			}
			if change != nil {
				change(&o)
			}
			e, err := engine.New(o)
			if err != nil {
				t.Fatal(err)
			}
			s := httptest.NewServer(e)
			t.Cleanup(s.Close)
			url = s.URL
			config.Endpoints = append(config.Endpoints, pool.EndpointConfig{URL: url})
		}
		p.pools = append(p.pools, config)
	}
	return p
}

// routerConfig is a router over the pools, on free loopback ports.
func routerConfig(t *testing.T, pools []pool.PoolConfig) router.Config {
	t.Helper()
	dir := t.TempDir()
	cfg := router.Default()
	cfg.Listen = router.Listen{Ingress: "127.0.0.1:0", Admin: "127.0.0.1:0", Socket: filepath.Join(dir, "r.sock")}
	cfg.Metering.File = filepath.Join(dir, "usage.jsonl")
	cfg.Pools = pools
	cfg.Models = models()
	cfg.Limits.BodyBytes = 8 * units.MiB
	// However slow the machine, nothing here ends by a clock.
	cfg.Limits.DialTimeout, cfg.Limits.DrainTimeout = units.Duration(time.Minute), units.Duration(5*time.Minute)
	return cfg
}

// running is a router in this process.
type running struct {
	*router.Router
	front *Front
	usage string
	stop  func() error // drains
}

func startRouter(t *testing.T, name string, cfg router.Config) *running {
	t.Helper()
	r, err := router.New(cfg, router.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	select {
	case <-r.Ready():
	case err := <-done:
		t.Fatalf("run: %v", err)
	}
	var once sync.Once
	var result error
	n := &running{Router: r, front: NewFront(name, "http://"+r.Status().Listeners["ingress"], nil), usage: cfg.Metering.File}
	n.stop = func() error {
		once.Do(func() {
			n.front.Retired.Store(true)
			cancel()
			result = <-done
		})
		return result
	}
	t.Cleanup(func() { _ = n.stop() })
	return n
}

// labelled runs f so that every goroutine begun by it carries a label, and
// gives how many live now.
func labelled(t *testing.T, f func()) (living func() int) {
	t.Helper()
	name := t.Name()
	pprof.Do(t.Context(), pprof.Labels("soak", name), func(context.Context) { f() })
	return func() int {
		var text bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
			t.Fatal(err)
		}
		total, count := 0, 0
		lines := bufio.NewScanner(&text)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			line := lines.Text()
			if n := 0; len(line) > 0 && line[0] >= '0' && line[0] <= '9' {
				if _, err := fmt.Sscanf(line, "%d @", &n); err == nil {
					count = n
				}
			}
			if strings.HasPrefix(line, "# labels:") && strings.Contains(line, fmt.Sprintf("%q", name)) {
				total += count
			}
		}
		return total
	}
}

// awaitNone waits until none of the labelled goroutines lives, else it shows
// where they are.
func awaitNone(t *testing.T, living func() int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := until(ctx, 20*time.Millisecond, func() bool { return living() == 0 }); err == nil {
		return
	}
	var stacks bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
	t.Errorf("%d goroutines of %s live on:\n%s", living(), t.Name(), stacks.String())
}

// report fails the test with what disagrees.
func report(t *testing.T, c Complaints) {
	t.Helper()
	if c.Count > 0 {
		t.Errorf("%d disagreements, the first of them:\n%s", c.Count, strings.Join(c.First, "\n"))
	}
}

// released fails unless the router holds nothing for anyone.
func released(t *testing.T, r *running) {
	t.Helper()
	for _, e := range r.Endpoints() {
		if e.InFlight != 0 || e.InFlightPromptTokens != 0 || e.InFlightDecodeTokens != 0 {
			t.Errorf("reservations are left: %+v", e)
		}
	}
	if n := r.Status().InFlight; n != 0 {
		t.Errorf("%d requests in flight at the end", n)
	}
}

func TestARollingRestartUnderLoadLosesNoRequest(t *testing.T) {
	t.Parallel()
	engines := startEngines(t, nil)
	var mu sync.Mutex
	var fronts []*Front
	load := &Load{Clients: 12, Seed: 1, Name: "roll", Big: 1 << 20, Patience: 5 * time.Minute, Fronts: func() []*Front {
		mu.Lock()
		defer mu.Unlock()
		return fronts
	}}
	rounds, each := 3, 200
	if testing.Short() {
		rounds, each = 2, 60
	}
	var all []Record
	living := labelled(t, func() {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var old *running
		done := make(chan struct{})
		for round := range rounds {
			next := startRouter(t, fmt.Sprint("router-", round), routerConfig(t, engines.pools))
			mu.Lock()
			fronts = []*Front{next.front}
			mu.Unlock()
			if old == nil {
				go func() { defer close(done); load.Run(ctx) }()
			} else {
				// The load asks the next one now; what the old one has, it finishes.
				if err := old.stop(); err != nil {
					t.Errorf("%s ended with %v", old.front.Name, err)
				}
				released(t, old)
				all = append(all, mustRecords(t, old.usage)...)
				old.front.CloseIdle()
			}
			old = next
			want := (round + 1) * each
			if err := until(ctx, 5*time.Millisecond, func() bool { return load.Book.Count()["all"] >= want }); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		<-done
		if err := old.stop(); err != nil {
			t.Errorf("the last router ended with %v", err)
		}
		released(t, old)
		all = append(all, mustRecords(t, old.usage)...)
		old.front.CloseIdle()
	})
	awaitNone(t, living)
	engines.mu.Lock()
	defer engines.mu.Unlock()
	report(t, load.Book.Compare(all, engines.works))
	count := load.Book.Count()
	t.Logf("%d rounds: %v", rounds, count)
	for _, what := range []string{sawError, sawBroken, sawGarbage, sawExpired, sawWrong} {
		if count[what] > 0 {
			t.Errorf("%d requests ended as %q, with no fault but the restarts", count[what], what)
		}
	}
}

func mustRecords(t *testing.T, path string) []Record {
	t.Helper()
	records, err := ReadRecords(path)
	if err != nil {
		t.Fatal(err)
	}
	return records
}

// raiseFiles makes room for need open files, or says what is too low.
func raiseFiles(t *testing.T, need uint64) {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur >= need {
		return
	}
	if limit.Max < need {
		t.Fatalf("this test opens %d files, and the hard limit is %d: raise it (ulimit -Hn %d)", need, limit.Max, need)
	}
	limit.Cur = need
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatalf("raise the limit of open files to %d: %v", need, err)
	}
}

func TestThousandsOfIdleStreamsAreHeldAndAllEndRight(t *testing.T) {
	t.Parallel()
	streams := 2000
	if testing.Short() {
		streams = 200
	}
	raiseFiles(t, uint64(4*streams+1000)) // client, router twice, engine
	idle, goOn := make(chan struct{}, streams), make(chan struct{})
	engines := startEngines(t, func(o *engine.Options) {
		o.MaxRunning = streams
		o.Sleep = func(ctx context.Context, d time.Duration) error {
			if d < time.Millisecond {
				return nil // a prefill
			}
			select {
			case <-goOn:
				return nil
			default:
			}
			idle <- struct{}{} // once each: goOn is closed before anyone goes on
			select {
			case <-goOn:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	var records []Record
	var book Book
	living := labelled(t, func() {
		r := startRouter(t, "router", routerConfig(t, engines.pools))
		before := memory()
		ended := make(chan Sight, streams)
		for i := range streams {
			go func() { ended <- hold(t.Context(), r.front, i) }()
		}
		for range streams {
			select {
			case <-idle:
			case s := <-ended:
				close(goOn)
				t.Fatalf("a stream ended before all were open: %+v", s)
			}
		}
		if n := r.Status().InFlight; n != int64(streams) {
			t.Errorf("%d streams are open, want %d", n, streams)
		}
		per := (memory() - before) / uint64(streams)
		t.Logf("%d idle streams: %d KiB each of client, router and engine together", streams, per>>10)
		if per > 512<<10 {
			t.Errorf("an idle stream costs %d KiB of client, router and engine together", per>>10)
		}
		close(goOn)
		for range streams {
			book.saw(<-ended)
		}
		if err := r.stop(); err != nil {
			t.Errorf("the router ended with %v", err)
		}
		released(t, r)
		records = mustRecords(t, r.usage)
		r.front.CloseIdle()
	})
	awaitNone(t, living)
	engines.mu.Lock()
	defer engines.mu.Unlock()
	report(t, book.Compare(records, engines.works))
	if n := book.Count()[sawRight]; n != streams || len(records) != streams {
		t.Errorf("%d streams ended right and %d have a record, want %d", n, len(records), streams)
	}
}

// memory is what the heap and the stacks of this process hold, in bytes.
func memory() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// hold asks for one stream and reads it to its end.
func hold(ctx context.Context, f *Front, i int) Sight {
	fields := map[string]any{"model": Models[i%len(Models)], "prompt": fmt.Sprint("idle stream ", i), "max_tokens": 16, "stream": true}
	a := &ask{id: fmt.Sprint("idle-", i), kind: kindCompletion, path: "/v1/completions", stream: true, body: encode(fields)}
	a.expect([]byte(fmt.Sprint("idle stream ", i)), 16)
	s := Sight{ID: a.id, Kind: a.kind, Front: f.Name, Stream: true, Prompt: a.prompt, Tokens: a.tokens}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL+a.path, bytes.NewReader(a.body))
	if err != nil {
		return s.is(sawWrong, err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", a.id)
	resp, err := f.plain.Do(req)
	if err != nil {
		return s.is(sawWrong, err)
	}
	defer func() { _ = resp.Body.Close() }()
	s.Status = resp.StatusCode
	return s.judge(f, stays, nil, a.check(resp, resp.Body))
}
