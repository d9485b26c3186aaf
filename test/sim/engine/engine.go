// Package engine owns a simulated inference engine that speaks the
// OpenAI-compatible API and vLLM's metric names: a prefill rate, a decode step
// model, a running batch with a queue behind it and an LRU block cache decide
// when each answer comes and how much of a prompt was cached. `hearth
// engine-sim`, demos, tests and load generators serve it. It never stands for
// a real engine's speed, and nothing on a serving node imports it.
//
// A token is four bytes of rendered text, so that sizes can be computed
// without a tokenizer. The same request and seed give the same text.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/units"
)

// Options configures an Engine. The zero value of a field means its default.
type Options struct {
	// ServedModel is the one model name the engine answers to. Required.
	ServedModel string
	// PrefillRate is prompt tokens computed per second, one request at a time.
	// Default 8000.
	PrefillRate float64
	// DecodeStep is the time of one decode step of a lone request; every
	// further running request adds DecodeSlope. Defaults 10ms and 500us.
	DecodeStep, DecodeSlope time.Duration
	// KVTokens is the capacity of the block cache in tokens, BlockTokens the
	// size of one block. Defaults 65536 and 16.
	KVTokens, BlockTokens int
	// MaxRunning bounds the running batch, MaxWaiting the queue behind it; a
	// request past both is answered 503. Defaults 16 and 1024.
	MaxRunning, MaxWaiting int
	// MaxResponses bounds the stored /v1/responses; the oldest is forgotten.
	// Default 1024.
	MaxResponses int
	// BodyLimit bounds a request body. Default 64 MiB.
	BodyLimit units.Bytes
	// Seed varies the text; a request's own seed is mixed in.
	Seed uint64
	// Speedup divides every simulated duration. Default 1.
	Speedup float64
	// AllowFaults opens POST /sim/fault.
	AllowFaults bool
	// Die ends the process for the fault "die". Default: the engine answers
	// nothing any more and closes its connections.
	Die func()
	// Worked is told what each request to a generating route made the engine
	// do, from the request's goroutine. Default: nobody is.
	Worked func(Work)
	// Now and Sleep are the clock. Sleep returns ctx's error when ctx ends
	// first. Defaults: the time package.
	Now   func() time.Time
	Sleep func(ctx context.Context, d time.Duration) error
	Log   *slog.Logger
}

func (o *Options) setDefaults() {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&o.KVTokens, 65536)
	def(&o.BlockTokens, 16)
	def(&o.MaxRunning, 16)
	def(&o.MaxWaiting, 1024)
	def(&o.MaxResponses, 1024)
	if o.PrefillRate == 0 {
		o.PrefillRate = 8000
	}
	if o.DecodeStep == 0 {
		o.DecodeStep = 10 * time.Millisecond
	}
	if o.DecodeSlope == 0 {
		o.DecodeSlope = 500 * time.Microsecond
	}
	if o.BodyLimit == 0 {
		o.BodyLimit = 64 * units.MiB
	}
	if o.Speedup == 0 {
		o.Speedup = 1
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Sleep == nil {
		o.Sleep = sleep
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// Validate names the first option that makes no sense.
func (o Options) Validate() error {
	o.setDefaults()
	switch {
	case o.ServedModel == "":
		return errors.New("check engine options: ServedModel is empty: want the name clients ask for")
	case o.PrefillRate < 0 || o.Speedup < 0 || o.DecodeStep < 0 || o.DecodeSlope < 0:
		return errors.New("check engine options: rates and times must not be negative")
	case o.BlockTokens < 1 || o.KVTokens < o.BlockTokens:
		return fmt.Errorf("check engine options: %d KV tokens hold no block of %d tokens", o.KVTokens, o.BlockTokens)
	case o.MaxRunning < 1 || o.MaxWaiting < 0 || o.MaxResponses < 1:
		return errors.New("check engine options: MaxRunning and MaxResponses must be at least 1, MaxWaiting at least 0")
	}
	return nil
}

// Engine is an http.Handler. It starts no goroutine of its own: every request
// is simulated on its handler's.
type Engine struct {
	opts    Options
	started time.Time
	mux     *http.ServeMux
	prefill chan struct{} // capacity 1: one prefill at a time

	mu struct {
		sync.Mutex
		cache    *blockCache
		running  int
		reserved int // blocks promised to running requests
		waiting  []*sequence
		count    counters
		fault    Fault
		dead     bool
		serial   uint64
		stored   responseStore
	}
}

// counters only grow. Tokens unless said.
type counters struct {
	prompt, cached, generated, queries, hits uint64
	finished                                 map[string]uint64 // requests by finish reason
	rejected                                 uint64            // requests
	prefillSeconds                           float64           // simulated, before Speedup
}

// New checks the options and returns an engine with an empty cache.
func New(opts Options) (*Engine, error) {
	opts.setDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{opts: opts, started: opts.Now(), prefill: make(chan struct{}, 1)}
	e.mu.cache = newBlockCache()
	e.mu.count.finished = map[string]uint64{}
	e.mu.stored = newResponseStore(opts.MaxResponses)
	e.mux = e.routes()
	return e, nil
}

// ServeHTTP implements http.Handler.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	dead := e.mu.dead
	e.mu.Unlock()
	if dead {
		abort()
		return
	}
	if e.early(w, r) {
		return
	}
	if e.opts.Worked != nil && r.Method == http.MethodPost && strings.HasPrefix(r.URL.Path, "/v1/") {
		e.watched(w, r)
		return
	}
	e.mux.ServeHTTP(w, r)
}

func (e *Engine) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", e.handleChat)
	mux.HandleFunc("POST /v1/completions", e.handleCompletions)
	mux.HandleFunc("POST /v1/embeddings", e.handleEmbeddings)
	mux.HandleFunc("POST /v1/responses", e.handleResponses)
	mux.HandleFunc("GET /v1/responses/{id}", e.handleGetResponse)
	mux.HandleFunc("GET /v1/models", e.handleModels)
	mux.HandleFunc("POST /tokenize", e.handleTokenize)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /metrics", e.handleMetrics)
	mux.HandleFunc("POST /reset_prefix_cache", e.handleReset)
	if e.opts.AllowFaults {
		mux.HandleFunc("POST /sim/fault", e.handleFault)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "NotFoundError", "", "no such route")
	})
	return mux
}

// handleReset empties the prefix cache, as vLLM's development route of that
// name does; it refuses while requests run. Counters keep growing.
func (e *Engine) handleReset(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.running > 0 {
		writeError(w, http.StatusConflict, "ConflictError", "", "requests are running")
		return
	}
	e.mu.cache.clear()
	w.WriteHeader(http.StatusOK)
}

// pause sleeps a simulated duration.
func (e *Engine) pause(ctx context.Context, d time.Duration) error {
	return e.opts.Sleep(ctx, time.Duration(float64(d)/e.opts.Speedup))
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
