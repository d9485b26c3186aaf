package meter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// Limits of the writer; METERING.md promises them.
const (
	DefaultMaxFileBytes = 64 << 20
	queueRecords        = 8192
	batchRecords        = 256
	batchDelay          = 200 * time.Millisecond
	fullWait            = 100 * time.Millisecond
	retryFirst          = 100 * time.Millisecond
	retryMost           = 5 * time.Second
	tailBytes           = 1 << 20
	rememberedIDs       = 65536
)

// Options configure a Meter.
type Options struct {
	Path         string // of the open file; its directory is made, 0700
	MaxFileBytes int64  // rotation size, 0 = DefaultMaxFileBytes
	FS           durable.FS
	Log          *slog.Logger
	Now          func() time.Time
}

// Meter writes usage records. It is safe for concurrent use.
type Meter struct {
	options Options

	written, dropped, duplicates, failures atomic.Uint64

	wake chan struct{} // capacity 1: the queue has begun to fill, or holds a batch

	mu     sync.Mutex
	queue  []Record      // guarded by mu
	room   chan struct{} // closed when a full queue was taken; guarded by mu
	closed bool          // Run has ended; guarded by mu

	// Below: Run's alone.
	batch []Record
	lock  io.Closer
	file  durable.File
	size  int64 // bytes known to be whole and synced
	seen  idSet
	lines []byte
}

// Stats is a Meter's state.
type Stats struct {
	Written    uint64 // records synced
	Dropped    uint64 // records given up with the queue full
	Duplicates uint64 // records not written twice
	Failures   uint64 // batches that had to be tried again
	Queued     int
}

// Open locks and repairs the file and reads its tail. It starts nothing: Run writes.
func Open(o Options) (*Meter, error) {
	if o.FS == nil {
		o.FS = durable.OS
	}
	if o.MaxFileBytes <= 0 {
		o.MaxFileBytes = DefaultMaxFileBytes
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	m := &Meter{options: o, wake: make(chan struct{}, 1), seen: newIDSet(rememberedIDs)}
	if err := o.FS.MkdirAll(filepath.Dir(o.Path), 0o700); err != nil {
		return nil, fmt.Errorf("make usage directory: %w", err)
	}
	lock, err := o.FS.Lock(o.Path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("lock usage file: %w", err)
	}
	m.lock = lock
	if err := m.open(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return m, nil
}

// Add queues a copy of r. With the queue full it waits briefly, then drops the
// record and says so. After Run has ended every record is dropped.
func (m *Meter) Add(r *Record) {
	room, done := m.put(r)
	if done {
		return
	}
	if room != nil {
		timer := time.NewTimer(fullWait)
		defer timer.Stop()
		select {
		case <-room:
		case <-timer.C:
		}
		if _, done := m.put(r); done {
			return
		}
	}
	m.dropped.Add(1)
	m.options.Log.LogAttrs(context.Background(), slog.LevelError, "usage record dropped",
		slog.String("record", strings.TrimSuffix(string(r.append(nil)), "\n")))
}

// put appends r to the queue. Where there is no room it gives what to wait
// for, or nothing where no room will come.
func (m *Meter) put(r *Record) (room <-chan struct{}, done bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, false
	}
	if len(m.queue) >= queueRecords {
		if m.room == nil {
			m.room = make(chan struct{})
		}
		return m.room, false
	}
	m.queue = append(m.queue, *r)
	if n := len(m.queue); n == 1 || n == batchRecords {
		select {
		case m.wake <- struct{}{}:
		default:
		}
	}
	return nil, true
}

// take swaps the queue for an empty one. Once closing, no record comes after.
func (m *Meter) take(closing bool) []Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	full := m.queue
	m.queue, m.batch = m.batch[:0], full
	m.closed = closing
	if m.room != nil {
		close(m.room)
		m.room = nil
	}
	return full
}

func (m *Meter) queued() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.queue)
}

// Stats gives the counters.
func (m *Meter) Stats() Stats {
	return Stats{m.written.Load(), m.dropped.Load(), m.duplicates.Load(), m.failures.Load(), m.queued()}
}

// Run writes batches until ctx is done, then what is still queued, and closes
// the file. Stop the callers of Add first.
func (m *Meter) Run(ctx context.Context) error {
	defer func() { _ = m.lock.Close() }()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			continue
		case <-m.wake:
		}
		m.gather(ctx)
		m.store(ctx, m.take(false))
	}
	m.store(ctx, m.take(true))
	if m.file == nil {
		return nil
	}
	if err := m.file.Close(); err != nil {
		return fmt.Errorf("close usage file: %w", err)
	}
	return nil
}

// gather waits until the queue holds a batch or its first record is old enough.
func (m *Meter) gather(ctx context.Context) {
	timer := time.NewTimer(batchDelay)
	defer timer.Stop()
	for m.queued() < batchRecords {
		select {
		case <-m.wake:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// store writes records, again and again while the drive refuses. Once ctx is
// done one more try is made, then they are dropped aloud.
func (m *Meter) store(ctx context.Context, batch []Record) {
	m.lines = m.lines[:0]
	fresh := 0
	for i := range batch {
		if !m.seen.add(batch[i].ID) {
			m.duplicates.Add(1)
			continue
		}
		fresh++
		m.lines = batch[i].append(m.lines)
	}
	clear(batch) // holds no request's strings longer than needed
	for wait := retryFirst; fresh > 0; wait = min(2*wait, retryMost) {
		err := m.write()
		if err == nil {
			m.written.Add(uint64(fresh))
			return
		}
		m.failures.Add(1)
		if ctx.Err() != nil {
			m.dropped.Add(uint64(fresh))
			m.options.Log.LogAttrs(ctx, slog.LevelError, "usage records dropped",
				slog.Int("records", fresh), slog.Any("error", err), slog.String("lines", string(m.lines)))
			return
		}
		m.options.Log.LogAttrs(ctx, slog.LevelError, "write usage file, will retry", slog.Int("records", fresh), slog.Any("error", err))
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// write appends m.lines and syncs. After an error the file is reopened by the
// next try, which cuts off whatever part of the batch had landed.
func (m *Meter) write() error {
	if m.file != nil && m.taken() {
		m.options.Log.Warn("usage file was moved or removed, a new one begins", slog.String("file", m.options.Path))
		m.leave()
	}
	if m.file == nil {
		if err := m.reopen(); err != nil {
			return err
		}
	}
	if m.size > 0 && m.size+int64(len(m.lines)) > m.options.MaxFileBytes {
		if err := m.rotate(); err != nil {
			return err
		}
	}
	_, err := m.file.WriteAt(m.lines, m.size)
	if err == nil {
		err = m.file.Datasync()
	}
	if err != nil {
		_ = m.file.Close()
		m.file = nil
		return fmt.Errorf("append usage records: %w", err)
	}
	if m.taken() {
		m.leave()
		return fmt.Errorf("append usage records: %w", errTaken)
	}
	m.size += int64(len(m.lines))
	return nil
}
