package dradriver

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// Call is a kind of call that the kubelet makes.
type Call string

// Kinds of calls.
const (
	CallPrepare   Call = "prepare"
	CallUnprepare Call = "unprepare"
)

// CallBounds are the upper bounds of CallStats.Buckets, in seconds; the last
// bucket has none.
var CallBounds = []float64{0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 45}

// CallStats counts the calls of one kind since the start.
type CallStats struct {
	Count    uint64   `json:"count"`    // calls that ended
	Errors   uint64   `json:"errors"`   // claims that a call answered with an error
	Waiting  uint64   `json:"waiting"`  // of those, the ones that wait for a pull that goes on
	Claims   uint64   `json:"claims"`   // claims in those calls
	Seconds  float64  `json:"seconds"`  // time of all calls together
	InFlight int      `json:"inFlight"` // calls that have not ended
	Buckets  []uint64 `json:"buckets"`  // calls by duration, not cumulative; one more than CallBounds
}

// calls orders what happens to one claim, and counts.
type calls struct {
	mu    sync.Mutex
	turns map[string]*turn // by claim UID or folder, while anybody waits for it or has it
	stats map[Call]*CallStats
}

func newCalls() *calls {
	c := &calls{turns: map[string]*turn{}, stats: map[Call]*CallStats{}}
	for _, call := range []Call{CallPrepare, CallUnprepare} {
		c.stats[call] = &CallStats{Buckets: make([]uint64, len(CallBounds)+1)}
	}
	return c
}

// begin counts a call; end is told how many claims it had, and how many of them
// failed or wait.
func (c *calls) begin(call Call) (end func(claims, failed, waiting int)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	c.stats[call].InFlight++
	return func(claims, failed, waiting int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		s, took := c.stats[call], time.Since(start).Seconds()
		s.InFlight--
		s.Count++
		s.Claims += uint64(claims)
		s.Errors += uint64(failed)
		s.Waiting += uint64(waiting)
		s.Seconds += took
		bucket, _ := slices.BinarySearch(CallBounds, took)
		s.Buckets[bucket]++
	}
}

func (c *calls) snapshot() map[Call]CallStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	stats := map[Call]CallStats{}
	for call, s := range c.stats {
		copied := *s
		copied.Buckets = slices.Clone(s.Buckets)
		stats[call] = copied
	}
	return stats
}

// arrivalKey is the context's key of an arrival.
type arrivalKey struct{}

// arrival is a call that has its turns.
type arrival struct {
	ticket ledger.Ticket
	at     time.Time // when it came; its turns it may have had later
	visit  *visit
}

// intercept takes a call's ticket and its turn around all that the library does
// for it: reading the claims, the driver's part, and the files with the
// metadata of devices. A call whose context ends while it waits did nothing.
func (d *Driver) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	var turns []string
	rank := rankPrepare
	switch r := req.(type) {
	case *drav1.NodePrepareResourcesRequest:
		turns = turnsOf(r.GetClaims())
	case *drav1.NodeUnprepareResourcesRequest:
		turns, rank = turnsOf(r.GetClaims()), rankUnprepare
	case *drav1beta1.NodePrepareResourcesRequest:
		turns = turnsOf(r.GetClaims())
	case *drav1beta1.NodeUnprepareResourcesRequest:
		turns, rank = turnsOf(r.GetClaims()), rankUnprepare
	case *registration.RegistrationStatus:
		if r.GetPluginRegistered() {
			d.presence.set(true, "")
			d.startedOnce.Do(func() { close(d.started) })
		} else {
			d.presence.set(false, "the kubelet refused the driver: "+r.GetError())
			d.o.Log.Error("the kubelet refused the driver", slog.String("reason", r.GetError()))
		}
		return handler(ctx, req)
	default:
		return handler(ctx, req)
	}
	arrived, err := d.arriveAt(ctx, turns, rank)
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	defer signal(d.held)
	defer arrived.visit.leave()
	return handler(context.WithValue(ctx, arrivalKey{}, arrived), req)
}

// claimOf is a claim as the kubelet names it, in either version of its protocol.
type claimOf interface {
	GetUid() string
	GetNamespace() string
	GetName() string
}

// turnsOf are the turns that a call needs: those of its claims, and of the
// folders that the library has for them.
func turnsOf[C claimOf](claims []C) []string {
	turns := make([]string, 0, 2*len(claims))
	for _, claim := range claims {
		turns = append(turns, claim.GetUid(), folderOf(claim.GetNamespace(), claim.GetName()))
	}
	return turns
}

// arrive gives a call its turns where intercept has not: for callers that come
// without gRPC.
func (d *Driver) arrive(ctx context.Context, uids []string, rank callRank) (a arrival, leave func(), err error) {
	if err := ctx.Err(); err != nil {
		return arrival{}, nil, err
	}
	if a, ok := ctx.Value(arrivalKey{}).(arrival); ok {
		return a, func() {}, nil
	}
	if a, err = d.arriveAt(ctx, uids, rank); err != nil {
		return arrival{}, nil, err
	}
	return a, a.visit.leave, nil
}

// arriveAt takes a call's ticket and then its turns.
func (d *Driver) arriveAt(ctx context.Context, turns []string, rank callRank) (arrival, error) {
	a := arrival{ticket: d.o.Ledger.Arrive(), at: time.Now()}
	var err error
	a.visit, err = d.calls.enter(ctx, turns, rank)
	return a, err
}

// errWaiting is wrapped by the answer to a Prepare whose pull goes on.
var errWaiting = errors.New("weights are not there yet")
