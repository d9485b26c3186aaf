package kvtier

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// openDrive takes the tenant's blocks on the drives into the index.
func (t *Tenant) openDrive(spec TenantSpec) error {
	record, err := t.readRecord()
	if err != nil {
		return err
	}
	return t.openLog(spec, record)
}

// openLog is openDrive for a tenant whose record is known, and on the drive.
func (t *Tenant) openLog(spec TenantSpec, record tenantRecord) error {
	began := time.Now()
	aead, err := cipherOf(spec.EncryptionKey, record.Salt)
	if err != nil {
		return err
	}
	known := placesOf(record)
	t.cache.removeTemps(t.dir())
	before, err := t.readCheckpoint(record)
	if err != nil {
		return err
	}
	pins, err := t.readPins()
	if err != nil {
		return err
	}
	r := &recovery{tenant: t, known: known, checkpoint: before}
	if before.seed != 0 {
		t.seed = before.seed
		r.believed = make(map[covered]bool, len(before.segments))
		for _, s := range before.segments {
			r.believed[s] = true
		}
	}
	c := t.cache
	drive, err := segment.Open(segment.Options{
		FS: c.fs, Dirs: t.drivePaths(), Tenant: t.id, Bytes: int64(spec.NVMe), SegmentSize: c.opts.SegmentSize, LargestBlock: largestOn(spec.NVMe),
		Direct: !c.opts.Buffered, After: before.lastSeq,
		AEAD: aead, Log: t.log,
		Namespaces: func(id block.Namespace) bool { _, ok := t.place(id, known); return ok },
		Covered:    r.covers, Ended: r.void, Recovered: r.found,
		Reclaim: t.keep, Moved: t.moved, Dropped: t.dropped, Usable: t.usable, Emptied: t.emptied,
		Spend: func(n int64) bool { return c.wear.spend(t.id, n) }, Charge: func(n int64) { c.wear.charge(t.id, n) },
	})
	if err != nil {
		t.forgetDrive()
		return fmt.Errorf("open blocks on the drives: %w", errNewer(err))
	}
	if c.opts.SegmentSize == 0 && tooFew(drive.SegmentSize(), spec.NVMe) {
		t.log.Warn("the tenant's room is less than its segments need, its blocks begin anew",
			slog.Int64("segment", drive.SegmentSize()), slog.Int64("room", int64(spec.NVMe)))
		t.forgetDrive()
		if err := errors.Join(drive.Close(), t.discardBlocks()); err != nil {
			return err
		}
		return t.openLog(spec, record)
	}
	t.mu.Lock()
	t.record, t.drive, t.spaces = record, drive, known
	r.finishLocked()
	t.pins = pins
	t.keepPinsLocked()
	defer t.mu.Unlock()
	t.twice = r.twice
	t.recovery, t.recovered = time.Since(began), r.count
	if r.count > 0 {
		t.log.Info("blocks on the drives are taken in", slog.Int64("blocks", r.count), slog.Duration("took", t.recovery))
	}
	return nil
}

// forgetDrive forgets what a start found that failed then, so that another begins
// with nothing. Nobody has the tenant's blocks yet.
func (t *Tenant) forgetDrive() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drive = nil
	if !t.bare { // else they had nothing, and all there is was stored in RAM
		t.wipeLocked()
	}
}

// tooFew says whether a tenant's room is so small beside its segments, which were
// made for more, that none could be used again, and smaller ones could.
func tooFew(size int64, nvme units.Bytes) bool {
	return int64(nvme) < fewestSegments*size && size > segment.SizeFor(int64(nvme), largestOn(nvme))
}

// fewestSegments is the least with which segments can be used again: one is
// filled, one is free beside it, one holds what is there.
const fewestSegments = 3

// largestOn is the largest block that a tenant's drives take: at most a sixteenth
// of its room, so that segments stay many.
func largestOn(nvme units.Bytes) int {
	return int(min(max(int64(nvme)/16, 1<<20), block.MaxSize))
}

// place is a namespace's, also while the tenant is being opened.
func (t *Tenant) place(id block.Namespace, known map[block.Namespace]uint16) (uint16, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.drive != nil {
		known = t.spaces
	}
	place, ok := known[id]
	return place, ok
}

func (t *Tenant) drivePaths() []string {
	var dirs []string
	for _, drive := range t.cache.drives() {
		dirs = append(dirs, filepath.Join(drive, blocksDir, t.folder()))
	}
	return dirs
}

// cipherOf is what encrypts a tenant's blocks, nil where there is no key.
func cipherOf(key []byte, salt string) (cipher.AEAD, error) {
	if len(key) == 0 {
		return nil, nil //nolint:nilnil // none is an answer
	}
	raw, err := hex.DecodeString(salt)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	derived, err := hkdf.Key(sha256.New, key, raw, "hearth kv 1", 32)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	b, err := aes.NewCipher(derived)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	return cipher.NewGCM(b)
}

// recovery joins a checkpoint and what segments tell.
type recovery struct {
	tenant     *Tenant
	known      map[block.Namespace]uint16
	checkpoint checkpointed
	believed   map[covered]bool // of the checkpoint; true is not asked for so far
	trusted    map[covered]bool // stand on the drive as the checkpoint knows them
	later      []func()         // what is newer than the checkpoint, in order
	twice      []segment.Tombstone
	count      int64
}

// covers says that the checkpoint knows a segment's blocks.
func (r *recovery) covers(number, drive uint32, incarnation uint64) bool {
	s := covered{number, drive, incarnation}
	if !r.believed[s] {
		return false
	}
	if r.trusted == nil {
		r.trusted = map[covered]bool{}
	}
	r.trusted[s] = true
	return true
}

// found takes a block of a segment that the checkpoint does not cover.
func (r *recovery) found(rec segment.Record) { r.do(func() { r.take(rec) }) }

// void takes a tombstone.
func (r *recovery) void(dead segment.Tombstone) { r.do(func() { r.forget(dead) }) }

// do does at once what needs no checkpoint before it.
func (r *recovery) do(what func()) {
	if r.believed == nil {
		// A tenant that is cleared and opened again has namespaces that look.
		r.tenant.mu.Lock()
		defer r.tenant.mu.Unlock()
		what()
		return
	}
	r.later = append(r.later, what)
}

func (r *recovery) take(rec segment.Record) {
	x := r.tenant.index
	place, ok := r.known[rec.Namespace]
	if !ok {
		return
	}
	print := index.PrintOf(r.tenant.seed, place, rec.Key)
	id := x.Find(print)
	if id == 0 {
		id = x.Add(print, place, int(rec.Size), 0)
	} else {
		if x.Loc(id) != 0 && rec.Seq > 0 {
			// The one before has the same bytes and would outlive this one where its
			// segment is pinned: then other bytes might be stored, and it come back.
			r.twice = append(r.twice, segment.Tombstone{Namespace: rec.Namespace, Key: rec.Key, Upto: rec.Seq - 1})
		}
		x.SetLoc(id, 0)
		x.SetSize(id, int(rec.Size))
	}
	x.SetLoc(id, uint64(rec.Loc))
	x.SetTouches(id, max(1, x.Touches(id)))
}

// forget takes a key away that was ended after the checkpoint was begun. What was
// ended before is not in it, or was stored anew.
func (r *recovery) forget(dead segment.Tombstone) {
	x := r.tenant.index
	if dead.Upto < r.checkpoint.lastSeq {
		return
	}
	if place, ok := r.known[dead.Namespace]; ok {
		if id := x.Find(index.PrintOf(r.tenant.seed, place, dead.Key)); id != 0 {
			x.SetLoc(id, 0)
			x.Drop(id)
		}
	}
}

// finishLocked puts the checkpoint's entries in, and what is newer over them.
func (r *recovery) finishLocked() {
	x, c := r.tenant.index, &r.checkpoint
	places := make([]uint16, len(c.namespaces)) // of the checkpoint's in the record's
	for i, id := range c.namespaces {
		place, ok := r.known[id]
		if !ok || int(place) != i {
			place = 1<<16 - 1 // the fingerprint has the place in it: it is of no use
		}
		places[i] = place
	}
	ids := make([]index.ID, len(c.entries))
	x.Grow(len(c.entries))
	for i, e := range c.entries {
		var loc segment.Loc
		if e.segment != nowhereSaved {
			if s := c.segments[e.segment]; r.trusted[s] {
				loc = segment.NewLoc(s.drive, s.number, e.page, s.incarnation)
			}
		}
		if places[e.space] != e.space || e.print == (index.Print{}) || x.Find(e.print) != 0 {
			continue
		}
		var parent index.ID
		if e.parent > 0 {
			parent = ids[e.parent-1]
		}
		ids[i] = x.Add(e.print, e.space, int(e.size), parent)
		x.SetTouches(ids[i], int(e.touches))
		x.SetLoc(ids[i], uint64(loc))
	}
	for _, do := range r.later {
		do()
	}
	// Those that are there for nobody's sake.
	for id := x.Limit() - 1; id > 0; id-- {
		if x.Stands(id) {
			x.Drop(id)
		}
	}
	blocks, _ := x.OnDrive()
	r.count = int64(blocks)
	r.checkpoint, r.later = checkpointed{}, nil
}

// keep says which blocks of a segment that is to be used again stay: those that
// are pinned by people, have shown that they are wanted, or carry others.
func (t *Tenant) keep(_ context.Context, records []segment.Record) []bool {
	keep := make([]bool, len(records))
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, r := range records {
		id := t.findLocked(r)
		if id == 0 || t.locLocked(id) != r.Loc {
			continue
		}
		// What it earned is spent here: a block that nobody uses until the next
		// turn goes.
		touches := t.index.Touches(id)
		keep[i] = touches >= 2 || t.index.HasChildren(id) && touches > 0 || t.pins[pinName{r.Namespace, r.Key}] != nil
		t.index.SetTouches(id, touches/2)
	}
	return keep
}

// findLocked gives the entry of a record.
func (t *Tenant) findLocked(r segment.Record) index.ID {
	place, ok := t.spaces[r.Namespace]
	if !ok {
		return 0
	}
	return t.index.Find(index.PrintOf(t.seed, place, r.Key))
}

// moved says that a block lies elsewhere now.
func (t *Tenant) moved(old, fresh segment.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id := t.findLocked(old); id != 0 && t.locLocked(id) == old.Loc {
		t.index.SetLoc(id, uint64(fresh.Loc))
		t.stats.rewritten.Add(1)
	}
}

// dropped says that a block is on the drives no more.
func (t *Tenant) dropped(r segment.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.findLocked(r)
	if id == 0 || t.locLocked(id) != r.Loc {
		return
	}
	if t.index.Touches(id) <= 1 {
		t.stats.unwanted.Add(1)
	}
	t.index.SetLoc(id, 0)
	if _, here := t.index.Resident(id); !here {
		t.cache.events.add(t, r.Namespace, r.Key, EventRemoved, TierNVMe)
	}
	t.index.Drop(id)
}
