package resp

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of the replies that wait for a client which does not read. Beyond them
// its commands are read no more. Values count for themselves: they are blocks of
// the tier that are held, of all connections of a tenant at most what
// TenantOptions.HoldBytes says.
const (
	queueSmall    = 4 << 20   // bytes of a connection's replies without values
	queueSmallAll = 64 << 20  // bytes of those of all connections
	queueValues   = 256 << 20 // bytes of a connection's values
	queueEntry    = 128       // bytes that a value counts among the replies, for its place in the queue
)

// reply is bytes that wait: replies, and a value with its end where there is one.
type reply struct {
	parts [3][]byte
	hold  Block // of parts[1]; nil where that is a copy
	// What it counts, and with whom.
	small  int
	value  int64
	tenant *Tenant
}

// queue is the replies of a connection whose client does not take them, and the
// goroutine that writes them. It ends when they are written or nobody wants them.
type queue struct {
	conn  *conn
	began time.Time
	// heard is when the client sent something, since began: who sends is not gone.
	heard atomic.Int64
	// native is the connection's word for the goroutine.
	native atomic.Bool

	mu      sync.Mutex
	changed sync.Cond
	waiting []reply // the first is being written
	small   int     // bytes of replies
	values  int64   // bytes of values that are held, but for the first's
	ended   bool
	err     error
}

func newQueue(c *conn, first reply) *queue {
	q := &queue{conn: c, began: time.Now(), waiting: []reply{first}}
	q.changed.L = &q.mu
	q.native.Store(c.native)
	go q.run()
	return q
}

// add takes replies and a value, and hold in any case but one: taken is false where
// the queue has ended, and they can be written. It waits for room.
func (q *queue) add(tenant *Tenant, out, value []byte, hold Block) (taken bool, err error) {
	r := reply{hold: hold, tenant: tenant, small: len(out)}
	if hold == nil {
		r.small += len(value)
	} else {
		r.small += queueEntry
		r.value = int64(len(value))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for !q.ended && !q.takeLocked(&r) {
		q.changed.Wait()
	}
	if q.ended {
		if q.err != nil {
			letGo(hold)
		}
		return false, q.err
	}
	at := len(q.waiting) - 1
	if at <= 0 || q.waiting[at].hold != nil {
		q.waiting = append(q.waiting, reply{tenant: tenant})
		at++
	}
	last := &q.waiting[at]
	last.small += r.small
	last.parts[0] = append(last.parts[0], out...)
	switch {
	case hold != nil:
		last.hold, last.value, last.tenant = hold, r.value, tenant
		last.parts[1], last.parts[2] = value, crlf
	case value != nil:
		last.parts[0] = append(append(last.parts[0], value...), crlf...)
	}
	return true, nil
}

// takeLocked counts a reply where there is room.
func (q *queue) takeLocked(r *reply) bool {
	server := &q.conn.server.queued
	if q.small+r.small > queueSmall || q.values+r.value > queueValues {
		return false
	}
	if server.Add(int64(r.small)) > queueSmallAll {
		server.Add(int64(-r.small))
		return false
	}
	if r.value > 0 && r.tenant.held.Add(r.value) > r.tenant.options.HoldBytes() {
		r.tenant.held.Add(-r.value)
		server.Add(int64(-r.small))
		return false
	}
	q.small += r.small
	q.values += r.value
	return true
}

// run writes what waits.
func (q *queue) run() {
	for {
		q.mu.Lock()
		if len(q.waiting) == 0 {
			q.conn.writeBy(time.Time{})
			q.endLocked(nil)
			q.mu.Unlock()
			return
		}
		first := q.waiting[0]
		q.mu.Unlock()
		err := q.write(&first)
		q.mu.Lock()
		if err != nil {
			q.endLocked(err)
			q.mu.Unlock()
			_ = q.conn.net.Close() // its own goroutine may wait for the next command
			return
		}
		q.dropLocked()
		q.mu.Unlock()
	}
}

// write sends a reply. A client that is not native has a time for it, which
// starts anew whenever the client sends something.
func (q *queue) write(r *reply) error {
	c, size := q.conn, 0
	var buffers net.Buffers
	for _, part := range r.parts {
		if len(part) > 0 {
			buffers, size = append(buffers, part), size+len(part)
		}
	}
	allowed := c.server.options.WriteTimeout + time.Duration(size)*time.Second/slowestRate
	from := time.Since(q.began)
	since := func() time.Duration { return max(from, time.Duration(q.heard.Load())) }
	for {
		deadline := time.Time{}
		if !q.native.Load() {
			deadline = q.began.Add(since() + allowed)
		}
		if c.writeBy(deadline); deadline.IsZero() && !q.native.Load() {
			continue
		}
		n, err := buffers.WriteTo(c.net)
		c.server.totals.bytesOut.Add(uint64(n))
		if !errors.Is(err, os.ErrDeadlineExceeded) || c.until.Load() != 0 {
			return err
		}
		if !q.native.Load() && time.Since(q.began)-since() >= allowed {
			c.server.totals.slowReaders.Add(1)
			return err
		}
	}
}

// notNative gives the client a time to take what waits.
func (q *queue) notNative() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.native.Store(false); !q.ended {
		q.conn.writeBy(time.Now()) // wakes the goroutine, which sets the right one
	}
}

// dropLocked ends the first reply.
func (q *queue) dropLocked() {
	r := &q.waiting[0]
	letGo(r.hold)
	q.small -= r.small
	q.values -= r.value
	q.conn.server.queued.Add(int64(-r.small))
	if r.value > 0 {
		r.tenant.held.Add(-r.value)
	}
	*r, q.waiting = reply{}, q.waiting[1:]
	q.changed.Broadcast()
}

// endLocked gives up what is left.
func (q *queue) endLocked(err error) {
	for len(q.waiting) > 0 {
		q.dropLocked()
	}
	q.ended, q.err = true, err
	q.changed.Broadcast()
}

// idle says that everything is written.
func (q *queue) idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended && q.err == nil
}

// wait waits for the end.
func (q *queue) wait() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for !q.ended {
		q.changed.Wait()
	}
}
