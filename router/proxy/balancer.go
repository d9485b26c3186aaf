// Package proxy is the router's data path: an OpenAI-compatible HTTP server
// that reads a request once, asks a Balancer for an endpoint, sends the body
// on unchanged but for spliced bytes, and streams the answer back as it comes.
//
// The router root builds one Proxy and serves it; tests give it a fake
// Balancer. The package never parses a body into Go values, never re-writes
// bytes it does not own, keeps no prefix memory (that is the pool's) and
// writes no usage record itself: it hands each finished exchange to Options.Done.
package proxy

import (
	"errors"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// Errors a Balancer returns; wrap them with facts for the client to read.
var (
	// ErrUnknownModel: no logical model of that name (404, model_not_found).
	ErrUnknownModel = errors.New("unknown model")
	// ErrNoEndpoint: the model exists and nothing can serve it now (503).
	ErrNoEndpoint = errors.New("no endpoint")
	// ErrUnmetNeeds: no target declares what the request needs (400).
	ErrUnmetNeeds = errors.New("unmet needs")
)

// Balancer chooses endpoints. It is the proxy's view of the pool.
type Balancer interface {
	// Acquire picks an endpoint for req and reserves load on it. avoid, when
	// not nil, names endpoints that must not be chosen. The reservation's Done
	// is called exactly once.
	Acquire(req *pick.Request, avoid func(endpointID string) bool) (Reservation, error)
	// Remember notes that endpointID holds the stored response responseID.
	Remember(responseID, endpointID string)
	// Holder is the endpoint that holds a stored response, false if unknown.
	Holder(responseID string) (endpointID string, ok bool)
	// Models lists the logical models, in the order /v1/models shows them.
	Models() []Model
}

// Model is one logical model as clients see it.
type Model struct {
	Name          string
	ContextTokens int // longest prompt and answer together, 0 if undeclared
}

// Target is the endpoint a reservation stands for. It is read-only.
type Target struct {
	URL          string // base of the engine, such as http://10.0.0.7:8000
	EndpointID   string
	Pool         string
	Accelerator  string // accelerator class, for metering
	LogicalModel string
	ServedModel  string // spliced into the body where it differs from the client's
	// ForwardAuthorization passes the client's Authorization to the engine.
	ForwardAuthorization bool
	// ContinuousUsage says the engine takes stream_options.continuous_usage_stats.
	ContinuousUsage bool
	Reason          string // why this endpoint, one of a bounded set
	CachedTokens    int    // prompt tokens the choice predicts to be cached there
}

// Reservation is load held on one endpoint for one attempt.
type Reservation interface {
	Target() *Target
	// FirstByte says that prefill is over: the first token has arrived.
	FirstByte()
	// Done releases the load; later calls do nothing.
	Done(Outcome)
}

// Failure is how an attempt ended, as passive health needs to know it.
type Failure uint8

// Failures. FailureClient and FailureClientGone say nothing about the endpoint.
const (
	FailureNone       Failure = iota
	FailureDial               // no connection
	FailureReset              // connection lost before any response byte
	FailureMidStream          // connection lost within the response
	FailureTimeout            // no response in time
	FailureServer             // status 5xx
	FailureClientGone         // the client left first
	FailureClient             // status 4xx: the request's fault
)

// Outcome is what one attempt came to.
type Outcome struct {
	Failure          Failure
	PromptTokens     int
	CachedTokens     int
	CompletionTokens int
	UsageKnown       bool          // the engine reported the three counts
	TTFT             time.Duration // to the first content, 0 if none came
}

// Exchange is one finished request, handed to Options.Done from the request's
// goroutine. The callee copies what it keeps.
type Exchange struct {
	ID       string
	Start    time.Time
	Path     string // the route, one of a bounded set
	Consumer string
	// Model is the logical model; empty when the request was refused before one was known.
	Model, ServedModel, Pool, EndpointID, Accelerator string
	Reason                                            string // decision, or why refused
	Outcome                                           string // ok, client_gone, engine_error, engine_lost, timeout, cut, refused
	Status                                            int
	Stream                                            bool
	PromptTokens, CachedTokens, CompletionTokens      int
	// Estimated: the engine did not report usage; the token counts are ours.
	Estimated bool
	// CachedKnown: the engine reported cached tokens for this request.
	CachedKnown     bool
	PredictedCached int
	TTFT            time.Duration // 0 if no content came
	Duration        time.Duration
	// Added is the proxy's own time before the upstream request began.
	Added   time.Duration
	Retries int
}
