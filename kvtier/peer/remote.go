package peer

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier/gate"
)

// errDamaged says that a peer sent a block that is not what it said, or not what
// was asked for.
var errDamaged = errors.New("a peer sent another block than it was asked for")

// remote is a peer as this node sees it.
type remote struct {
	Peer
	near  bool // of this node's zone
	speed *gate.Estimator
	// asks and fetches are the rows of what waits for it.
	asks    chan *question
	fetches chan *flight
	// since is when the exchange under way to ask began, monotonic; 0 is none.
	since atomic.Int64
	// round rises with each failure: what was known of it before is forgotten.
	round                                 atomic.Uint64
	failures, damaged, blocks, blockBytes atomic.Int64

	mu      sync.Mutex
	backoff time.Duration
	until   time.Duration // it is asked nothing before, monotonic
}

func newRemote(p Peer, zone string) *remote {
	return &remote{
		Peer: p, near: p.Zone == zone, speed: gate.NewEstimator(seed, nil),
		asks: make(chan *question, rowLimit), fetches: make(chan *flight, rowLimit),
	}
}

// down says whether it failed so lately that nothing is asked of it.
func (r *remote) down(now time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return now < r.until
}

// slow says whether what it is asked now is under way for longer than a while.
func (r *remote) slow(now, than time.Duration) bool {
	since := r.since.Load()
	return since != 0 && now-time.Duration(since) > than
}

// good ends what failures of before brought.
func (p *Peers) good(r *remote) {
	r.mu.Lock()
	failed := r.backoff > 0
	r.backoff = 0
	r.mu.Unlock()
	if failed {
		p.log.Info("a KV peer answers again", slog.String("peer", r.Name), slog.String("addr", r.Addr))
	}
}

// failed notes that an exchange ended in an error.
func (p *Peers) failed(r *remote, err error) {
	r.round.Add(1)
	damaged := errors.Is(err, errDamaged) || errors.Is(err, ErrProtocol)
	now := p.now()
	r.mu.Lock()
	again := now < r.until // another connection told it already
	first := r.backoff == 0
	switch {
	case damaged:
		r.backoff, r.until = maxBackoff, now+damagedFor
	case !again:
		r.backoff = min(max(2*r.backoff, firstBackoff), maxBackoff)
		r.until = now + r.backoff
	}
	pause := r.until - now
	r.mu.Unlock()
	r.failures.Add(1)
	if damaged {
		r.damaged.Add(1)
		p.log.Error("a KV peer sends what it should not, it is asked nothing for a while",
			slog.String("peer", r.Name), slog.String("addr", r.Addr), slog.Duration("pause", pause), slog.Any("error", err))
		return
	}
	if first {
		p.log.Warn("a KV peer fails, it is asked again from time to time",
			slog.String("peer", r.Name), slog.String("addr", r.Addr), slog.Any("error", err))
	}
}
