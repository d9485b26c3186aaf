package kvtier

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// Pins by people. A pinned block stays on a tier: it does not leave RAM before it
// is on a drive, and the segment that it is in is not used again. Pins of a tenant
// with NVMe outlive the process.

const (
	pinsFile = "pins.json"
	// MaxPinned bounds the blocks that people pin of a tenant.
	MaxPinned   = 4096
	maxPinsFile = 1 << 20
)

// pinName names a pinned block.
type pinName struct {
	space block.Namespace
	key   block.Key
}

// held is a pinned block's hold on the segment that it is in.
type held struct {
	loc     segment.Loc // 0: it is on no drive, or not held there
	release func()
}

// pinsRecord is the content of pins.json.
type pinsRecord struct {
	Version int         `json:"version"`
	Pins    []pinRecord `json:"pins"`
}

type pinRecord struct {
	Namespace string `json:"namespace"`
	Hash      string `json:"hash"`
	Group     uint32 `json:"group"`
}

// Pinned is what people pinned of a tenant.
type Pinned struct {
	Names  int         // pinned keys, also of blocks that are gone
	Blocks int         // of them, on a tier
	Bytes  units.Bytes // of these
}

// PinBlocks pins blocks, in each of the tenant's namespaces that has them, or
// none of them where one is nowhere. Pins take no more than MaxPinned keys, half
// of the tenant's RAM and half of its segments. Errors wrap ErrMiss or ErrNoSpace.
func (t *Tenant) PinBlocks(ctx context.Context, keys ...block.Key) (pinned int, err error) {
	if err := t.enter(ctx); err != nil {
		return 0, fmt.Errorf("pin blocks: %w", err)
	}
	defer t.leave()
	t.mu.Lock()
	names, err := t.presentNamesLocked(keys)
	if err == nil {
		err = t.takePinsLocked(names)
	}
	record := t.pinsLocked()
	durableHere := t.drive != nil
	t.mu.Unlock()
	if err != nil {
		return 0, fmt.Errorf("pin blocks: %w", err)
	}
	if durableHere && len(names) > 0 {
		if err := t.writePins(record); err != nil {
			t.mu.Lock()
			t.dropPinsLocked(names)
			t.mu.Unlock()
			return 0, fmt.Errorf("pin blocks: %w", err)
		}
	}
	return len(names), nil
}

// UnpinBlocks lets pinned blocks go, in all of the tenant's namespaces; one that
// is not pinned is fine.
func (t *Tenant) UnpinBlocks(ctx context.Context, keys ...block.Key) (unpinned int, err error) {
	if err := t.enter(ctx); err != nil {
		return 0, fmt.Errorf("unpin blocks: %w", err)
	}
	defer t.leave()
	t.mu.Lock()
	var names []pinName
	for name := range t.pins {
		if slices.Contains(keys, name.key) {
			names = append(names, name)
		}
	}
	record := slices.DeleteFunc(t.pinsLocked(), func(name pinName) bool { return slices.Contains(names, name) })
	durableHere := t.drive != nil
	t.mu.Unlock()
	if durableHere && len(names) > 0 {
		if err := t.writePins(record); err != nil {
			return 0, fmt.Errorf("unpin blocks: %w", err)
		}
	}
	t.mu.Lock()
	t.dropPinsLocked(names)
	t.mu.Unlock()
	return len(names), nil
}

// Pinned tells what people pinned.
func (t *Tenant) Pinned() Pinned {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := Pinned{Names: len(t.pins)}
	for name := range t.pins {
		if id := t.findNameLocked(name); t.presentLocked(id) {
			p.Blocks++
			p.Bytes += units.Bytes(t.index.Size(id))
		}
	}
	return p
}

// presentNamesLocked names the blocks of keys that are on a tier and not pinned.
func (t *Tenant) presentNamesLocked(keys []block.Key) (names []pinName, err error) {
	for _, key := range keys {
		found := false
		for space := range t.spaces {
			name := pinName{space, key}
			if !t.presentLocked(t.findNameLocked(name)) {
				continue
			}
			found = true
			if t.pins[name] == nil && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		if !found {
			return nil, fmt.Errorf("%w: tenant %s has no block of key %s", ErrMiss, t.name, key)
		}
	}
	return names, nil
}

// takePinsLocked adds pins, or none where they would take too much.
func (t *Tenant) takePinsLocked(names []pinName) error {
	if len(t.pins)+len(names) > MaxPinned {
		return fmt.Errorf("%w: want %d pins, %d of %d are left", ErrNoSpace, len(names), MaxPinned-len(t.pins), MaxPinned)
	}
	for _, name := range names {
		t.pins[name] = &held{}
	}
	err := t.holdPinsLocked()
	if most := t.limitLocked() / 2; err == nil && t.pinnedRAMLocked() > most {
		err = fmt.Errorf("%w: with the blocks before them the pinned ones would take more than half of the tenant's RAM, %s", ErrNoSpace, units.Bytes(most).Human())
	}
	if err != nil {
		t.dropPinsLocked(names)
	}
	return err
}

func (t *Tenant) dropPinsLocked(names []pinName) {
	for _, name := range names {
		if h := t.pins[name]; h != nil && h.release != nil {
			h.release()
		}
		delete(t.pins, name)
	}
}

// pinsLocked lists the pins in an order of their own.
func (t *Tenant) pinsLocked() []pinName {
	list := make([]pinName, 0, len(t.pins))
	for name := range t.pins {
		list = append(list, name)
	}
	slices.SortFunc(list, func(a, b pinName) int {
		return cmp.Or(bytes.Compare(a.space[:], b.space[:]), bytes.Compare(a.key.Hash[:], b.key.Hash[:]), cmp.Compare(a.key.Group, b.key.Group))
	})
	return list
}

// findNameLocked gives the entry of a block, 0 for none.
func (t *Tenant) findNameLocked(name pinName) index.ID {
	place, ok := t.spaces[name.space]
	if !ok {
		return 0
	}
	return t.index.Find(index.PrintOf(t.seed, place, name.key))
}

// pinnedLocked says whether people pinned a block that is in RAM.
func (t *Tenant) pinnedLocked(id index.ID) bool {
	if len(t.pins) == 0 {
		return false
	}
	r, here := t.index.Resident(id)
	return here && t.pins[pinName{t.record.namespaceAt(t.index.Space(id)), r.Key}] != nil
}

// sparedLocked says whether a block stays in RAM, since it is pinned and nowhere
// else.
func (t *Tenant) sparedLocked(id index.ID) bool { return t.index.Loc(id) == 0 && t.pinnedLocked(id) }

// pinnedRAMLocked is what pins keep in RAM, in bytes: blocks that are on no drive,
// and those before them, which do not leave while they are there.
func (t *Tenant) pinnedRAMLocked() (bytes int64) {
	seen := map[index.ID]bool{}
	for name := range t.pins {
		id := t.findNameLocked(name)
		if id == 0 || t.index.Loc(id) != 0 {
			continue
		}
		for ; id != 0 && !seen[id]; id = t.index.Parent(id) {
			seen[id] = true
			if _, here := t.index.Resident(id); here {
				bytes += t.cache.arena.Cost(t.index.Size(id))
			}
		}
	}
	return bytes
}

// holdPinsLocked makes the holds on segments those of where the pinned blocks are
// now, and has those written that are on no drive. It says which bound kept it
// from holding all: at most half of the segments are.
func (t *Tenant) holdPinsLocked() error {
	if t.drive == nil {
		return nil
	}
	type place struct{ drive, segment uint32 }
	holding := map[place]bool{}
	var open []pinName // on a drive and not held
	for name, h := range t.pins {
		id := t.findNameLocked(name)
		loc := segment.Loc(0)
		if id != 0 {
			loc = t.locLocked(id)
		}
		if h.loc != loc && h.release != nil {
			h.release()
			*h = held{}
		}
		switch {
		case h.loc != 0:
			holding[place{loc.Drive(), loc.Segment()}] = true
		case loc != 0:
			open = append(open, name)
		case id != 0 && t.writing[id] == nil && t.drive.Takes(t.index.Size(id)):
			t.enqueueLocked(id, false)
		}
	}
	most := max(1, int(int64(t.spec.NVMe)/t.drive.SegmentSize()/2))
	for _, name := range open {
		loc := t.locLocked(t.findNameLocked(name))
		at := place{loc.Drive(), loc.Segment()}
		if !holding[at] && len(holding) >= most {
			return fmt.Errorf("%w: pinned blocks lie in %d segments, half of those that the tenant's NVMe has", ErrNoSpace, most)
		}
		release, ok := t.drive.Pin(loc)
		if !ok {
			continue // it is being reclaimed, and is asked for where it then is
		}
		holding[at] = true
		*t.pins[name] = held{loc, release}
	}
	return nil
}

func (t *Tenant) keepPins() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keepPinsLocked()
}

// keepPinsLocked is holdPinsLocked for who has nobody to tell.
func (t *Tenant) keepPinsLocked() {
	if len(t.pins) == 0 {
		return
	}
	if err := t.holdPinsLocked(); err != nil {
		t.log.Warn("pinned blocks are kept no longer than others", slog.Any("error", err))
	}
}

func (t *Tenant) pinsPath() string { return filepath.Join(t.dir(), pinsFile) }

func (t *Tenant) writePins(names []pinName) error {
	data, err := encodePins(names)
	if err != nil {
		return err
	}
	return durable.WriteFile(t.cache.fs, t.pinsPath(), data, 0o600)
}

func encodePins(names []pinName) ([]byte, error) {
	r := pinsRecord{Version: FormatVersion, Pins: []pinRecord{}}
	for _, name := range names {
		r.Pins = append(r.Pins, pinRecord{name.space.String(), name.key.Hash.String(), name.key.Group})
	}
	data, err := json.MarshalIndent(r, "", " ")
	return append(data, '\n'), err
}

// readPins gives the pins on the drive. What cannot be understood is put into
// quarantine, and then nothing is pinned. Errors wrap ErrNewer.
func (t *Tenant) readPins() (map[pinName]*held, error) {
	pins := map[pinName]*held{}
	data, err := durable.ReadRegular(t.cache.fs, t.pinsPath(), maxPinsFile)
	var names []pinName
	if err == nil {
		names, err = decodePins(data)
	}
	switch {
	case notExist(err):
		return pins, nil
	case errors.Is(err, ErrInvalid), errors.Is(err, durable.ErrTooLong):
		t.log.Error("the pins of a tenant are unreadable, nothing of it is pinned", slog.Any("error", err))
		to := filepath.Join(t.cache.opts.Dir, quarantineDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+t.folder()+"-"+pinsFile)
		return pins, t.cache.fs.Rename(t.pinsPath(), to)
	case err != nil:
		return nil, err
	}
	for _, name := range names {
		pins[name] = &held{}
	}
	return pins, nil
}

// decodePins reads and checks pins.json. Errors wrap ErrInvalid or ErrNewer.
func decodePins(data []byte) ([]pinName, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if version.Version > FormatVersion {
		return nil, fmt.Errorf("%w: pins are of version %d, this code knows %d", ErrNewer, version.Version, FormatVersion)
	}
	var r pinsRecord
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if r.Version != FormatVersion || len(r.Pins) > MaxPinned {
		return nil, fmt.Errorf("%w: pins of version %d, %d of them", ErrInvalid, r.Version, len(r.Pins))
	}
	seen := map[pinName]bool{}
	var names []pinName
	for _, p := range r.Pins {
		space, err := block.ParseNamespace(p.Namespace)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		hash, err := block.ParseHash(p.Hash)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		name := pinName{space, block.Key{Hash: hash, Group: p.Group}}
		if seen[name] {
			return nil, fmt.Errorf("%w: a pin comes twice", ErrInvalid)
		}
		seen[name] = true
		names = append(names, name)
	}
	return names, nil
}
