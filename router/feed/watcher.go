package feed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// Pauses between two streams to a node, doubled while no message comes and
// spread by half.
const (
	firstPause = 100 * time.Millisecond
	maxPause   = 5 * time.Second
)

// NodeStats is what the router knows of its stream to one node.
type NodeStats struct {
	Address    string  `json:"address"`
	Node       string  `json:"node,omitempty"` // as reported
	Connected  bool    `json:"connected"`      // a stream is open and has brought a message
	Epoch      uint64  `json:"epoch"`
	Seq        uint64  `json:"seq"`
	AgeSeconds float64 `json:"ageSeconds"` // since the last message, -1 before the first
	Messages   uint64  `json:"messages"`
	Snapshots  uint64  `json:"snapshots"`
	Gaps       uint64  `json:"gaps"`
	Streams    uint64  `json:"streams"` // opened, ever
	LastError  string  `json:"lastError,omitempty"`
	// KV is the fill of its KV store; nil where it reports none.
	KV *KVStats `json:"kv,omitempty"`
}

// watcher follows one node. Its goroutine alone touches the report's state.
type watcher struct {
	feed   *Feed
	node   Node
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex
	stats NodeStats // guarded by mu
	last  time.Time // of the last message; guarded by mu
	// scaleouts are those of the state, whose messages nobody changes; guarded by mu.
	scaleouts []*report.ScaleOut
}

func (w *watcher) run(ctx context.Context) {
	log := w.feed.opts.Log.With(slog.String("address", w.node.Address))
	conn, err := w.dial()
	if err != nil {
		w.fail(err)
		log.Error("cannot watch node", slog.Any("error", err))
		return
	}
	defer func() { _ = conn.Close() }()
	state := &report.State{}
	resume := report.Resume{Router: w.feed.opts.Router}
	pause := firstPause
	for {
		fresh := false // a message came on this stream
		w.count(func(s *NodeStats) { s.Streams++ })
		err := report.Watch(ctx, conn, resume, func(r *report.Report) error {
			if err := w.take(state, r); err != nil {
				return err
			}
			if !fresh {
				log.Info("watch node", slog.String("node", state.Node()), slog.Uint64("epoch", state.Epoch()))
			}
			fresh = true
			return nil
		})
		if ctx.Err() != nil {
			w.fail(nil)
			return
		}
		w.fail(err)
		if fresh {
			pause = firstPause
		}
		resume = state.Resume()
		resume.Router = w.feed.opts.Router
		if errors.Is(err, report.ErrGap) || errors.Is(err, report.ErrInvalid) {
			resume.Epoch, resume.Seq = 0, 0
		}
		if fresh || pause == firstPause {
			log.Warn("lost node", slog.Any("error", err))
		}
		if !w.wait(ctx, pause) {
			return
		}
		pause = min(2*pause, maxPause)
	}
}

func (w *watcher) dial() (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if w.feed.opts.TLS != nil {
		creds = credentials.NewTLS(w.feed.opts.TLS.Clone())
	}
	options := append(report.DialOptions(),
		grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: firstPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxPause},
			MinConnectTimeout: maxPause,
		}),
	)
	conn, err := grpc.NewClient(w.node.Address, options...)
	if err != nil {
		return nil, fmt.Errorf("dial node %s: %w", w.node.Address, err)
	}
	return conn, nil
}

// take applies one message and hands the state on.
func (w *watcher) take(state *report.State, r *report.Report) error {
	if err := w.feed.own(w, r.GetNode()); err != nil {
		return err
	}
	if err := state.Apply(r); err != nil {
		return err
	}
	now := w.feed.opts.Now()
	w.feed.opts.Sink.Apply(state, now)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last = now
	s := &w.stats
	s.Connected, s.LastError = true, ""
	s.Epoch, s.Seq, s.KV = state.Epoch(), state.Seq(), kvOf(state.KV())
	if r.GetSnapshot() || len(r.GetScaleouts())+len(r.GetGoneScaleouts()) > 0 {
		w.scaleouts = state.ScaleOuts()
	}
	s.Messages++
	if r.GetSnapshot() {
		s.Snapshots++
	}
	return nil
}

// wait pauses for between half of d and d, and reports whether to go on.
func (w *watcher) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d/2 + time.Duration(w.feed.opts.Jitter()*float64(d/2)))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// fail notes that the stream ended, nil where it was ended on purpose.
func (w *watcher) fail(err error) {
	w.count(func(s *NodeStats) {
		s.Connected = false
		if errors.Is(err, report.ErrGap) {
			s.Gaps++
		}
		if err != nil {
			s.LastError = err.Error()
		}
	})
}

func (w *watcher) count(change func(*NodeStats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.stats)
}

// rename notes the node's name and gives the one before.
func (w *watcher) rename(name string) (before string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before, w.stats.Node = w.stats.Node, name
	return before
}

func (w *watcher) snapshot(now time.Time) NodeStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.stats
	s.Address, s.AgeSeconds = w.node.Address, -1
	if !w.last.IsZero() {
		s.AgeSeconds = max(now.Sub(w.last), 0).Seconds()
	}
	return s
}
