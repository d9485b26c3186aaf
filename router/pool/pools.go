// Package pool owns what the router knows of logical models, pools and
// endpoints, and the places that requests hold at them. The proxy calls
// Acquire for each attempt and ends the reservation with Done; the feed hands
// it the nodes' states; the router's root swaps its configuration. It never
// speaks to an engine or a node, and it never waits.
package pool

import (
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/pick"
)

// Options is what New needs beyond the reloadable Config.
type Options struct {
	// Weights of the choice; zero fields mean pick.Default.
	Weights pick.Config
	// MaxBlocks bounds the prefix memory of all endpoints together, in blocks,
	// 0 = DefaultMaxBlocks.
	MaxBlocks int
	Log       *slog.Logger // nil = discard
	Now       func() time.Time
}

// Defaults of Options and PoolConfig.
const (
	DefaultMaxBlocks = 4 << 20
	DefaultKVTokens  = 512 << 10
)

// Pools is safe for concurrent use.
type Pools struct{}

type (
	endpoint  struct{}
	poolState struct{}
)

// New returns pools with the configuration, which must be valid. It starts nothing.
func New(cfg Config, opts Options) (*Pools, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Pools{}, nil
}

// Acquire chooses an endpoint for the request and reserves a place there. An
// endpoint for which avoid (may be nil) is true is left out. Errors wrap
// ErrUnknownModel, ErrUnmetNeeds or ErrNoEndpoint.
func (p *Pools) Acquire(req *pick.Request, avoid func(endpointID string) bool) (*Reservation, error) {
	return nil, ErrUnknownModel
}

// FirstByte says that the engine began to answer: the prompt is computed.
func (r *Reservation) FirstByte() { r.first.Store(true) }

// Done ends the reservation. Only the first call counts.
func (r *Reservation) Done(o Outcome) { r.done.Store(true) }

// Explain says what Acquire would do. It reserves and remembers nothing.
func (p *Pools) Explain(req *pick.Request) Explanation { return Explanation{Model: req.Model} }

// Models lists the names of the logical models, sorted.
func (p *Pools) Models() []string { return nil }

// SetModels swaps the configuration. On an error, which names every wrong
// field, the old one stays. Requests in flight are not touched.
func (p *Pools) SetModels(cfg Config) error { return cfg.Validate() }

// Apply takes a node's state as of receivedAt. It keeps the state's messages,
// not the state.
func (p *Pools) Apply(state *report.State, receivedAt time.Time) {}

// Remember notes which endpoint holds a response of /v1/responses.
func (p *Pools) Remember(responseID, endpointID string) {}

// Holder gives the endpoint that holds a response, if it is still known.
func (p *Pools) Holder(responseID string) (endpointID string, found bool) { return "", false }
