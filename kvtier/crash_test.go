package kvtier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// CRASH=full tries every crash of every change (`make crash`); without it a
// sample of them takes seconds.
var everyCrash = os.Getenv("CRASH") == "full"

// named is a key of a tenant's namespace in a history.
type named struct {
	tenant, space string
	key           int
}

// history is a cache that plays a script on a file system that crashes, and what may
// be found of each key.
type history struct {
	fs      *durabletest.FS
	drives  []string
	cache   *Cache
	spec    TenantSpec // of the tenant "a"
	spaces  map[string]*Namespace
	other   *Namespace // of the tenant "b", nil while it is not there
	next    int
	may     map[named]map[int]bool // versions; 0 is none
	mayLose bool                   // the oldest segment of a drive is about to go
	gone    bool                   // the tenant "b" is about to go
	// patience is how often the writer may find that no drive takes writes.
	patience int
}

func newHistory(drives int) (*history, error) {
	l := &history{fs: durabletest.New(), spaces: map[string]*Namespace{}, may: map[named]map[int]bool{}}
	for i := 1; i < drives; i++ {
		l.drives = append(l.drives, fmt.Sprintf("/drive%d", i))
	}
	l.spec = TenantSpec{Kind: TenantCredential, Name: "a", Memory: 2 * units.MiB, NVMe: units.Bytes(drives) * 20 * units.MiB}
	return l, durable.MkdirAllSynced(l.fs, "/kv", 0o700)
}

// sizeIn is the size of a key's blocks: of every kind of place in a record.
func sizeIn(key int) int {
	return []int{28, 3000, 3968, 4096, 70_000, 300_000, 300_000, 300_000, 300_000, 300_000}[key%10] + key%7
}

// open opens the cache and the tenant "a" with the namespaces that it has.
func (l *history) open() (err error) {
	transit := units.Bytes(0)
	l.cache, err = OpenCache(CacheOptions{
		Dir: "/kv", Drives: l.drives, Memory: 4 * units.MiB, Transit: &transit, VerifyEvery: 1, SegmentSize: 4 << 20, FS: l.fs,
		Log: slog.New(slog.DiscardHandler), Wear: WearOptions{WritesPerDay: 1, Capacity: 1 << 50},
	})
	if err != nil {
		return err
	}
	if err = l.add(); err == nil {
		err = l.space("x")
	}
	if err != nil {
		// Who cannot start ends, and gives its locks back.
		return errors.Join(err, l.cache.Close())
	}
	return nil
}

func (l *history) add() error {
	_, err := l.cache.AddTenant(context.Background(), l.spec)
	return err
}

func (l *history) tenant() *Tenant {
	t, _ := l.cache.Tenant(TenantCredential, "a")
	return t
}

func (l *history) space(format string) (err error) {
	l.spaces[format], err = l.tenant().Namespace(context.Background(), block.Identity{Format: format})
	return err
}

func (l *history) of(n named) *Namespace {
	if n.tenant == "b" {
		return l.other
	}
	return l.spaces[n.space]
}

// change does what makes a key mean version, 0 for none: until it is done the key
// may be as before.
func (l *history) change(n named, version int, do func() error) error {
	if l.may[n] == nil {
		l.may[n] = map[int]bool{0: true}
	}
	l.may[n][version] = true
	if err := do(); err != nil {
		return err
	}
	l.may[n] = map[int]bool{version: true}
	return nil
}

func (l *history) put(n named) error {
	if l.of(n) == nil {
		return nil // its tenant could not be added
	}
	l.next++
	version := l.next
	return l.change(n, version, func() error {
		opts := PutOptions{Parent: keyOf(n.key - 1), HasParent: n.key%10 > 0}
		return put(context.Background(), l.of(n), keyOf(n.key), content(n.key, version, sizeIn(n.key)), opts)
	})
}

func (l *history) delete(n named) error {
	if l.of(n) == nil {
		return nil
	}
	return l.change(n, 0, func() error {
		_, err := l.of(n).Delete(context.Background(), keyOf(n.key))
		return err
	})
}

// use gets a key, which has to be right where it is found.
func (l *history) use(n named) error {
	_, err := l.look(n)
	return err
}

// look gives the version that is found, 0 for none.
func (l *history) look(n named) (int, error) {
	if l.of(n) == nil {
		return 0, nil
	}
	b, err := l.of(n).Get(context.Background(), keyOf(n.key))
	if errors.Is(err, ErrMiss) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer b.Release()
	for version := range l.may[n] {
		if version > 0 && bytes.Equal(b.Bytes(), content(n.key, version, sizeIn(n.key))) {
			return version, nil
		}
	}
	for version := 1; version <= l.next; version++ {
		if bytes.Equal(b.Bytes(), content(n.key, version, sizeIn(n.key))) {
			return 0, wrongBytes(fmt.Sprintf("%v is found as version %d, it may be %v", n, version, l.may[n]))
		}
	}
	return 0, wrongBytes(fmt.Sprintf("%v is found with bytes that nobody stored", n))
}

// wrongBytes is what may never be.
type wrongBytes string

func (w wrongBytes) Error() string { return string(w) }

func (l *history) write(t *Tenant) error {
	if t == nil {
		return nil
	}
	l.mayLose = true
	defer func() { l.mayLose = false }()
	for {
		more, err := t.writeSome(context.Background())
		if errors.Is(err, segment.ErrNoDrive) && l.patience > 0 {
			// A drive that failed again and again is tried now and then.
			l.patience--
			for key := 300; key < 305; key++ {
				if err := errors.Join(l.put(x(key)), l.use(x(key))); err != nil {
					return err
				}
			}
			continue
		}
		if err != nil {
			l.mayLose = true
			return l.keepLose(err)
		}
		if !more {
			return nil
		}
	}
}

func (l *history) keepLose(err error) error { return errors.Join(errLosing, err) }

// errLosing says that a segment may have been about to be used again.
var errLosing = errors.New("writing")

func x(key int) named { return named{"a", "x", key} }

// script is a history, a step after the other.
func (l *history) script() []func() error {
	ctx := context.Background()
	var steps []func() error
	step := func(do func() error) { steps = append(steps, do) }
	write := func() { step(func() error { return l.write(l.tenant()) }) }
	both := func(n named) {
		step(func() error { return l.put(n) })
		step(func() error { return l.use(n) })
	}
	step(l.open)
	for key := range 10 {
		both(x(key))
	}
	write()
	for _, key := range []int{1, 2, 5} { // on the drive
		both(x(key))
	}
	step(func() error { return l.delete(x(3)) })
	step(func() error { l.tenant().checkpoint(ctx); return l.alive() })
	write()
	step(func() error { return l.delete(x(6)) })
	both(x(6))
	for round := range 9 { // more than the drive takes
		for key := 15; key < 20; key++ {
			both(x(10*round + key))
		}
		write()
		step(func() error { return l.use(x(0)) })
	}
	step(func() error { return l.space("z") })
	for key := range 8 {
		both(named{"a", "z", key})
	}
	write()
	step(func() error { return l.put(x(0)) })
	step(func() error { return l.delete(x(5)) })
	step(func() error { _, err := l.tenant().PinBlocks(ctx, keyOf(4)); return pinned(err) })
	step(func() error { l.tenant().checkpoint(ctx); return l.alive() })
	step(func() error { return l.resize(12 * units.MiB) })
	step(func() error { return l.put(named{"a", "z", 4}) })
	step(func() error { return l.resize(24 * units.MiB) })
	step(l.addOther)
	for key := range 6 {
		both(named{"b", "x", key})
	}
	step(func() error { return l.write(l.otherTenant()) })
	step(func() error { return l.removeOther() })
	step(l.addOther)
	both(named{"b", "x", 1})
	step(func() error { return l.write(l.otherTenant()) })
	step(func() error { _, err := l.tenant().UnpinBlocks(ctx, keyOf(4)); return err })
	write()
	step(func() error { l.tenant().flush(ctx); return l.alive() })
	step(func() error { return l.cache.Close() })
	return steps
}

// pinned takes it that a block was given up before it was to be pinned.
func pinned(err error) error {
	if errors.Is(err, ErrMiss) || errors.Is(err, ErrNoSpace) {
		return nil
	}
	return err
}

func (l *history) resize(n units.Bytes) error {
	l.spec.NVMe = n * units.Bytes(1+len(l.drives))
	if err := l.add(); err != nil {
		return l.keepLose(err)
	}
	if err := l.alive(); err != nil {
		return l.keepLose(err)
	}
	return nil
}

func (l *history) otherTenant() *Tenant {
	if l.other == nil {
		return nil
	}
	return l.other.tenant
}

func (l *history) addOther() (err error) {
	l.other = nil
	if l.gone { // its removal is to be done again before
		if err := l.removeOther(); err != nil {
			return err
		}
	}
	t, err := l.cache.AddTenant(context.Background(), TenantSpec{Kind: TenantCredential, Name: "b", Memory: 2 * units.MiB, NVMe: 20 * units.MiB, AdmitAll: true})
	if err == nil {
		l.other, err = t.Namespace(context.Background(), block.Identity{Format: "x"})
	}
	return err
}

func (l *history) removeOther() error {
	l.gone = true
	for n := range l.may {
		if n.tenant == "b" {
			l.may[n][0] = true
		}
	}
	if err := l.cache.RemoveTenant(context.Background(), TenantCredential, "b"); err != nil {
		return err
	}
	for n := range l.may {
		if n.tenant == "b" {
			l.may[n] = map[int]bool{0: true}
		}
	}
	l.gone = false
	return l.cache.sweep(context.Background())
}

// alive says whether the file system has not crashed.
func (l *history) alive() error {
	if _, err := l.fs.Stat("/kv"); errors.Is(err, durabletest.ErrCrashed) {
		return err
	}
	return nil
}

// play plays the script until the crash; finished says that there was none.
func (l *history) play() (finished bool, err error) {
	for i, step := range l.script() {
		err := step()
		if dead := l.alive(); dead != nil {
			l.mayLose = errors.Is(err, errLosing)
			return false, nil //nolint:nilerr // it crashed as it was to
		}
		if err != nil {
			return false, fmt.Errorf("step %d: %w", i, err)
		}
	}
	return true, nil
}

// safe lists what the process that crashed had on the drives, and whether it lay
// in sealed segments. What was to be used again may be gone.
func (l *history) safe() map[named]bool {
	list := map[named]bool{}
	if l.cache == nil || l.tenant() == nil || l.tenant().drive == nil {
		return list
	}
	t := l.tenant()
	sealed, oldest := map[[2]uint32]bool{}, map[uint32]segment.Info{}
	for _, s := range t.drive.Segments() {
		sealed[[2]uint32{s.Drive, s.Number}] = s.Sealed
		if o, found := oldest[s.Drive]; !found || s.Incarnation < o.Incarnation {
			oldest[s.Drive] = s
		}
	}
	for n := range l.may {
		if n.tenant != "a" || len(l.may[n]) > 1 || l.spaces[n.space] == nil {
			continue
		}
		id := t.index.Find(l.spaces[n.space].print(keyOf(n.key)))
		if id == 0 || t.index.Loc(id) == 0 {
			continue
		}
		loc := t.locLocked(id)
		if l.mayLose && oldest[loc.Drive()].Number == loc.Segment() {
			continue
		}
		list[n] = sealed[[2]uint32{loc.Drive(), loc.Segment()}]
	}
	return list
}

// recover opens what the crash left and holds it to what may be found. all says
// that everything reached the drives.
func (l *history) recover(after *durabletest.FS, must map[named]bool, all bool) error {
	next := &history{fs: after, drives: l.drives, spec: l.spec, spaces: map[string]*Namespace{}, next: l.next, may: l.may}
	first, err := next.found(nil, must, all)
	if err != nil {
		return err
	}
	if _, err := next.found(first, nil, all); err != nil {
		return fmt.Errorf("opened again: %w", err)
	}
	return nil
}

// found opens, looks at everything and closes. It gives what it found.
func (l *history) found(before map[named]int, must map[named]bool, all bool) (map[named]int, error) {
	if err := errors.Join(l.open(), l.space("z"), l.addOther()); err != nil {
		return nil, fmt.Errorf("open after the crash: %w", err)
	}
	stats := l.tenant().Stats()
	if err := l.account(stats); err != nil {
		return nil, err
	}
	list := map[named]int{}
	var here int64
	for n := range l.may {
		version, err := l.look(n)
		if err != nil {
			return nil, err
		}
		if version > 0 {
			list[n] = version
		}
		if version > 0 && n.tenant == "a" {
			here++
		}
		if sealed, was := must[n]; was && version == 0 && (sealed || all) {
			return nil, fmt.Errorf("%v was on the drive, sealed %t, and is lost", n, sealed)
		}
		if before != nil && before[n] != version {
			return nil, fmt.Errorf("%v was version %d at the first start and is %d at the second", n, before[n], version)
		}
	}
	damaged := l.tenant().Stats().NVMe.Damaged
	if here+damaged != stats.NVMe.Blocks || all && damaged > 0 {
		return nil, fmt.Errorf("%d blocks are told, %d are found and %d damaged", stats.NVMe.Blocks, here, damaged)
	}
	if before == nil {
		if err := l.goOn(list); err != nil {
			return nil, fmt.Errorf("go on after the crash: %w", err)
		}
	}
	if err := l.cache.Close(); err != nil {
		return nil, err
	}
	return list, nil
}

// goOn stores and deletes a little, so that what follows stands on what was found.
func (l *history) goOn(list map[named]int) error {
	for _, n := range []named{x(1), x(5), x(15), {"a", "z", 4}} {
		if err := l.put(n); err != nil {
			return err
		}
		if err := l.use(n); err != nil {
			return err
		}
	}
	if err := errors.Join(l.delete(x(2)), l.delete(x(1))); err != nil {
		return err
	}
	l.tenant().flush(context.Background())
	for n := range l.may {
		// What reclaim gave up meanwhile is looked up anew.
		version, err := l.look(n)
		if err != nil {
			return err
		}
		if delete(list, n); version > 0 {
			list[n] = version
		}
	}
	l.tenant().flush(context.Background())
	for n := range list {
		id := l.of(n).tenant.index.Find(l.of(n).print(keyOf(n.key)))
		if l.of(n).tenant.index.Loc(id) == 0 {
			delete(list, n)
		}
	}
	return nil
}

var errLeft = errors.New("half written")

// account holds what the tenant says it has to the files.
func (l *history) account(s TenantStats) error {
	var bytes int64
	for _, dir := range append(l.cache.drives(), l.tenant().dir()) {
		entries, err := l.fs.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if durable.IsTemp(e.Name()) {
				return fmt.Errorf("%s is left in %s: %w", e.Name(), dir, errLeft)
			}
		}
	}
	for _, dir := range l.cache.drives() {
		n, err := segmentBytes(l.fs, filepath.Join(dir, blocksDir, l.tenant().folder()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		bytes += n
	}
	if int64(s.NVMe.Used) != bytes || s.NVMe.Used > s.NVMe.Budget {
		return fmt.Errorf("%d bytes of NVMe are told of %d, the files have %d", s.NVMe.Used, s.NVMe.Budget, bytes)
	}
	if s.RAM.Used != 0 || s.RAM.Blocks != 0 || s.Total != s.NVMe.Blocks || s.Waiting != 0 {
		return fmt.Errorf("at a start RAM has %d bytes, and of %d blocks %d are on drives", s.RAM.Used, s.Total, s.NVMe.Blocks)
	}
	return nil
}

// fate is what reached the drives.
type fate struct {
	name   string
	sector int64
	lives  durabletest.Survives
}

func fates(fs *durabletest.FS, random *rand.Rand, most int) []fate {
	list := []fate{
		{"nothing", durabletest.PageSector, durabletest.Nothing},
		{"everything", durabletest.PageSector, durabletest.Everything},
		{"names", durabletest.PageSector, durabletest.NamesAlone},
		{"bytes", durabletest.PageSector, durabletest.BytesAlone},
		{"some", durabletest.PageSector, durabletest.Randomly(random)},
		{"some small", durabletest.SmallSector, durabletest.Randomly(random)},
	}
	changes := fs.Unsynced()
	if len(changes) > most {
		changes = changes[len(changes)-most:]
	}
	for _, n := range changes {
		list = append(list, fate{fmt.Sprintf("without %d", n), durabletest.PageSector, durabletest.Without(n)},
			fate{fmt.Sprintf("only %d", n), durabletest.PageSector, durabletest.Only(n)})
	}
	if most == 0 {
		random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		return list[:2]
	}
	return list
}

// TestACrashAtAnyChangeShowsTheLastValueOrAMiss plays the script to a crash at each
// change, lets each part of what was not synced survive, and starts again, twice.
func TestACrashAtAnyChangeShowsTheLastValueOrAMiss(t *testing.T) {
	t.Parallel()
	step, most := 67, 0
	switch {
	case everyCrash:
		step, most = 1, 6
	case testing.Short():
		step = 149
	}
	for drives := 1; drives <= 2; drives++ {
		t.Run(fmt.Sprintf("drives=%d", drives), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(uint64(drives), 3))
			for n := 1 + random.IntN(step); ; n += step {
				l, err := newHistory(drives)
				if err != nil {
					t.Fatal(err)
				}
				l.fs.CrashAt(l.fs.Changes()+n, n%2 == 0)
				finished, err := l.play()
				if err != nil {
					t.Fatalf("change %d: %v", n, err)
				}
				must := l.safe()
				if l.cache != nil {
					_ = l.cache.Close() // of the process that is gone
				}
				for _, f := range fates(l.fs, random, most) {
					// Each fate goes on from the same crash.
					may := map[named]map[int]bool{}
					for k, versions := range l.may {
						may[k] = map[int]bool{}
						for v := range versions {
							may[k][v] = true
						}
					}
					if err := l.recover(l.fs.CrashWith(f.sector, f.lives), must, f.name == "everything"); err != nil {
						t.Fatalf("crash at change %d, what survives: %s: %v", n, f.name, err)
					}
					l.may = may
				}
				if finished {
					t.Logf("%d changes", n)
					return
				}
			}
		})
	}
}
