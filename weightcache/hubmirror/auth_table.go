package hubmirror

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"
)

// Limits of asking sources about tokens.
const (
	askWithin     = 4 * time.Second // one question, its wait for a place included; a request waits for two at most
	askParallel   = 16              // questions at once
	askAgainAfter = 5 * time.Second // after a source could not be asked
	maxRemembered = 4096
)

// tokenKey is one question: a token by its hash, and what it is to open.
type tokenKey struct {
	sum                  [sha256.Size]byte
	source, repo, commit string
	files                bool
}

// verdict is what a source said of a token, and when.
type verdict struct {
	at  time.Time
	err error // nil: yes
	// tried is when the source could not be asked again last; a yes may outlive it.
	tried time.Time
}

// question is one flight that asks; those who wait share its answer.
type question struct {
	done chan struct{}
	err  error
}

// tokenTable remembers what sources said of tokens. Yes and no are kept apart,
// so that nobody pushes a yes out by showing made-up tokens. It is safe for
// concurrent use.
type tokenTable struct {
	now               func() time.Time
	accepted, refused time.Duration
	stale             time.Duration
	size              int
	places            chan struct{}

	mu     sync.Mutex
	yes    map[tokenKey]verdict
	no     map[tokenKey]verdict // also of sources that could not be asked
	flight map[tokenKey]*question
	asked  int64 // questions put to sources
}

func newTokenTable(opts AuthOptions, now func() time.Time) tokenTable {
	or := func(d, otherwise time.Duration) time.Duration {
		if d <= 0 {
			return otherwise
		}
		return d
	}
	if opts.Remembered <= 0 {
		opts.Remembered = maxRemembered
	}
	return tokenTable{
		now: now, accepted: or(opts.AcceptedFor, 15*time.Minute), refused: or(opts.RefusedFor, time.Minute),
		stale: or(opts.StaleFor, 24*time.Hour), size: opts.Remembered, places: make(chan struct{}, askParallel),
		yes: map[tokenKey]verdict{}, no: map[tokenKey]verdict{}, flight: map[tokenKey]*question{},
	}
}

// within says that something happened less than d ago; a clock that was set
// back makes it old.
func within(now, at time.Time, d time.Duration) bool {
	age := now.Sub(at)
	return age >= 0 && age < d
}

// ask gives what is remembered, or puts the question: once, however many wait.
// The flight goes on without its callers, for at most askWithin.
func (t *tokenTable) ask(ctx context.Context, key tokenKey, put func(ctx context.Context) error) error {
	t.mu.Lock()
	if err, found := t.rememberedLocked(key); found {
		t.mu.Unlock()
		return err
	}
	q := t.flight[key]
	if q == nil {
		q = &question{done: make(chan struct{})}
		t.flight[key] = q
		go t.put(context.WithoutCancel(ctx), key, q, put)
	}
	t.mu.Unlock()
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// rememberedLocked gives an answer that still holds.
func (t *tokenTable) rememberedLocked(key tokenKey) (error, bool) {
	now := t.now()
	if a, found := t.yes[key]; found {
		switch {
		case within(now, a.at, t.accepted):
			return nil, true
		case within(now, a.tried, askAgainAfter) && within(now, a.at, t.stale):
			return nil, true
		}
	}
	if a, found := t.no[key]; found {
		limit := t.refused
		if !definite(a.err) {
			limit = askAgainAfter
		}
		if within(now, a.at, limit) {
			return a.err, true
		}
	}
	return nil, false
}

// put asks the source and remembers.
func (t *tokenTable) put(ctx context.Context, key tokenKey, q *question, put func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	err := errNotAsked
	select {
	case t.places <- struct{}{}:
		if ctx.Err() == nil {
			t.mu.Lock()
			t.asked++
			t.mu.Unlock()
			err = put(ctx)
		}
		<-t.places
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.flight, key)
	q.err = t.learnLocked(key, err)
	close(q.done)
}

// learnLocked remembers an answer and gives what holds now: a source that
// cannot be asked leaves a yes of before standing for a while.
func (t *tokenTable) learnLocked(key tokenKey, err error) error {
	now := t.now()
	switch {
	case err == nil:
		delete(t.no, key)
		makeRoom(t.yes, key, t.size)
		t.yes[key] = verdict{at: now}
		return nil
	case definite(err):
		delete(t.yes, key)
	default:
		if a, found := t.yes[key]; found && within(now, a.at, t.stale) {
			a.tried = now
			t.yes[key] = a
			return nil
		}
		delete(t.yes, key)
	}
	makeRoom(t.no, key, t.size)
	t.no[key] = verdict{at: now, err: err}
	return err
}

// makeRoom forgets the oldest of a few arbitrary answers where the table is full.
func makeRoom(table map[tokenKey]verdict, key tokenKey, size int) {
	if _, there := table[key]; there || len(table) < size {
		return
	}
	const few = 8
	var oldest tokenKey
	var at time.Time
	seen := 0
	for k, a := range table {
		if seen == 0 || a.at.Before(at) {
			oldest, at = k, a.at
		}
		if seen++; seen == few {
			break
		}
	}
	delete(table, oldest)
}

// AuthStats is a snapshot of what a Mirror knows of its callers' tokens.
type AuthStats struct {
	Asked    int64 // questions put to sources since the Mirror was made
	Accepted int   // answers remembered: yes
	Refused  int   // no, or that the source could not be asked
}

// AuthStats returns the counters.
func (m *Mirror) AuthStats() AuthStats {
	t := &m.auth.table
	t.mu.Lock()
	defer t.mu.Unlock()
	return AuthStats{Asked: t.asked, Accepted: len(t.yes), Refused: len(t.no)}
}
