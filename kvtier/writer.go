package kvtier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/kvtier/arena"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// queued is a block in RAM that waits to be written to a drive.
type queued struct {
	id    index.ID
	hold  index.Hold
	leave bool // it was about to leave RAM
}

const (
	// maxWaiting bounds the bytes that wait to be written, of a tenant: also a
	// quarter of what it may have in RAM.
	maxWaiting = 256 * units.MiB
	// Blocks that are written in one go.
	batchBlocks = 16
	batchBytes  = 32 << 20
	// flushLimit is how long the end of the process writes what is worth it.
	flushLimit = 4 * time.Second
	// tryAgain is the pause after drives took nothing.
	tryAgain = time.Second
)

// enqueueLocked has a block in RAM written. It says no where too much waits
// already: then the block is not kept but for RAM, which is counted.
func (t *Tenant) enqueueLocked(id index.ID, leave bool) bool {
	size := int64(t.index.Size(id))
	if t.waiting > 0 && t.waiting+size > min(int64(maxWaiting), t.limitLocked()/4) {
		t.stats.queueFull.Add(1)
		return false
	}
	if t.index.Queued(id) {
		return true
	}
	if _, here := t.index.Resident(id); !here {
		return false
	}
	if !t.holdsMoreLocked(t.index.IsHeld(id), int(size)) {
		t.stats.queueFull.Add(1)
		return false
	}
	hold, _ := t.index.Hold(id)
	t.settleLentLocked()
	t.index.SetQueued(id, true)
	t.queue = append(t.queue, queued{id, hold, leave})
	t.waiting += size
	t.signal()
	return true
}

// run is the tenant's writer.
func (t *Tenant) run(ctx context.Context) {
	checkpoint := time.NewTicker(t.cache.opts.CheckpointEvery)
	defer checkpoint.Stop()
	again := newPace()
	defer again.timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-again.timer.C:
			again.tried(t.retryDrives(ctx))
		default:
		}
		more, err := t.writeSome(ctx)
		switch {
		case t.ended():
			return
		case err != nil && ctx.Err() == nil:
			t.log.Warn("blocks were not written to the drives", slog.Any("error", err))
			pause := time.NewTimer(tryAgain)
			select {
			case <-ctx.Done():
			case <-pause.C:
			}
			pause.Stop()
			continue
		case more:
			if t.checkpointDue() {
				t.checkpoint(ctx)
			}
			continue
		}
		select {
		case <-ctx.Done():
		case <-t.wake:
		case <-again.timer.C:
			again.tried(t.retryDrives(ctx))
		case <-checkpoint.C:
			t.checkpoint(ctx)
			t.keepPins()
		}
	}
	// The process ends; what it leaves unwritten is computed anew.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
	defer cancel()
	t.flush(last)
}

func (t *Tenant) ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.gone
}

// writeSome writes the next blocks of the queue; more says that others wait.
func (t *Tenant) writeSome(ctx context.Context) (more bool, err error) {
	if err := t.settle(ctx); err != nil {
		return false, fmt.Errorf("end blocks on the drives: %w", err)
	}
	t.mu.Lock()
	idle := len(t.queue) == 0
	t.mu.Unlock()
	if idle {
		return false, nil
	}
	if err := t.settleTwice(ctx); err != nil {
		return false, err
	}
	batch, writes, drive := t.take()
	if len(batch) == 0 {
		return false, nil
	}
	locs, err := drive.Append(ctx, writes)
	t.written(batch, writes, locs, err)
	t.mu.Lock()
	defer t.mu.Unlock()
	if errors.Is(err, segment.ErrWear) {
		err = nil // the budget says no: that is no failure
	}
	return len(t.queue) > 0, err
}

// take takes the next blocks of the queue that are still to be written.
func (t *Tenant) take() (batch []queued, writes []segment.Write, drive *segment.Log) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.drive == nil {
		return nil, nil, nil // it ends, or begins anew
	}
	var bytes int64
	n := 0
	for ; n < len(t.queue) && len(batch) < batchBlocks && bytes < batchBytes; n++ {
		q := t.queue[n]
		size := int64(t.index.HeldSize(q.hold))
		t.waiting -= size
		if t.index.Current(q.hold) != q.id {
			t.releaseLocked(q.hold) // it left, or other bytes came
			continue
		}
		t.index.SetQueued(q.id, false)
		// It may have been queued again while another batch has it.
		if t.index.Loc(q.id) != 0 || t.gone || t.writing[q.id] != nil {
			t.releaseLocked(q.hold)
			continue
		}
		t.writing[q.id] = make(chan struct{})
		batch = append(batch, q)
		r, _ := t.index.Resident(q.id)
		writes = append(writes, segment.Write{
			Namespace: t.record.namespaceAt(t.index.Space(q.id)), Key: r.Key, Size: uint32(size), Sum: r.Sum,
			Data: t.cache.arena.Padded(arena.Slot(r.Slot), int(size)),
		})
		bytes += size
	}
	t.queue = slices.Delete(t.queue, 0, n)
	return batch, writes, t.drive
}

// written notes what a batch came to.
func (t *Tenant) written(batch []queued, writes []segment.Write, locs []segment.Loc, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, q := range batch {
		var loc segment.Loc
		if i < len(locs) {
			loc = locs[i]
		}
		close(t.writing[q.id])
		delete(t.writing, q.id)
		switch current := t.index.Current(q.hold) == q.id; {
		case loc != 0 && current && !t.gone:
			t.index.SetLoc(q.id, uint64(loc))
			t.stats.written.Add(1)
			t.stats.writtenBytes.Add(int64(writes[i].Size))
			t.cache.events.add(t, writes[i].Namespace, writes[i].Key, EventStored, TierNVMe)
			if q.leave {
				t.releaseLocked(q.hold)
				t.index.Next(q.id)
				continue
			}
		case loc == 0 && errors.Is(err, segment.ErrWear):
			t.stats.droppedWear.Add(1)
		case loc == 0:
			t.stats.droppedDrive.Add(1)
		}
		t.releaseLocked(q.hold)
	}
	if err == nil {
		// Pinned blocks that were refused are tried again with the next that are
		// written, or with the ticker: at once they would be refused for ever.
		t.keepPinsLocked()
	}
}

// flush writes what is worth most first, until it is done or ctx ends, and seals
// it.
func (t *Tenant) flush(ctx context.Context) {
	t.mu.Lock()
	type rest struct {
		id      index.ID
		touches int
	}
	var list []rest
	for id := range t.index.All {
		if t.drive == nil || !t.drive.Takes(t.index.Size(id)) {
			continue
		}
		if _, here := t.index.Resident(id); here && t.index.Loc(id) == 0 && !t.index.Queued(id) {
			list = append(list, rest{id, t.index.Touches(id)})
		}
	}
	slices.SortStableFunc(list, func(a, b rest) int { return cmp.Compare(b.touches, a.touches) })
	for _, r := range list {
		if hold, ok := t.index.Hold(r.id); ok {
			t.index.SetQueued(r.id, true)
			t.queue = append(t.queue, queued{r.id, hold, false})
			t.waiting += int64(t.index.Size(r.id))
		}
	}
	t.settleLentLocked()
	t.mu.Unlock()
	for ctx.Err() == nil && !nearEnd(ctx) {
		more, err := t.writeSome(ctx)
		if err != nil {
			t.log.Warn("blocks were not written to the drives at the end", slog.Any("error", err))
			break
		}
		if !more {
			break
		}
	}
	t.mu.Lock()
	left := len(t.queue)
	drive, blocks := t.drive, t.index.Present()
	t.mu.Unlock()
	if left > 0 {
		t.log.Info("blocks are not flushed, time is up", slog.Int("blocks", left))
	}
	if drive == nil {
		return
	}
	// A footer for each drive is written in any case, as far as nobody else writes to
	// it; without one the next start reads the segment. A checkpoint may be large, and
	// the next start does without.
	if err := drive.Seal(ctx); err != nil {
		t.log.Warn("the last segment was not sealed", slog.Any("error", err))
	}
	if until, bounded := ctx.Deadline(); bounded && time.Until(until) < checkpointTime(blocks) {
		t.log.Info("no checkpoint is written, time is up")
		return
	}
	t.checkpoint(ctx)
}

// checkpointTime is about how long it takes to write a checkpoint of so many blocks
// to a drive that is slow.
func checkpointTime(blocks int) time.Duration {
	return time.Duration(blocks) * savedBytes * time.Second / (128 << 20)
}

// nearEnd says whether the time is almost up: the rest of it is for the end.
func nearEnd(ctx context.Context) bool {
	until, bounded := ctx.Deadline()
	return bounded && time.Until(until) < flushLimit/8
}
