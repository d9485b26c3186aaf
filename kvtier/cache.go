package kvtier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/arena"
	"github.com/hearth-dev/hearth/kvtier/gate"
	"github.com/hearth-dev/hearth/units"
)

// Errors of the blocks.
var (
	// ErrMiss says that a block is not there, or not any more, or not whole.
	ErrMiss = errors.New("no such block")
	// ErrDropped says that there is no room for a block now, or never; it is not
	// stored, which costs time and nothing else.
	ErrDropped = errors.New("block dropped")
	// ErrRemoved says that the tenant is gone.
	ErrRemoved = errors.New("tenant was removed")
	// ErrUnknown says that there is no such tenant.
	ErrUnknown = errors.New("no such tenant")
)

// Transit is the RAM beyond the budget of memory, in bytes, for blocks on their
// way between sockets and drives of tenants that have NVMe and no RAM.
const Transit = 128 * units.MiB

// CacheOptions configure a Cache.
type CacheOptions struct {
	// Dir is the KV space's directory, which the caller owns (see Open), and
	// Drives are further directories for segments, one a drive.
	Dir    string
	Drives []string
	// Memory is the RAM for blocks, of all tenants together. Transit comes on top
	// of it; nil is the package's.
	Memory  units.Bytes
	Transit *units.Bytes
	// Wear bounds what is written to the drives.
	Wear WearOptions
	// VerifyEvery is how many reads from RAM there are for one whose checksum is
	// compared; 0 is 64, 1 compares all. Reads from drives are always verified.
	VerifyEvery int
	// SegmentSize is the size of a segment, in bytes; 0 chooses it by the tenant's
	// budget. Buffered turns O_DIRECT off.
	SegmentSize int64
	Buffered    bool
	// CheckpointEvery is the time between checkpoints; 0 is 10 minutes.
	CheckpointEvery time.Duration
	// FS is the file system; nil means durable.OS.
	FS  durable.FS
	Log *slog.Logger
}

// Cache keeps the blocks of a node's tenants. It is safe for concurrent use.
type Cache struct {
	opts   CacheOptions
	fs     durable.FS
	log    *slog.Logger
	arena  *arena.Arena
	wear   *wearKeeper
	speeds []*gate.Estimator // of the drives
	events events
	// lending is what tenants hold beyond their own.
	lending lending
	locks   []io.Closer   // of further drives
	swept   chan struct{} // capacity 1: something is in the trash

	mu      sync.Mutex
	tenants map[tenantKey]*Tenant
	running context.Context // of Run; nil while it does not run
	tested  bool            // the drives are measured, or being measured
	writers sync.WaitGroup
	closed  bool
}

// tenantKey names a tenant.
type tenantKey struct{ kind, name string }

// OpenCache makes the cache of the KV space at opts.Dir, without a tenant. Errors
// wrap ErrNewer.
func OpenCache(opts CacheOptions) (*Cache, error) {
	if opts.FS == nil {
		opts.FS = durable.OS
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.VerifyEvery == 0 {
		opts.VerifyEvery = 64
	}
	if opts.CheckpointEvery == 0 {
		opts.CheckpointEvery = 10 * time.Minute
	}
	if opts.Transit == nil {
		transit := Transit
		opts.Transit = &transit
	}
	opts.Dir = filepath.Clean(opts.Dir)
	c := &Cache{opts: opts, fs: opts.FS, log: opts.Log, tenants: map[tenantKey]*Tenant{}, swept: make(chan struct{}, 1)}
	if err := c.openDrives(); err != nil {
		return nil, fmt.Errorf("open KV cache: %w", errors.Join(err, c.closeDrives()))
	}
	for range c.drives() {
		c.speeds = append(c.speeds, gate.NewEstimator(gate.Speed{}, nil))
	}
	var err error
	c.arena, err = arena.New(arena.Options{Capacity: int64(opts.Memory + *opts.Transit), Log: opts.Log})
	if err != nil {
		return nil, fmt.Errorf("open KV cache: %w", errors.Join(err, c.closeDrives()))
	}
	if c.wear, err = openWear(opts); err != nil {
		return nil, fmt.Errorf("open KV cache: %w", errors.Join(err, c.arena.Close(), c.closeDrives()))
	}
	return c, nil
}

// TenantSpec says who a tenant is and what it may take.
type TenantSpec struct {
	Kind string // TenantClaim or TenantCredential
	Name string // unique of its kind
	// Memory and NVMe are its own: no other tenant's load takes blocks from them.
	Memory, NVMe units.Bytes
	// MemoryLimit is what it may take in RAM at most, at least Memory: beyond that
	// it borrows what others do not use. 0 is Memory.
	MemoryLimit units.Bytes
	// AdmitAll writes every block to NVMe, and not only those that are used again
	// or worth it.
	AdmitAll bool
	// PrefillRate is how many tokens a second its engines compute, 0 where it is
	// not known; BlockTokens is the number of tokens in a block that does not say.
	PrefillRate float64
	BlockTokens int
	// EncryptionKey is the content of its key file; nil stores as it is.
	EncryptionKey []byte
}

// Kinds of tenants: what tells the tenant of a connection.
const (
	TenantClaim      = "claim"      // the socket in its directory
	TenantCredential = "credential" // its password, or its own socket
)

func (s TenantSpec) check() error {
	if !slices.Contains([]string{TenantClaim, TenantCredential}, s.Kind) || s.Name == "" || len(s.Name) > 253 {
		return fmt.Errorf("%w: tenant %q of kind %q has no name or an unknown kind", ErrInvalid, s.Name, s.Kind)
	}
	if s.Memory < 0 || s.NVMe < 0 || s.MemoryLimit != 0 && s.MemoryLimit < s.Memory {
		return fmt.Errorf("%w: tenant %s has a negative size, or a limit below what is its own", ErrInvalid, s.Name)
	}
	return nil
}

// AddTenant takes a tenant in, with the blocks that are on the drives. The same
// call again gives the same tenant, with its budgets as they are said now.
func (c *Cache) AddTenant(ctx context.Context, spec TenantSpec) (*Tenant, error) {
	if err := spec.check(); err != nil {
		return nil, fmt.Errorf("add KV tenant: %w", err)
	}
	key := tenantKey{spec.Kind, spec.Name}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, fmt.Errorf("add KV tenant %s: %w", spec.Name, ErrRemoved)
	}
	t, found := c.tenants[key]
	if !found {
		t = newTenant(c, spec)
		c.tenants[key] = t
	}
	c.mu.Unlock()
	err := t.open(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("add KV tenant %s: %w", spec.Name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.startLocked(t)
	return t, nil
}

// startLocked starts a tenant's writer, where the cache runs and it has none.
func (c *Cache) startLocked(t *Tenant) {
	if c.running == nil || c.closed || !t.takeWriter() {
		return
	}
	running, end := context.WithCancel(c.running)
	done := make(chan struct{})
	t.halt = func() { end(); <-done }
	c.writers.Go(func() {
		defer close(done)
		defer end()
		t.run(running)
	})
	if !c.tested {
		c.tested = true
		tests := c.running
		c.writers.Go(func() { c.measure(tests) })
	}
}

// RemoveTenant ends a tenant and its blocks; one that is not there is fine.
func (c *Cache) RemoveTenant(ctx context.Context, kind, name string) error {
	key := tenantKey{kind, name}
	c.mu.Lock()
	t := c.tenants[key]
	if t == nil {
		// Whoever adds it meanwhile meets this one, and not its files.
		t = newTenant(c, TenantSpec{Kind: kind, Name: name})
		c.tenants[key] = t
	}
	c.mu.Unlock()
	if err := t.remove(ctx); err != nil {
		return fmt.Errorf("remove KV tenant %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tenants[key] == t {
		delete(c.tenants, key)
	}
	select {
	case c.swept <- struct{}{}:
	default:
	}
	return nil
}

// Tenant gives a tenant; errors wrap ErrUnknown.
func (c *Cache) Tenant(kind, name string) (*Tenant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.tenants[tenantKey{kind, name}]
	if t == nil {
		return nil, fmt.Errorf("%w: %s %q", ErrUnknown, kind, name)
	}
	return t, nil
}

// Tenants lists the tenants by kind and name.
func (c *Cache) Tenants() []*Tenant {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*Tenant, 0, len(c.tenants))
	for _, t := range c.tenants {
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b *Tenant) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name))
	})
	return list
}

// SetMemory changes the RAM for blocks; what is too much is given up at once,
// but for what is being read.
func (c *Cache) SetMemory(n units.Bytes) {
	c.arena.SetCapacity(int64(n + *c.opts.Transit))
	for c.arena.Used() > c.arena.Capacity() && c.reclaim(nil, 1) {
	}
}

// Run writes blocks to the drives, until ctx ends. Then it flushes for at most 4
// seconds what is worth it, so that the next process finds it.
func (c *Cache) Run(ctx context.Context) error {
	c.mu.Lock()
	c.running = ctx
	for _, t := range c.tenants {
		c.startLocked(t)
	}
	c.mu.Unlock()
	c.runSweeps(ctx)
	c.mu.Lock()
	c.closed = true // no writer starts after the wait
	c.mu.Unlock()
	c.writers.Wait()
	return nil
}

// runSweeps removes what removed tenants left, until ctx ends.
func (c *Cache) runSweeps(ctx context.Context) {
	again := time.NewTicker(sweepAgain)
	defer again.Stop()
	for {
		if err := c.sweep(ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("what a tenant left is not removed yet, trying again later", slog.Any("error", err))
		}
		select {
		case <-ctx.Done():
			return
		case <-c.swept:
		case <-again.C:
		}
	}
}

// Close gives the memory and the files back. No call may be under way.
func (c *Cache) Close() error {
	c.mu.Lock()
	c.closed = true
	tenants := c.tenants
	c.tenants = map[tenantKey]*Tenant{}
	c.mu.Unlock()
	var err error
	for _, t := range tenants {
		err = errors.Join(err, t.close())
	}
	return errors.Join(err, c.wear.close(), c.arena.Close(), c.closeDrives())
}
