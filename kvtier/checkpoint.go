package kvtier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// Sizes of a checkpoint's parts, in bytes; see FORMAT.md.
const (
	checkpointFile   = "checkpoint"
	checkpointMagic  = "HRTHKVC1"
	checkpointHeader = 48
	coveredBytes     = 16
	savedBytes       = 40
	checkpointSum    = 16
	// maxCheckpoint bounds the file: 64 million blocks.
	maxCheckpoint = 4 << 30
	// nowhereSaved is the segment's place of an entry that is only a parent.
	nowhereSaved = 1<<32 - 1
)

// covered is a sealed segment whose blocks a checkpoint knows.
type covered struct {
	number, drive uint32
	incarnation   uint64
}

// saved is an entry of a checkpoint.
type saved struct {
	print   index.Print
	segment uint32 // place among the covered
	page    uint32
	size    uint32
	parent  uint32 // place among the entries plus one
	space   uint16 // place among the namespaces
	touches uint8
}

// checkpointed is the content of a checkpoint.
type checkpointed struct {
	// store tells the store that it is of; see storeOf.
	store uint32
	seed  uint64
	// lastSeq is the sequence number of the last record when it was begun: what was
	// ended before is not in it.
	lastSeq    uint64
	segments   []covered
	namespaces []block.Namespace
	entries    []saved
}

func (c checkpointed) encode() []byte {
	out := make([]byte, 0, checkpointHeader+coveredBytes*len(c.segments)+16*len(c.namespaces)+savedBytes*len(c.entries)+checkpointSum)
	le := binary.LittleEndian
	out = append(out, checkpointMagic...)
	out = le.AppendUint32(out, FormatVersion)
	out = le.AppendUint32(out, uint32(len(c.segments)))
	out = le.AppendUint32(out, uint32(len(c.namespaces)))
	out = le.AppendUint32(out, c.store)
	out = le.AppendUint64(out, uint64(len(c.entries)))
	out = le.AppendUint64(out, c.seed)
	out = le.AppendUint64(out, c.lastSeq)
	for _, s := range c.segments {
		out = le.AppendUint32(out, s.number)
		out = le.AppendUint32(out, s.drive)
		out = le.AppendUint64(out, s.incarnation)
	}
	for _, n := range c.namespaces {
		out = append(out, n[:]...)
	}
	for _, e := range c.entries {
		for _, word := range e.print {
			out = le.AppendUint32(out, word)
		}
		out = le.AppendUint32(out, e.segment)
		out = le.AppendUint32(out, e.page)
		out = le.AppendUint32(out, e.size)
		out = le.AppendUint32(out, e.parent)
		out = le.AppendUint16(out, e.space)
		out = append(out, e.touches, 0, 0, 0, 0, 0)
	}
	sum := xxh3.Hash128(out).Bytes()
	return append(out, sum[:]...)
}

// errCheckpoint says that a checkpoint is not what was written.
var errCheckpoint = errors.New("the checkpoint is damaged")

// decodeCheckpoint reads a checkpoint. Errors wrap ErrNewer or errCheckpoint.
func decodeCheckpoint(data []byte) (c checkpointed, err error) {
	le := binary.LittleEndian
	if len(data) < checkpointHeader+checkpointSum || string(data[:8]) != checkpointMagic {
		return c, fmt.Errorf("%w: it does not begin as one", errCheckpoint)
	}
	if version := le.Uint32(data[8:]); version > FormatVersion {
		return c, fmt.Errorf("%w: the checkpoint is of version %d, this code knows %d", ErrNewer, version, FormatVersion)
	}
	body, sum := data[:len(data)-checkpointSum], data[len(data)-checkpointSum:]
	if xxh3.Hash128(body).Bytes() != [checkpointSum]byte(sum) {
		return c, fmt.Errorf("%w: it has another checksum", errCheckpoint)
	}
	segments, spaces, entries := uint64(le.Uint32(data[12:])), uint64(le.Uint32(data[16:])), le.Uint64(data[24:])
	if entries > maxCheckpoint/savedBytes || uint64(len(body)) != checkpointHeader+coveredBytes*segments+16*spaces+savedBytes*entries {
		return c, fmt.Errorf("%w: its parts do not add up", errCheckpoint)
	}
	c.store = le.Uint32(data[20:])
	c.seed, c.lastSeq = le.Uint64(data[32:]), le.Uint64(data[40:])
	at := body[checkpointHeader:]
	for range segments {
		c.segments = append(c.segments, covered{le.Uint32(at), le.Uint32(at[4:]), le.Uint64(at[8:])})
		at = at[coveredBytes:]
	}
	for range spaces {
		c.namespaces = append(c.namespaces, block.Namespace(at[:16]))
		at = at[16:]
	}
	c.entries = make([]saved, entries)
	for i := range c.entries {
		e := saved{
			print:   index.Print{le.Uint32(at), le.Uint32(at[4:]), le.Uint32(at[8:]), le.Uint32(at[12:])},
			segment: le.Uint32(at[16:]), page: le.Uint32(at[20:]), size: le.Uint32(at[24:]), parent: le.Uint32(at[28:]),
			space: le.Uint16(at[32:]), touches: at[34],
		}
		at = at[savedBytes:]
		if e.parent > uint32(i) || uint64(e.space) >= spaces || e.segment != nowhereSaved && uint64(e.segment) >= segments || e.size > block.MaxSize {
			return checkpointed{}, fmt.Errorf("%w: entry %d cannot be", errCheckpoint, i)
		}
		c.entries[i] = e
	}
	return c, nil
}

func (t *Tenant) checkpointPath() string { return filepath.Join(t.dir(), checkpointFile) }

// storeOf tells stores of one tenant apart by their salts: a checkpoint of another
// node's, or of one that was removed, may know segments of the same names and
// incarnations, and less or more that was ended.
func storeOf(salt string) uint32 { return uint32(xxh3.HashString(salt)) }

// readCheckpoint reads the tenant's checkpoint; one that is damaged is as none. So
// is one that does not belong to the tenant's record, which is removed for good: it
// vouches for segments with blocks of namespaces that are unknown now, and would
// do so again once they are known, over what was ended or stored meanwhile.
func (t *Tenant) readCheckpoint(of tenantRecord) (checkpointed, error) {
	data, err := durable.ReadRegular(t.cache.fs, t.checkpointPath(), maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return checkpointed{}, nil
	}
	var c checkpointed
	if err == nil {
		c, err = decodeCheckpoint(data)
	}
	if errors.Is(err, ErrNewer) {
		return c, err
	}
	if n := len(c.namespaces); err == nil && c.store == storeOf(of.Salt) && n <= len(of.ids) && slices.Equal(c.namespaces, of.ids[:n]) {
		return c, nil
	}
	if err == nil {
		t.log.Warn("the checkpoint is removed, it is not of the tenant's record")
		err = t.cache.fs.Remove(t.checkpointPath())
		return checkpointed{}, errors.Join(err, t.cache.fs.SyncDir(t.dir()))
	}
	t.log.Warn("the checkpoint is not used, the segments tell as much", slog.Any("error", err))
	return checkpointed{}, nil
}

// snapshot gives the index as a checkpoint has it. It holds the tenant for a
// moment at a time, so that nobody waits for all of it.
func (t *Tenant) snapshot(drive *segment.Log) checkpointed {
	c := checkpointed{seed: t.seed, lastSeq: drive.LastSeq()}
	places := map[covered]uint32{}
	byNumber := map[[2]uint32]covered{}
	for _, s := range drive.Segments() {
		if s.Sealed {
			key := covered{s.Number, s.Drive, s.Incarnation}
			places[key] = uint32(len(c.segments))
			byNumber[[2]uint32{s.Drive, s.Number}] = key
			c.segments = append(c.segments, key)
		}
	}
	t.mu.Lock()
	limit := t.index.Limit()
	t.mu.Unlock()
	at := make([]uint32, limit) // place plus one, by ID
	var add func(id index.ID)
	add = func(id index.ID) {
		e := saved{
			print: t.index.Print(id), segment: nowhereSaved, size: uint32(t.index.Size(id)),
			space: t.index.Space(id), touches: uint8(t.index.Touches(id)),
		}
		if p := t.index.Parent(id); p != 0 && p < limit {
			if at[p] == 0 {
				add(p)
			}
			e.parent = at[p]
		}
		if loc := t.locLocked(id); loc != 0 {
			if key, sealed := byNumber[[2]uint32{loc.Drive(), loc.Segment()}]; sealed && segment.NewLoc(key.drive, key.number, loc.Page(), key.incarnation) == loc {
				e.segment, e.page = places[key], loc.Page()
			}
		}
		c.entries = append(c.entries, e)
		at[id] = uint32(len(c.entries))
	}
	// An entry that ends meanwhile and begins as another one is told as whichever
	// it was when it was looked at.
	for from := index.ID(1); from < limit; from += snapshotStep {
		t.mu.Lock()
		for id := from; id < min(limit, from+snapshotStep); id++ {
			if at[id] == 0 && t.index.Stands(id) && t.index.Loc(id) != 0 {
				add(id)
			}
		}
		c.namespaces, c.store = t.record.ids, storeOf(t.record.Salt)
		t.mu.Unlock()
	}
	return c
}

// snapshotStep is how many entries are looked at in one hold of the tenant.
const snapshotStep = 512

// checkpoint writes the index to the drive, where anything changed. It is advice
// only, so a failure is told and nothing else.
func (t *Tenant) checkpoint(ctx context.Context) {
	t.mu.Lock()
	drive := t.drive
	t.mu.Unlock()
	if drive == nil || ctx.Err() != nil {
		return
	}
	before := drive.Stats()
	changed := before.Bytes + before.Dropped
	if changed == t.checkpointed.Load() {
		return
	}
	began := time.Now()
	if err := t.settleTwice(ctx); err != nil { // the index knows one of the two only
		t.log.Warn("the checkpoint was not written", slog.Any("error", err))
		return
	}
	data := t.snapshot(drive).encode()
	t.saving <- struct{}{}
	defer func() { <-t.saving }()
	t.mu.Lock()
	same := t.drive == drive
	t.mu.Unlock()
	if !same {
		return // the tenant ended, or began anew
	}
	if err := durable.WriteFile(t.cache.fs, t.checkpointPath(), data, 0o600); err != nil {
		t.log.Warn("the checkpoint was not written", slog.Any("error", err))
		return
	}
	t.cache.wear.save()
	t.checkpointed.Store(changed)
	t.checkpointBytes.Store(before.Bytes)
	t.log.Debug("checkpoint written", slog.Int("bytes", len(data)), slog.Duration("took", time.Since(began)))
}

// checkpointDue says whether a tenth of the tenant's room was written since the
// last.
func (t *Tenant) checkpointDue() bool {
	t.mu.Lock()
	drive, room := t.drive, int64(t.spec.NVMe)
	t.mu.Unlock()
	return drive != nil && drive.Stats().Bytes-t.checkpointBytes.Load() > room/10
}
