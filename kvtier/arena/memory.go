package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// regionSize is how much of the file a class has, in bytes. The file is sparse:
// what no slot has touched is not there.
const regionSize = 1 << 44

// regionOf is where a class begins in the file. A mapping may begin earlier by less
// than a huge page.
func regionOf(class int) int64 { return int64(class)*regionSize + hugePage }

// memory is the memfd.
type memory struct{ fd int }

func newMemory(classes int) (*memory, error) {
	// Where the kernel can, nobody may ever run what is in it.
	fd, err := unix.MemfdCreate("hearth-kv", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate("hearth-kv", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	m := &memory{fd: fd}
	if err := retry(func() error { return unix.Ftruncate(fd, regionOf(classes)+hugePage) }); err != nil {
		return nil, errors.Join(fmt.Errorf("set length of memfd: %w", err), m.close())
	}
	return m, nil
}

// mapped gives addresses of a range of the file: bytes, which lie within whole,
// which unmap takes. They begin at a huge page, in memory as in the file: else the
// kernel has none there. It has some by itself where huge says so.
func (m *memory) mapped(off, size int64, huge bool) (bytes, whole []byte, err error) {
	if whole, err = m.mmap(off, size); err != nil {
		return nil, nil, err
	}
	if bytes = whole[:size:size]; before(whole) > 0 {
		if bytes, whole, err = m.aligned(off, size, whole); err != nil {
			return nil, nil, err
		}
	}
	// A dump of the process is to hold no block, and to end before next week.
	errs := []error{unix.Madvise(whole, unix.MADV_DONTDUMP)}
	// Plain pages even where the kernel gives huge ones to all: what a slot costs
	// is what it holds. A kernel that knows no huge pages refuses both.
	advice := unix.MADV_NOHUGEPAGE
	if huge {
		advice = unix.MADV_HUGEPAGE
	}
	if err := unix.Madvise(whole, advice); !errors.Is(err, unix.EINVAL) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("advise about memfd: %w", err), unmap(whole))
	}
	return bytes, whole, nil
}

func (m *memory) mmap(off, size int64) ([]byte, error) {
	size += hugePage // room to begin later
	data, err := unix.Mmap(m.fd, off, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of memfd: %w", size, err)
	}
	return data, nil
}

// aligned maps a range anew so that it begins at a huge page. The kernel says
// where a mapping is to be, and that is the same place again unless somebody else
// took it: so the range is begun earlier by what is missing there. After some tries
// it stays as it is, of plain pages.
func (m *memory) aligned(off, size int64, whole []byte) (_, _ []byte, err error) {
	for range alignTries {
		skip := before(whole)
		if err := unmap(whole); err != nil {
			return nil, nil, err
		}
		if whole, err = m.mmap(off-skip, size); err != nil {
			return nil, nil, err
		}
		if before(whole) == skip {
			return whole[skip : skip+size : skip+size], whole, nil
		}
	}
	if err := unmap(whole); err != nil {
		return nil, nil, err
	}
	if whole, err = m.mmap(off, size); err != nil {
		return nil, nil, err
	}
	return whole[:size:size], whole, nil
}

const alignTries = 8

// before is how many bytes lie before the first huge page of addresses.
func before(p []byte) int64 {
	return int64(-reflect.ValueOf(p).Pointer() % hugePage)
}

// enlarge has the kernel make huge pages of memory that nobody uses so far, where
// it does so only when asked, and says whether it did. The first byte of each may
// change: the kernel makes none of pages that are not there.
func enlarge(p []byte) bool {
	for i := 0; i < len(p); i += hugePage {
		p[i] = 0
	}
	return retry(func() error { return unix.Madvise(p, unix.MADV_COLLAPSE) }) == nil
}

// enlarges tells whether the kernel makes huge pages of a memfd when asked: Linux
// does since 6.1, also where its settings grant none, but not where they deny them.
func enlarges() bool {
	m, err := newMemory(1)
	if err != nil {
		return false
	}
	defer func() { _ = m.close() }()
	p, whole, err := m.mapped(regionOf(0), hugePage, true)
	if err != nil {
		return false
	}
	defer func() { _ = unmap(whole) }()
	return enlarge(p)
}

// errAdvice says that memory may get huge pages by itself that is not to have some.
var errAdvice = errors.New("memory of normal pages keeps the advice for huge ones")

// gather has the kernel make a huge page of plain ones that are all there, while
// others use them, or says why it did not: EAGAIN where a drive reads or writes one,
// ENOMEM where there is no huge page. No other memory is advised to have huge pages,
// and this one not for longer: the next to touch it might get more than it is to have.
func gather(p []byte) error {
	err := unix.Madvise(p, unix.MADV_HUGEPAGE)
	if err == nil {
		err = retry(func() error { return unix.Madvise(p, unix.MADV_COLLAPSE) })
	}
	if back := unix.Madvise(p, unix.MADV_NOHUGEPAGE); back != nil {
		return fmt.Errorf("%w: %w", errAdvice, back)
	}
	if err != nil {
		return fmt.Errorf("gather pages: %w", err)
	}
	return nil
}

func unmap(data []byte) error {
	if err := unix.Munmap(data); err != nil {
		return fmt.Errorf("unmap memfd: %w", err)
	}
	return nil
}

// punch gives a range's memory back to the kernel.
func (m *memory) punch(off, size int64) error {
	err := retry(func() error {
		return unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, size)
	})
	if err != nil {
		return fmt.Errorf("punch hole into memfd: %w", err)
	}
	return nil
}

// absent tells whether the kernel holds nothing of a range.
func (m *memory) absent(off, size int64) (bool, error) {
	var next int64
	err := retry(func() (err error) {
		next, err = unix.Seek(m.fd, off, unix.SEEK_DATA)
		return err
	})
	switch {
	case errors.Is(err, unix.ENXIO):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("find data of memfd: %w", err)
	}
	return next >= off+size, nil
}

// resident is how many bytes the kernel holds for the file.
func (m *memory) resident() (int64, error) {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Fstat(m.fd, &st) }); err != nil {
		return 0, fmt.Errorf("stat memfd: %w", err)
	}
	return st.Blocks * 512, nil
}

func (m *memory) close() error {
	if err := unix.Close(m.fd); err != nil {
		return fmt.Errorf("close memfd: %w", err)
	}
	return nil
}

// retry repeats a call that a signal interrupted.
func retry(do func() error) error {
	for {
		if err := do(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// hugePageSettings is where the kernel says who gets huge pages.
const hugePageSettings = "/sys/kernel/mm/transparent_hugepage"

// grantsHugePages reports whether the kernel gives pages of 2 MiB of a memfd to
// those who ask with madvise. Kernels since 6.10 have a setting for each size
// besides the general one.
func grantsHugePages(settings string) bool {
	size, err := strconv.Atoi(strings.TrimSpace(readSetting(settings, "hpage_pmd_size")))
	if err != nil || size != hugePage {
		return false
	}
	general := chosen(readSetting(settings, "shmem_enabled"))
	ofSize := chosen(readSetting(settings, "hugepages-2048kB/shmem_enabled"))
	if general == "deny" || general == "force" {
		ofSize = "inherit" // these two are above all
	}
	if ofSize == "" || ofSize == "inherit" {
		return general != "" && general != "never" && general != "deny"
	}
	return ofSize != "never"
}

// readSetting reads a setting; one that is not there is empty.
func readSetting(settings, name string) string {
	text, err := os.ReadFile(filepath.Join(settings, name))
	if err != nil {
		return ""
	}
	return string(text)
}

// chosen is the word in brackets: "always [madvise] never".
func chosen(setting string) string {
	_, rest, _ := strings.Cut(setting, "[")
	word, _, found := strings.Cut(rest, "]")
	if !found {
		return ""
	}
	return word
}
