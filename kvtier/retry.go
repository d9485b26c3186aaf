package kvtier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Drives that were given up, or have no room for what a tenant needs at all, are
// tried again: first after firstRetry, then after twice as long each time, up to
// lastRetry. A try writes one small file to a drive that is still bad.
const (
	firstRetry = 10 * time.Second
	lastRetry  = 10 * time.Minute
)

// pace says when what failed is tried again.
type pace struct {
	wait  time.Duration
	timer *time.Timer
}

func newPace() *pace { return &pace{wait: firstRetry, timer: time.NewTimer(firstRetry)} }

// tried begins to wait anew, longer where it failed.
func (p *pace) tried(err error) {
	if p.wait = min(2*p.wait, lastRetry); err == nil {
		p.wait = firstRetry
	}
	p.timer.Reset(p.wait)
}

// retryDrives tries what the tenant lacks of its drives, where it lacks anything.
// The error is for the pace of tries: it is told here.
func (t *Tenant) retryDrives(ctx context.Context) error {
	select {
	case t.opening <- struct{}{}:
	default:
		return nil // it is opened, cleared or ended: whoever does that sees to it
	}
	defer t.leave()
	t.mu.Lock()
	idle := t.gone || !t.opened || t.spec.NVMe == 0
	drive, spec := t.drive, t.spec
	t.mu.Unlock()
	var err error
	switch {
	case idle:
	case drive != nil:
		err = drive.TakeBack(ctx)
	default:
		if err = t.reopen(spec); err == nil {
			t.log.Info("the tenant's drives are used again")
		}
	}
	if err != nil && ctx.Err() == nil {
		t.log.Warn("a drive is not used yet, trying again later", slog.Any("error", err))
	}
	return err
}

// usable says whether a drive is still the one that was taken at the start: where it
// is mounted no more, its path is a folder of another. Below a file system there may
// be a KV space of before it was: then the tenant's record is another.
func (t *Tenant) usable(drive uint32) error {
	dir := t.cache.drives()[drive]
	if err := format.Read(t.cache.fs, dir); err != nil {
		return fmt.Errorf("%s is no KV space now: %w", dir, err)
	}
	if drive != 0 {
		return nil
	}
	there, err := t.storedRecord()
	if notExist(err) {
		return nil // without a record a start believes nothing of it
	}
	t.mu.Lock()
	mine := t.record.Salt
	t.mu.Unlock()
	if err == nil && there.Salt != mine {
		err = fmt.Errorf("%s has another KV space now, mount the file system of before again", dir)
	}
	return err
}

// emptied takes out of the index what a drive had that was given up.
func (t *Tenant) emptied(drive uint32) {
	lost := 0
	t.mu.Lock()
	limit := t.index.Limit()
	t.mu.Unlock()
	// Nothing is written to it meanwhile, so that a step at a time will do. Most
	// children have greater IDs than their parents, which go once they have none.
	for to := limit; to > 1; {
		from := max(1, to-min(to, snapshotStep))
		t.mu.Lock()
		for id := to - 1; id >= from; id-- {
			if !t.index.Stands(id) || t.index.Loc(id) == 0 || t.locLocked(id).Drive() != drive {
				continue
			}
			t.index.SetLoc(id, 0)
			t.index.Drop(id)
			lost++
		}
		t.mu.Unlock()
		to = from
	}
	t.log.Warn("blocks of a drive that was given up are gone", slog.Int("blocks", lost))
	t.cache.events.add(t, block.Namespace{}, block.Key{}, EventLost, TierNVMe)
}

// outOfRoom says whether a file system is full, or a quota.
func outOfRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// openWithout opens a tenant whose drives have no room for the little that its start
// writes. What they have of it goes, so that nothing of it can come back over what
// is stored meanwhile: until there is room it has RAM alone.
func (t *Tenant) openWithout(spec TenantSpec, why error) error {
	record, err := t.storedRecord()
	if notExist(err) {
		record, err = newRecord(t.kind, t.name), nil
	}
	if err == nil {
		err = t.discardBlocks()
	}
	if err != nil {
		return errors.Join(why, err)
	}
	t.log.Error("a tenant's drives have no room, its blocks begin anew and are kept in RAM alone for now", slog.Any("error", why))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.record, t.bare, t.why = record, true, why
	t.spaces = placesOf(record)
	return nil
}

// reopen opens the drives of a tenant that is open without them: nothing of what
// they had counts. Its record is written as it is known, since namespaces are used
// that the drive may not know.
func (t *Tenant) reopen(spec TenantSpec) (err error) {
	defer func() {
		t.mu.Lock()
		t.why = err
		t.mu.Unlock()
	}()
	t.mu.Lock()
	record, pins := t.record, t.pinsLocked()
	t.mu.Unlock()
	if err := durable.MkdirAllSynced(t.cache.fs, t.dir(), 0o700); err != nil {
		return err
	}
	if err := t.discardBlocks(); err != nil {
		return err
	}
	t.mu.Lock()
	t.bare = true // nothing is there any more that might come back
	t.mu.Unlock()
	t.cache.sweepSoon()
	if err := t.writeRecord(record); err != nil {
		return err
	}
	if len(pins) > 0 {
		if err := t.writePins(pins); err != nil {
			return err
		}
	}
	if err := t.openLog(spec, record); err != nil {
		return err
	}
	t.mu.Lock()
	t.bare = false
	t.mu.Unlock()
	return nil
}

// Problem says what is wrong with the tenant's drives, for people; empty is nothing.
// It is tried again while the Cache runs.
func (t *Tenant) Problem() string {
	t.mu.Lock()
	drive, bare, away, why := t.drive, t.bare, t.clearingLocked() && t.opened, t.why
	t.mu.Unlock()
	switch {
	case why == nil: // it is being cleared, if at all
	case bare:
		return fmt.Sprintf("KV tenant %s has RAM alone: its drives cannot be used, and are tried again: %v", t.name, why)
	case away:
		return fmt.Sprintf("KV tenant %s stores nothing: its blocks could not be cleared, which is tried again: %v", t.name, why)
	}
	if drive != nil {
		if out := drive.Out(); len(out) > 0 {
			return fmt.Sprintf("KV tenant %s does not use what failed, which is tried again: %v", t.name, errors.Join(out...))
		}
	}
	return ""
}

// placesOf are the places of the namespaces in a record.
func placesOf(r tenantRecord) map[block.Namespace]uint16 {
	places := make(map[block.Namespace]uint16, len(r.ids))
	for place, id := range r.ids {
		places[id] = uint16(place)
	}
	return places
}
