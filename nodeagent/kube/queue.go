package kube

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Limits of the queue.
const (
	maxWaiting = 1024            // tasks; past it new ones are dropped and counted
	retryFirst = time.Second     // pause after the first failure, doubled
	retryLast  = time.Minute     // up to this
	maxTries   = 30              // about 25 minutes; then it is dropped and counted
	drainTime  = 2 * time.Second // for what waits when the agent stops
)

// errFinal marks an error after which trying again cannot help.
var errFinal = errors.New("refused for good")

// task is one thing to tell the API server.
type task struct {
	what  string // kind of it, for people: few values
	do    func(ctx context.Context) error
	tries int
	order int64 // of arrival
	due   time.Time
}

// queue sends tasks in the background, one after the other. A task replaces
// the one that waits under the same key. It is safe for concurrent use; adding
// never blocks.
type queue struct {
	outcome func(what string, err error)
	wake    chan struct{}

	mu      sync.Mutex
	tasks   map[string]*task
	arrived int64
	sent    int64
	dropped int64
}

func newQueue(outcome func(what string, err error)) *queue {
	return &queue{outcome: outcome, wake: make(chan struct{}, 1), tasks: map[string]*task{}}
}

func (q *queue) stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return Stats{Sent: q.sent, Dropped: q.dropped, Waiting: len(q.tasks)}
}

// add puts a task in, or gives false where there is no room.
func (q *queue) add(key, what string, do func(ctx context.Context) error) bool {
	q.mu.Lock()
	if _, waits := q.tasks[key]; !waits && len(q.tasks) >= maxWaiting {
		q.dropped++
		q.mu.Unlock()
		return false
	}
	q.arrived++
	q.tasks[key] = &task{what: what, do: do, order: q.arrived}
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default: // the sender looks anyway
	}
	return true
}

// run sends until ctx is done, and then once what still waits, for drainTime.
func (q *queue) run(ctx context.Context) {
	for {
		key, next, pause := q.next(time.Now())
		if next != nil && ctx.Err() == nil {
			q.try(ctx, key, next)
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			q.drain(ctx)
			return
		case <-q.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// next gives the task that is due and came first, or how long none is.
func (q *queue) next(now time.Time) (key string, due *task, pause time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	pause = retryLast
	for k, t := range q.tasks {
		if wait := t.due.Sub(now); wait > 0 {
			pause = min(pause, wait)
			continue
		}
		if due == nil || t.order < due.order {
			key, due = k, t
		}
	}
	return key, due, pause
}

func (q *queue) try(ctx context.Context, key string, t *task) {
	bounded, cancel := context.WithTimeout(ctx, sendTimeout)
	err := t.do(bounded)
	cancel()
	if ctx.Err() == nil {
		q.outcome(t.what, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	current := q.tasks[key] == t // else a newer one has taken its place
	switch {
	case err == nil:
		q.sent++
	case errors.Is(err, errFinal) || t.tries+1 >= maxTries:
		q.dropped++
	default:
		t.due = time.Now().Add(min(retryFirst<<min(t.tries, 10), retryLast))
		t.tries++
		return
	}
	if current {
		delete(q.tasks, key)
	}
}

// drain tries each task that still waits once.
func (q *queue) drain(ctx context.Context) {
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	now := time.Now()
	q.mu.Lock()
	for _, t := range q.tasks {
		if t.tries == 0 {
			t.due = now
			continue
		}
		t.due = now.Add(retryLast) // it failed before
	}
	q.mu.Unlock()
	for {
		key, next, _ := q.next(now)
		if next == nil || ending.Err() != nil {
			return
		}
		q.try(ending, key, next)
	}
}
