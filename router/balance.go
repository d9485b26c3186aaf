package router

import (
	"fmt"

	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/router/proxy"
)

// balancer is pool as the proxy sees it.
type balancer struct{ pools *pool.Pools }

var _ proxy.Balancer = balancer{}

// Acquire implements proxy.Balancer.
func (b balancer) Acquire(req *pick.Request, avoid func(string) bool) (proxy.Reservation, error) {
	if req.Model == "" && req.Pin != "" {
		return b.acquirePinned(req)
	}
	r, err := b.pools.Acquire(req, avoid)
	if err != nil {
		return nil, refused(err)
	}
	return held(r), nil
}

// acquirePinned serves a request that names a stored response and no model:
// any model that the holder serves will do.
func (b balancer) acquirePinned(req *pick.Request) (proxy.Reservation, error) {
	ask := *req
	for _, m := range b.pools.Models() {
		ask.Model = m.Name
		if r, err := b.pools.Acquire(&ask, nil); err == nil {
			return held(r), nil
		}
	}
	return nil, proxy.ErrNoEndpoint
}

// refused puts a pool's error into the proxy's words; the causes stay in the text.
func refused(err error) error {
	switch {
	case is[*pool.UnmetNeedsError](err):
		return fmt.Errorf("%w: %w", proxy.ErrUnmetNeeds, err)
	case pool.IsUnavailable(err):
		return fmt.Errorf("%w: %w", proxy.ErrNoEndpoint, err)
	default:
		return fmt.Errorf("%w: %w", proxy.ErrUnknownModel, err)
	}
}

// reservation is a pool's reservation as the proxy sees it.
type reservation struct {
	*pool.Reservation
	target proxy.Target
}

func held(r *pool.Reservation) *reservation {
	d := r.Decision()
	return &reservation{r, proxy.Target{
		URL: r.URL, EndpointID: r.EndpointID, Pool: r.Pool, Accelerator: r.Accelerator,
		LogicalModel: r.LogicalModel, ServedModel: r.ServedModel,
		ForwardAuthorization: r.ForwardAuthorization, ContinuousUsage: r.ContinuousUsage,
		Reason: string(d.Reason), CachedTokens: d.CreditTokens,
	}}
}

// Target implements proxy.Reservation.
func (r *reservation) Target() *proxy.Target { return &r.target }

var failures = [...]pool.Failure{
	proxy.FailureNone: pool.FailureNone, proxy.FailureDial: pool.FailureConnect, proxy.FailureReset: pool.FailureReset,
	proxy.FailureMidStream: pool.FailureReset, proxy.FailureTimeout: pool.FailureTimeout,
	proxy.FailureServer: pool.FailureServer, proxy.FailureClientGone: pool.FailureCanceled,
	proxy.FailureClient: pool.FailureClient,
}

// Done implements proxy.Reservation.
func (r *reservation) Done(o proxy.Outcome) {
	r.Reservation.Done(pool.Outcome{
		Failure: failures[o.Failure], Usage: o.UsageKnown, PromptTokens: o.PromptTokens, CachedTokens: o.CachedTokens,
		CompletionTokens: o.CompletionTokens, TTFT: o.TTFT,
	})
}

// Remember implements proxy.Balancer.
func (b balancer) Remember(responseID, endpointID string) { b.pools.Remember(responseID, endpointID) }

// Holder implements proxy.Balancer.
func (b balancer) Holder(responseID string) (string, bool) { return b.pools.Holder(responseID) }

// Models implements proxy.Balancer.
func (b balancer) Models() []proxy.Model {
	infos := b.pools.Models()
	list := make([]proxy.Model, len(infos))
	for i, m := range infos {
		list[i] = proxy.Model{Name: m.Name, ContextTokens: m.ContextTokens}
	}
	return list
}
