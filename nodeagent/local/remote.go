package local

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	dialWithin = 2 * time.Second
	// callWithin bounds a call to a data role that tells its state; downWithin
	// one to a data role that does not.
	callWithin = 30 * time.Second
	downWithin = 2 * time.Second
	// silentAfter is how long a stream may be silent before it counts as dead.
	silentAfter = 3 * aliveEvery
	// Pauses before the stream is tried again.
	againFirst = 50 * time.Millisecond
	againLast  = time.Second
)

// DialOptions say where the data role is.
type DialOptions struct {
	Socket string
	Log    *slog.Logger
}

// Remote is Data over the socket of a data role in another process.
type Remote struct {
	http    *http.Client
	log     *slog.Logger
	changed signals

	mu    sync.Mutex
	state State
	offer stock.Weights
	kv    stock.Space
	told  bool // a state came, now or before
	knows bool // weights are among it
	down  error
	since time.Time // when down began
}

var _ Data = (*Remote)(nil)

// errNotYet is why a Remote is down before its first try.
var errNotYet = errors.New("not connected yet")

// NewRemote makes the control role's end of a socket; it starts nothing.
func NewRemote(opts DialOptions) *Remote {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	dialer := net.Dialer{Timeout: dialWithin}
	return &Remote{
		log: opts.Log, down: errNotYet, since: time.Now(),
		http: &http.Client{Transport: &http.Transport{
			// A connection of its own for each call costs microseconds and is
			// never one that ended with the process before.
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 32 << 10,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, "unix", opts.Socket)
			},
		}},
	}
}

// Run keeps the state up to date until ctx ends.
func (r *Remote) Run(ctx context.Context) error {
	pause := againFirst
	for ctx.Err() == nil {
		begun := time.Now()
		if err := r.follow(ctx); ctx.Err() == nil {
			r.lost(err)
		}
		if time.Since(begun) > silentAfter {
			pause = againFirst
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		pause = min(2*pause, againLast)
	}
	return nil
}

// lost notes that the data role does not tell its state.
func (r *Remote) lost(err error) {
	r.mu.Lock()
	first := r.down == nil
	if first {
		r.since = time.Now()
	}
	news := first || r.down.Error() != err.Error()
	r.down = err
	r.mu.Unlock()
	if news {
		r.log.Warn("data role does not answer, trying again", slog.Any("error", err))
		r.changed.notify()
	}
}

// Down says why the data role does not answer, and since when; nil while it does.
func (r *Remote) Down() (since time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.since, r.down
}

// follow reads one stream to its end.
func (r *Remote) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(silentAfter, func() { cancel(errSilent) })
	defer silent.Stop()
	response, err := r.send(ctx, http.MethodGet, pathState, nil)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		silent.Reset(silentAfter)
		if err := r.take(lines.Bytes()); err != nil {
			return err
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read state of the data role: %w", err)
	}
	return errors.New("the data role ended its stream")
}

var errSilent = fmt.Errorf("the data role was silent for %v", silentAfter)

// take applies one line.
func (r *Remote) take(data []byte) error {
	var l line
	if err := json.Unmarshal(data, &l); err != nil {
		return fmt.Errorf("read state of the data role: %w", err)
	}
	if l.Epoch == 0 {
		return nil
	}
	state := State{
		Epoch: l.Epoch, Models: make([]weightcache.Status, 0, len(l.Models)), Space: l.Space, PullsEnded: l.PullsEnded, Problems: l.Problems, KV: l.KVFill,
		Network: l.Network, ScaleOuts: l.ScaleOuts,
	}
	for _, m := range l.Models {
		state.Models = append(state.Models, m.status())
	}
	r.mu.Lock()
	r.state, r.kv, r.told = state, l.KV, true
	r.knows = l.Weights != nil
	if r.knows {
		r.offer = *l.Weights
	}
	was := r.down
	r.down = nil
	r.mu.Unlock()
	if was != nil {
		r.log.Info("data role answers")
	}
	r.changed.notify()
	return nil
}

// Snapshot implements Data.
func (r *Remote) Snapshot() (State, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state, r.down == nil && r.told
}

// Subscribe implements Data.
func (r *Remote) Subscribe() (<-chan struct{}, func()) { return r.changed.subscribe() }

// Lend implements Data.
func (r *Remote) Lend(ctx context.Context, holders map[string]artifact.Digest) (missing []string, err error) {
	if err := checkHolders(holders); err != nil {
		return nil, err
	}
	answer, err := call[lendAnswer](ctx, r, pathLend, lendCall{holders})
	return answer.Missing, err
}

// Cache implements Data.
func (r *Remote) Cache() stock.Cache { return remoteCache{r} }

// KV implements Data.
func (r *Remote) KV() stock.KV { return remoteKV{r} }

// send makes one request and gives a good answer, or an error.
func (r *Remote) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://data"+path, body)
	if err != nil {
		return nil, fmt.Errorf("call data role: %w", err)
	}
	request.Header.Set(VersionHeader, Version)
	response, err := r.http.Do(request)
	if err != nil {
		return nil, fmt.Errorf("call data role: %w", err)
	}
	if got := response.Header.Get(VersionHeader); got != Version {
		_ = response.Body.Close()
		return nil, fmt.Errorf("call data role: it speaks version %.20q of the protocol and this is version %s", got, Version)
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	defer func() { _ = response.Body.Close() }()
	var answer failureAnswer
	data, err := io.ReadAll(io.LimitReader(response.Body, 4*maxText))
	if err != nil || json.Unmarshal(data, &answer) != nil || answer.Error == nil {
		return nil, fmt.Errorf("call data role: status %s", response.Status)
	}
	return nil, &answered{answer.Error}
}

// answered is a failure that the data role told, and no failure to reach it.
type answered struct{ f *failure }

func (t *answered) Error() string { return t.f.Message }

// call makes one call. Where the data role does not answer the error wraps
// stock.ErrUnavailable, unless ctx ended.
func call[Out any](ctx context.Context, r *Remote, path string, in any) (out Out, err error) {
	within := callWithin
	if _, down := r.Down(); down != nil {
		within = downWithin
	}
	bounded, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	body, err := json.Marshal(in)
	if err != nil {
		return out, fmt.Errorf("call data role: %w", err)
	}
	response, err := r.send(bounded, http.MethodPost, path, bytes.NewReader(body))
	var no *answered
	switch {
	case errors.As(err, &no):
		return out, no.f.err()
	case err != nil && ctx.Err() != nil:
		return out, fmt.Errorf("call data role: %w", context.Cause(ctx))
	case err != nil && bounded.Err() != nil:
		return out, fmt.Errorf("%w: asked for %s, it said nothing for %s", stock.ErrUnavailable, strings.TrimPrefix(path, pathPrefix), within)
	case err != nil:
		return out, fmt.Errorf("%w: %w", stock.ErrUnavailable, err)
	}
	defer func() { _ = response.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&out); err != nil {
		if ctx.Err() != nil {
			return out, fmt.Errorf("call data role: %w", context.Cause(ctx))
		}
		return out, fmt.Errorf("%w: %w", stock.ErrUnavailable, err)
	}
	return out, nil
}

// remoteCache is stock.Cache over the socket.
type remoteCache struct{ r *Remote }

// Weights implements stock.Cache.
func (c remoteCache) Weights() (stock.Weights, bool) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return c.r.offer, c.r.knows && c.r.down == nil
}

// Subscribe implements stock.Cache.
func (c remoteCache) Subscribe() (<-chan struct{}, func()) { return c.r.changed.subscribe() }

// Hold implements stock.Cache.
func (c remoteCache) Hold(ctx context.Context, digest artifact.Digest, claim string) (stock.Views, error) {
	return call[stock.Views](ctx, c.r, pathHold, holdCall{digest, claim})
}

// Pull implements stock.Cache.
func (c remoteCache) Pull(ctx context.Context, ref artifact.Ref, claim string) (stock.Progress, error) {
	return call[stock.Progress](ctx, c.r, pathPull, pullCall{ref, claim})
}

// Release implements stock.Cache.
func (c remoteCache) Release(ctx context.Context, claim string) error {
	_, err := call[nothing](ctx, c.r, pathRelease, claimCall{claim})
	return err
}

// Holds implements stock.Cache.
func (c remoteCache) Holds(ctx context.Context) ([]string, error) {
	answer, err := call[claimsAnswer](ctx, c.r, pathHolds, nothing{})
	return answer.Claims, err
}

// remoteKV is stock.KV over the socket.
type remoteKV struct{ r *Remote }

// Space implements stock.KV.
func (k remoteKV) Space() (stock.Space, bool) {
	k.r.mu.Lock()
	defer k.r.mu.Unlock()
	return k.r.kv, k.r.told && k.r.down == nil
}

// Subscribe implements stock.KV.
func (k remoteKV) Subscribe() (<-chan struct{}, func()) { return k.r.changed.subscribe() }

// Reserve implements stock.KV.
func (k remoteKV) Reserve(ctx context.Context, r stock.Reservation) (string, error) {
	answer, err := call[dirAnswer](ctx, k.r, pathReserve, r)
	return answer.Dir, err
}

// Release implements stock.KV.
func (k remoteKV) Release(ctx context.Context, claim string) error {
	_, err := call[nothing](ctx, k.r, pathKVRelease, claimCall{claim})
	return err
}

// Reservations implements stock.KV.
func (k remoteKV) Reservations(ctx context.Context) ([]stock.Reservation, error) {
	answer, err := call[reservationsAnswer](ctx, k.r, pathReservations, nothing{})
	return answer.Reservations, err
}
