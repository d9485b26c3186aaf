package dradriver

import (
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// Waits between tries to publish a slice pool that fails. The library's own
// limit is a quarter of an hour, which is how long a node would stay invisible
// after an API server came back.
const (
	publishRetry     = 100 * time.Millisecond
	publishRetryMost = 15 * time.Second
)

// poolQueue is the slice controller's work queue. The controller tells of
// failures only; from what it does with its queue one learns the rest: it
// takes a pool (Get), and after a sync that succeeded it forgets the pool's
// failures (Forget).
type poolQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	publisher *Publisher

	mu       sync.Mutex
	pool     string // taken last; the controller has one worker
	versions map[string]uint64
}

func newPoolQueue(p *Publisher) *poolQueue {
	return &poolQueue{
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](publishRetry, publishRetryMost)),
		publisher: p,
		versions:  map[string]uint64{},
	}
}

// AddAfter implements workqueue.TypedDelayingInterface. The controller waits for
// moments by asking again at them, and a moment that has not quite passed would
// make it ask without pause.
func (q *poolQueue) AddAfter(pool string, wait time.Duration) {
	q.TypedRateLimitingInterface.AddAfter(pool, max(wait, time.Millisecond))
}

// Get implements workqueue.TypedInterface.
func (q *poolQueue) Get() (string, bool) {
	pool, shutdown := q.TypedRateLimitingInterface.Get()
	if shutdown {
		return pool, shutdown
	}
	version := q.publisher.version(pool)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pool, q.versions[pool] = pool, version
	return pool, false
}

// Forget implements workqueue.TypedRateLimitingInterface.
func (q *poolQueue) Forget(pool string) {
	q.TypedRateLimitingInterface.Forget(pool)
	q.mu.Lock()
	version := q.versions[pool]
	delete(q.versions, pool)
	q.mu.Unlock()
	q.publisher.synced(pool, version, time.Now())
}

// current names the pool that the controller works on.
func (q *poolQueue) current() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pool
}
