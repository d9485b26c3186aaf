package arena

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/hearth-dev/hearth/durable"
)

// TestWhoStaysWithinAShareIsNeverTurnedAway holds the promise of Alloc while
// many take, reshape and give back memory at once: full is full by the sums
// alone, whatever is on its way back to the kernel.
func TestWhoStaysWithinAShareIsNeverTurnedAway(t *testing.T) {
	t.Parallel()
	const owners, share = 6, 4 * mib
	a := open(t, owners*share)
	rounds := 800
	if testing.Short() {
		rounds = 300
	}
	var left atomic.Int32
	left.Store(owners)
	var all sync.WaitGroup
	for owner := range owners {
		all.Go(func() {
			defer left.Add(-1)
			useShare(t, a, rand.New(rand.NewPCG(uint64(owner), 3)), share, rounds)
		})
	}
	for left.Load() > 0 {
		if got, err := a.memory.resident(); err != nil || got > owners*share || a.Resident() > owners*share {
			t.Errorf("%d bytes are resident, told %d, allowed %d: %v", got, a.Resident(), owners*share, err)
			break
		}
		runtime.Gosched()
	}
	all.Wait()
	if a.Used() != 0 || a.reserved != 0 || a.returning != 0 || a.waiting != 0 {
		t.Errorf("used %d, reserved %d, returning %d, waiting %d", a.Used(), a.reserved, a.returning, a.waiting)
	}
}

func useShare(t *testing.T, a *Arena, random *rand.Rand, share int64, rounds int) {
	var blocks []block
	var used int64
	for id := range uint64(rounds) {
		size := 1 + random.IntN(1<<(8+random.IntN(14)))
		for used+a.Cost(size) > share {
			b := blocks[0]
			if !isFilled(a.Bytes(b.slot, b.size), b.id) {
				t.Errorf("block %d was changed by another", b.id)
			}
			a.Free(b.slot)
			used -= a.Cost(b.size)
			blocks = blocks[1:]
		}
		slot, err := a.Alloc(size)
		if err != nil {
			t.Errorf("%d of %d bytes are used, %d more: %v", used, share, size, err)
			break
		}
		whole := a.Padded(slot, size)
		if !isZero(whole[size:]) {
			t.Errorf("behind a block of %d bytes lies another's", size)
		}
		id |= random.Uint64() << 20
		fill(whole[:size], id)
		used += a.Cost(size)
		blocks = append(blocks, block{slot, size, id})
	}
	for _, b := range blocks {
		a.Free(b.slot)
	}
}

func TestAllocWaitsForMemoryThatIsOnItsWayBack(t *testing.T) {
	t.Parallel()
	for name, shrink := range map[string]bool{"it arrives": false, "the capacity shrinks": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				a := open(t, mib)
				// As reclaimLocked has it during its system call.
				a.mu.Lock()
				a.returning = mib
				a.mu.Unlock()
				result := make(chan error, 1)
				go func() {
					_, err := a.Alloc(mib)
					result <- err
				}()
				synctest.Wait()
				if len(result) > 0 || a.waiting != 1 {
					t.Fatalf("no waiting for it: %v", <-result)
				}
				if _, err := a.Alloc(1); !errors.Is(err, ErrFull) {
					t.Errorf("all is promised to one, another gets %v", err)
				}
				if shrink {
					go a.SetCapacity(mib / 2)
					synctest.Wait()
				}
				a.mu.Lock()
				a.returning = 0
				a.wakeLocked()
				a.mu.Unlock()
				if err := <-result; shrink != errors.Is(err, ErrFull) || !shrink && err != nil {
					t.Errorf("allocate: %v", err)
				}
			})
		})
	}
}

func TestMemoryThatDoesNotGoBackStaysCounted(t *testing.T) {
	t.Parallel()
	a := open(t, 4*mib)
	slot := alloc(t, a, 4*mib)
	fill(a.Bytes(slot, 4*mib), 1)
	a.Free(slot)
	fd := a.memory.fd
	a.memory.fd = -1
	_, other := a.Alloc(4096)   // another class: takes from the free slot
	_, same := a.Alloc(3 * mib) // the same slot, with too much memory
	a.SetCapacity(mib)
	a.memory.fd = fd
	for what, err := range map[string]error{"another class": other, "the same class": same} {
		if !errors.Is(err, syscall.EBADF) || errors.Is(err, ErrFull) {
			t.Errorf("%s: %v, want the reason", what, err)
		}
	}
	if got := resident(t, a); got != 4*mib || a.Resident() != 4*mib || a.Used() != 0 || a.reserved != 0 || a.returning != 0 {
		t.Errorf("%d bytes are resident, told %d, used %d, reserved %d, returning %d", got, a.Resident(), a.Used(), a.reserved, a.returning)
	}
	a.SetCapacity(4 * mib)
	a.Free(alloc(t, a, 4096))
	slot = alloc(t, a, 4*mib)
	fill(a.Bytes(slot, 4*mib), 1)
	a.SetCapacity(mib)
	a.memory.fd = -1
	a.Free(slot)
	a.memory.fd = fd
	if got := resident(t, a); got != 4*mib || a.Resident() != 4*mib || a.Used() != 0 {
		t.Errorf("%d bytes are resident, told %d, used %d", got, a.Resident(), a.Used())
	}
	a.SetCapacity(mib)
	if got := resident(t, a); got > mib {
		t.Errorf("%d bytes are resident once it goes again", got)
	}
}

func TestSlotsAreReadAndWrittenByDrivesDirectly(t *testing.T) {
	t.Parallel()
	a := open(t, mib)
	path := filepath.Join(t.TempDir(), "a")
	f, err := durable.OS.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		f, err = durable.OS.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	const n = 70_000
	out, in := alloc(t, a, n), alloc(t, a, n)
	fill(a.Bytes(out, n), 1)
	if _, err := f.WriteAt(a.Padded(out, n), 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(a.Padded(in, n), 4096); err != nil || !bytes.Equal(a.Padded(in, n), a.Padded(out, n)) {
		t.Errorf("another block was read, %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestNoDumpHoldsBlocks(t *testing.T) {
	t.Parallel()
	a := open(t, mib)
	alloc(t, a, 1)
	alloc(t, a, mib/2)
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	// Every arena of this process is in there.
	mappings, ours := 0, false
	for line := range strings.Lines(string(text)) {
		switch {
		case strings.Contains(line, " rw-s "):
			ours = strings.Contains(line, "memfd:hearth-kv")
		case ours && strings.HasPrefix(line, "VmFlags:"):
			mappings++
			ours = false
			if !strings.Contains(line, " dd ") {
				t.Errorf("a mapping goes into dumps: %s", line)
			}
		}
	}
	if mappings < 2 {
		t.Errorf("%d mappings were seen", mappings)
	}
}

func TestAClassWithoutMoreSlotsIsFull(t *testing.T) {
	t.Parallel()
	a := open(t, 1<<40)
	c, _ := a.class(MaxSize)
	if most, want := min(int64(maxSlots), regionSize>>c.shift), int64(regionSize/MaxSize); most != want {
		t.Errorf("%d slots of the largest, want %d", most, want)
	}
	steps := make([]*step, regionSize/maxStep)
	c.steps.Store(&steps)
	if _, err := a.Alloc(MaxSize); !errors.Is(err, ErrFull) {
		t.Errorf("allocate: %v, want ErrFull", err)
	}
	c.steps.Store(new([]*step))
	if a.Used() != 0 || a.reserved != 0 {
		t.Errorf("used %d, reserved %d", a.Used(), a.reserved)
	}
}

func TestHugePagesAreUsedWhereTheKernelGrantsThem(t *testing.T) {
	t.Parallel()
	const general, two = "shmem_enabled", "hugepages-2048kB/shmem_enabled"
	for name, c := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"no huge pages":            {map[string]string{}, false},
		"another size":             {map[string]string{"hpage_pmd_size": "536870912\n", general: "[advise]\n"}, false},
		"an older kernel, never":   {map[string]string{general: "always within_size advise [never] deny force\n"}, false},
		"an older kernel, advise":  {map[string]string{general: "always within_size [advise] never deny force\n"}, true},
		"always":                   {map[string]string{general: "[always] within_size advise never deny force\n", two: "always [inherit] within_size advise never\n"}, true},
		"inherit never":            {map[string]string{general: "always within_size advise [never] deny force\n", two: "always [inherit] within_size advise never\n"}, false},
		"this size, though never":  {map[string]string{general: "always within_size advise [never] deny force\n", two: "always inherit within_size [advise] never\n"}, true},
		"not this size":            {map[string]string{general: "[always] within_size advise never deny force\n", two: "always inherit within_size advise [never]\n"}, false},
		"deny is above all":        {map[string]string{general: "always within_size advise never [deny] force\n", two: "[always] inherit within_size advise never\n"}, false},
		"a setting without choice": {map[string]string{general: "advise\n"}, false},
	} {
		dir := t.TempDir()
		if len(c.files) > 0 && c.files["hpage_pmd_size"] == "" {
			c.files["hpage_pmd_size"] = "2097152\n"
		}
		for file, text := range c.files {
			path := filepath.Join(dir, file)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := grantsHugePages(dir); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
