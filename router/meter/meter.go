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
	queue   chan *Record
	pool    sync.Pool

	written, dropped, duplicates, failures atomic.Uint64
	closing                                atomic.Bool

	// Below: Run's alone.
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
	m := &Meter{options: o, queue: make(chan *Record, queueRecords), seen: newIDSet(rememberedIDs)}
	m.pool.New = func() any { return new(Record) }
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
	kept, _ := m.pool.Get().(*Record)
	*kept = *r
	if !m.closing.Load() {
		select {
		case m.queue <- kept:
			return
		default:
		}
		timer := time.NewTimer(fullWait)
		defer timer.Stop()
		select {
		case m.queue <- kept:
			return
		case <-timer.C:
		}
	}
	m.dropped.Add(1)
	m.options.Log.LogAttrs(context.Background(), slog.LevelError, "usage record dropped",
		slog.String("record", strings.TrimSuffix(string(kept.append(nil)), "\n")))
}

// Stats gives the counters.
func (m *Meter) Stats() Stats {
	return Stats{m.written.Load(), m.dropped.Load(), m.duplicates.Load(), m.failures.Load(), len(m.queue)}
}

// Run writes batches until ctx is done, then what is still queued, and closes
// the file. Stop the callers of Add first.
func (m *Meter) Run(ctx context.Context) error {
	defer func() { _ = m.lock.Close() }()
	batch := make([]*Record, 0, batchRecords)
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case r := <-m.queue:
			batch = m.fill(ctx, append(batch[:0], r))
			m.store(ctx, batch)
		}
	}
	m.closing.Store(true)
	for {
		batch = batch[:0]
		for len(batch) < batchRecords {
			select {
			case r := <-m.queue:
				batch = append(batch, r)
				continue
			default:
			}
			break
		}
		if len(batch) == 0 {
			break
		}
		m.store(ctx, batch)
	}
	if m.file == nil {
		return nil
	}
	if err := m.file.Close(); err != nil {
		return fmt.Errorf("close usage file: %w", err)
	}
	return nil
}

// fill waits for more records until the batch is full or old enough.
func (m *Meter) fill(ctx context.Context, batch []*Record) []*Record {
	timer := time.NewTimer(batchDelay)
	defer timer.Stop()
	for len(batch) < batchRecords {
		select {
		case r := <-m.queue:
			batch = append(batch, r)
		case <-timer.C:
			return batch
		case <-ctx.Done():
			return batch
		}
	}
	return batch
}

// store writes a batch, again and again while the drive refuses. Once ctx is
// done one more try is made, then the batch is dropped aloud.
func (m *Meter) store(ctx context.Context, batch []*Record) {
	m.lines = m.lines[:0]
	fresh := 0
	for _, r := range batch {
		if !m.seen.add(r.ID) {
			m.duplicates.Add(1)
			continue
		}
		fresh++
		m.lines = r.append(m.lines)
	}
	for wait := retryFirst; fresh > 0; wait = min(2*wait, retryMost) {
		err := m.write()
		if err == nil {
			m.written.Add(uint64(fresh))
			break
		}
		m.failures.Add(1)
		if ctx.Err() != nil {
			m.dropped.Add(uint64(fresh))
			m.options.Log.LogAttrs(ctx, slog.LevelError, "usage records dropped",
				slog.Int("records", fresh), slog.Any("error", err), slog.String("lines", string(m.lines)))
			break
		}
		m.options.Log.LogAttrs(ctx, slog.LevelError, "write usage file, will retry", slog.Int("records", fresh), slog.Any("error", err))
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
	for _, r := range batch {
		*r = Record{}
		m.pool.Put(r)
	}
}

// write appends m.lines and syncs. After an error the file is reopened by the
// next try, which cuts off whatever part of the batch had landed.
func (m *Meter) write() error {
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
	m.size += int64(len(m.lines))
	return nil
}
