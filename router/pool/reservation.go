package pool

import (
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// Failure is how an attempt at an endpoint ended, as far as its health goes.
type Failure uint8

// Failures of an Outcome.
const (
	FailureNone     Failure = iota // answered, with whatever code below 500
	FailureConnect                 // could not connect
	FailureReset                   // reset or EOF before the answer's end
	FailureServer                  // answered 5xx
	FailureTimeout                 // no answer in time
	FailureCanceled                // the client left or the router shut down: says nothing
	FailureClient                  // answered 4xx: says nothing
)

// Outcome is what became of a reservation. Token counts are the engine's own,
// 0 where it reported none.
type Outcome struct {
	Failure Failure
	// Usage says that the engine reported the counts below.
	Usage                                        bool
	PromptTokens, CachedTokens, CompletionTokens int
	// TTFT is the time from sending the request to the first byte of content, 0
	// where none came.
	TTFT time.Duration
}

// Reservation is a request's place at an endpoint, from Acquire to Done. Its
// fields do not change. FirstByte and Done may be called from any goroutine
// and count once each.
type Reservation struct {
	URL          string // http://host:port of the engine, no trailing slash
	EndpointID   string // node/name, or the URL of a static endpoint
	Pool         string
	LogicalModel string
	ServedModel  string // what to put into the body's model field
	Accelerator  string // accelerator class for metering, empty where unknown
	Engine       string // vllm, sglang, llama-server, sim, or empty
	// Options of the pool.
	ForwardAuthorization bool
	ContinuousUsage      bool

	decision pick.Decision
	endpoint *endpoint
	pool     *poolState
	prompt   int // uncached prompt tokens held until the first byte
	decode   int // tokens held until Done
	tokens   int // estimated prompt tokens
	bytes    int // length of the canonical walk
	first    atomic.Bool
	done     atomic.Bool
}

// Decision is why this endpoint was chosen.
func (r *Reservation) Decision() pick.Decision { return r.decision }
