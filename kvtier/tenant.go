package kvtier

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// Tenant is one tenant's blocks. No other tenant can read them, learn of them or
// take their room.
type Tenant struct {
	cache      *Cache
	kind, name string
	id         [16]byte
	label      string // kind and name
	log        *slog.Logger
	stats      counters

	// opening is taken to open, to remove and to close; capacity 1.
	opening chan struct{}

	// saving is taken to write the checkpoint, and to remove it; capacity 1.
	saving chan struct{}

	// wake holds a signal while something is to be written.
	wake chan struct{}

	// halt ends the writer and waits for its flush; nil while there is none. The
	// cache guards it.
	halt func()

	mu      sync.Mutex
	spec    TenantSpec
	opened  bool
	gone    bool  // removed or closed
	bare    bool  // its drives have nothing of it and are not used; see openWithout
	why     error // why its drives could not be opened; nil while they are
	writer  bool  // runs
	index   *index.Index
	drive   *segment.Log // nil without NVMe
	record  tenantRecord
	spaces  map[block.Namespace]uint16 // places in record.Namespaces
	used    int64                      // bytes of RAM: slots, and those being filled
	loose   int64                      // of them, in slots that the index does not have
	lent    int64                      // bytes of what is stuck beyond its own; see lending
	borrows bool                       // it may have more than its own
	queue   []queued                   // to be written, in order
	waiting int64                      // their bytes
	writing map[index.ID]chan struct{} // in the writer's hands; closed when done
	loads   map[index.Print]*load
	ending  map[index.Print]*ending // keys whose records are not void yet
	// twice are keys that a start found at two places, and up to where they are to
	// be void; see settleTwice.
	twice []segment.Tombstone
	pins  map[pinName]*held // by people
	reads uint32            // counts reads from RAM, for the sample
	// What taking in the drives' blocks came to.
	recovery  time.Duration
	recovered int64
	seed      uint64 // of fingerprints; set before the first

	// What the log had counted when the last checkpoint was made.
	checkpointed, checkpointBytes atomic.Int64
}

func newTenant(c *Cache, spec TenantSpec) *Tenant {
	sum := sha256.Sum256([]byte(spec.Kind + "\x00" + spec.Name))
	t := &Tenant{
		cache: c, kind: spec.Kind, name: spec.Name, label: spec.Kind + " " + spec.Name, id: [16]byte(sum[:16]),
		opening: make(chan struct{}, 1), saving: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		index: index.New(), spaces: map[block.Namespace]uint16{}, writing: map[index.ID]chan struct{}{},
		loads: map[index.Print]*load{}, ending: map[index.Print]*ending{}, pins: map[pinName]*held{},
	}
	t.index.SetCost(c.arena.Cost)
	var seed [8]byte
	_, _ = rand.Read(seed[:])
	t.seed = binary.LittleEndian.Uint64(seed[:]) | 1 // never 0, which is no checkpoint's
	t.log = c.log.With(slog.String("tenant", t.label))
	return t
}

// Kind and name of the tenant, unique together.
func (t *Tenant) Kind() string { return t.kind }

// Name is the name among tenants of its kind.
func (t *Tenant) Name() string { return t.name }

// Spec is what the tenant may take, as it was said last.
func (t *Tenant) Spec() TenantSpec {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.spec
}

// folder is the tenant's name on the drives.
func (t *Tenant) folder() string { return hex.EncodeToString(t.id[:]) }

// enter takes opening.
func (t *Tenant) enter(ctx context.Context) error {
	select {
	case t.opening <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *Tenant) leave() { <-t.opening }

// open takes the tenant's blocks from the drives, once, and its budgets.
func (t *Tenant) open(ctx context.Context, spec TenantSpec) error {
	if err := t.enter(ctx); err != nil {
		return err
	}
	defer t.leave()
	t.mu.Lock()
	gone, opened := t.gone, t.opened
	before := t.spec
	t.mu.Unlock()
	if gone {
		return ErrRemoved
	}
	if opened && (before.NVMe == 0) != (spec.NVMe == 0) {
		return fmt.Errorf("%w: NVMe is given to a tenant, or taken from it, at a start only", ErrInvalid)
	}
	if t.drive == nil && spec.NVMe > 0 {
		if err := t.openDrives(spec, opened); err != nil {
			return err
		}
	}
	if opened && t.drive != nil && before.NVMe != spec.NVMe {
		if size := t.drive.SegmentSize(); spec.NVMe < before.NVMe && t.cache.opts.SegmentSize == 0 && tooFew(size, spec.NVMe) {
			return fmt.Errorf("%w: %s of NVMe are less than %d segments of %s, which the tenant has: give it as much, or start again, which begins its blocks anew",
				ErrInvalid, spec.NVMe.Human(), fewestSegments, units.Bytes(size).Human())
		}
		if err := t.settleTwice(ctx); err != nil {
			return err
		}
		if err := t.drive.SetBytes(ctx, int64(spec.NVMe)); err != nil {
			return err
		}
	}
	t.setSpec(spec)
	t.mu.Lock()
	t.opened = true
	t.mu.Unlock()
	return nil
}

// openDrives opens the drives of a tenant that has none open.
func (t *Tenant) openDrives(spec TenantSpec, opened bool) error {
	if opened {
		if err := t.reopen(spec); err != nil { // Problem tells of it, and the writer tries again
			t.log.Warn("a drive is not used yet, trying again later", slog.Any("error", err))
		}
		return nil
	}
	err := t.openDrive(spec)
	if outOfRoom(err) {
		err = t.openWithout(spec, err)
	}
	return err
}

// setSpec takes new budgets; what is too much leaves RAM at once.
func (t *Tenant) setSpec(spec TenantSpec) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.spec = spec
	t.borrowsLocked(!t.gone && t.limitLocked() > int64(spec.Memory))
	t.settleLentLocked()
	t.cache.wear.share(t.id, spec.NVMe)
	for t.used > t.limitLocked() && t.evictLocked() {
	}
}

// limitLocked is the RAM that the tenant may take, in bytes.
func (t *Tenant) limitLocked() int64 {
	if t.spec.Memory == 0 && t.spec.MemoryLimit == 0 {
		return int64(*t.cache.opts.Transit)
	}
	return int64(max(t.spec.Memory, t.spec.MemoryLimit))
}

// takeWriter says whether the caller is to run the writer: there are drives, or may
// be later, and none runs.
func (t *Tenant) takeWriter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.writer || t.gone || t.spec.NVMe == 0 {
		return false
	}
	t.writer = true
	return true
}

// Namespace gives the blocks of an identity, whose tenant is this one whatever it
// says. Its first call makes it known on the drive. Errors wrap block.ErrInvalid,
// ErrRemoved, or ErrUnknown where AddTenant did not succeed.
func (t *Tenant) Namespace(ctx context.Context, identity block.Identity) (*Namespace, error) {
	identity.Tenant = t.kind + " " + t.name
	id, err := identity.ID()
	if err != nil {
		return nil, fmt.Errorf("name blocks: %w", err)
	}
	if err := t.enter(ctx); err != nil {
		return nil, fmt.Errorf("name blocks of tenant %s: %w", t.name, err)
	}
	defer t.leave()
	t.mu.Lock()
	place, known := t.spaces[id]
	gone, opened, durableHere := t.gone, t.opened, t.spec.NVMe > 0 && !t.bare
	record := t.record.with(identity)
	t.mu.Unlock()
	switch {
	case gone:
		return nil, fmt.Errorf("name blocks of tenant %s: %w", t.name, ErrRemoved)
	case !opened: // the drives may have given its place to another
		return nil, fmt.Errorf("name blocks of tenant %s: %w: it is not open", t.name, ErrUnknown)
	case known:
		return &Namespace{tenant: t, id: id, place: place, tokens: identity.BlockTokens}, nil
	case len(record.Namespaces) > maxNamespaces:
		return nil, fmt.Errorf("name blocks of tenant %s: %w: it has %d namespaces already", t.name, ErrDropped, maxNamespaces)
	}
	if durableHere {
		if err := t.writeRecord(record); err != nil {
			return nil, fmt.Errorf("name blocks of tenant %s: %w", t.name, err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.record = record
	place = uint16(len(record.Namespaces) - 1)
	t.spaces[id] = place
	return &Namespace{tenant: t, id: id, place: place, tokens: identity.BlockTokens}, nil
}

// remove ends the tenant, its blocks and its files.
func (t *Tenant) remove(ctx context.Context) error {
	if err := t.enter(ctx); err != nil {
		return err
	}
	defer t.leave()
	if err := t.stop(); err != nil {
		t.log.Warn("files of a tenant that ends were not closed well", slog.Any("error", err))
	}
	return t.discard()
}

// close gives the tenant's files back; its blocks on the drives stay.
func (t *Tenant) close() error {
	t.opening <- struct{}{}
	defer t.leave()
	ending, cancel := context.WithTimeout(context.Background(), flushLimit)
	defer cancel()
	if err := t.settle(ending); err != nil {
		t.log.Warn("blocks that ended may be found again", slog.Any("error", err))
	}
	return t.stop()
}

// stop ends what the tenant does: nothing of it is found any more, and what is
// being read keeps its memory until it is released.
func (t *Tenant) stop() error {
	t.mu.Lock()
	t.gone = true
	drive := t.drive
	t.drive = nil
	t.wipeLocked()
	t.borrowsLocked(false)
	t.mu.Unlock()
	t.signal()
	t.cache.wear.share(t.id, 0)
	if drive == nil {
		return nil
	}
	return drive.Close()
}

// signal wakes the writer.
func (t *Tenant) signal() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// errNewer makes a newer file's error the package's own.
func errNewer(err error) error {
	if errors.Is(err, segment.ErrNewer) {
		return fmt.Errorf("%w: %w", ErrNewer, err)
	}
	return err
}
