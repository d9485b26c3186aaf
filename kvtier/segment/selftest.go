package segment

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// Speed is what a drive does, as SelfTest measured it.
type Speed struct {
	Read    float64       // bytes per second, in order, in reads of 2 MiB
	Write   float64       // the same of writes
	Latency time.Duration // of a read of one page, at the median
	Direct  bool          // it was measured around the page cache
}

// What a SelfTest writes and reads at most, in bytes.
const (
	testBytes = 64 << 20
	testStep  = 2 << 20
	testReads = 65
)

// Wear is what the drives may still be written. Spend is asked before n bytes are
// and may say no, Charge is told of n bytes that are written in any case; nil has no
// bound.
type Wear struct {
	Spend  func(n int64) bool
	Charge func(n int64)
}

// testSize is how many bytes a test writes, and has been taken from the wear: as
// many as it lets, and 2 MiB at least.
func (w Wear) testSize() int64 {
	for size := int64(testBytes); size > testStep; size /= 2 {
		if w.Spend == nil || w.Spend(size+PageSize) { // a page is for probeDirect
			return size
		}
	}
	if w.Charge != nil {
		w.Charge(testStep + PageSize)
	}
	return testStep
}

// SelfTest measures a drive with a file of at most 64 MiB in a directory that is
// there, and of 2 MiB where the wear has not more. What a crash leaves of it has a
// temporary name; see durable.IsTemp. Where the drive has no room for that it is
// measured with less, and not with nothing: then the error wraps syscall.ENOSPC.
func SelfTest(ctx context.Context, fsys durable.FS, dir string, wear Wear) (v Speed, err error) {
	p, free, err := newPages(testStep)
	if err != nil {
		return v, fmt.Errorf("measure drive: %w", err)
	}
	defer free()
	random := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(p); i += 8 {
		le.PutUint64(p[i:], random.Uint64()) // a drive may shrink what repeats
	}
	size := wear.testSize()
	v.Direct = probeDirect(fsys, dir, p) == nil
	flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if v.Direct {
		flags |= syscall.O_DIRECT
	}
	path := durable.TempName(filepath.Join(dir, "speed"))
	f, err := fsys.OpenFile(path, flags, 0o600)
	if err != nil {
		return v, fmt.Errorf("measure drive: %w", err)
	}
	defer func() {
		if err = errors.Join(err, f.Close(), fsys.Remove(path)); err != nil {
			err = fmt.Errorf("measure drive: %w", err)
		}
	}()
	for err = f.Allocate(size); err != nil; err = f.Allocate(size) {
		if size /= 2; size < testStep || !errors.Is(err, syscall.ENOSPC) {
			return v, err
		}
	}
	began := time.Now()
	for off := int64(0); off < size; off += testStep {
		if err := ctx.Err(); err != nil {
			return v, context.Cause(ctx)
		}
		if _, err := f.WriteAt(p, off); err != nil {
			return v, err
		}
	}
	if err := f.Datasync(); err != nil {
		return v, err
	}
	v.Write = float64(size) / time.Since(began).Seconds()
	began = time.Now()
	for off := int64(0); off < size; off += testStep {
		if err := ctx.Err(); err != nil {
			return v, context.Cause(ctx)
		}
		if _, err := durable.ReadVAt(f, [][]byte{p}, off); err != nil {
			return v, err
		}
	}
	v.Read = float64(size) / time.Since(began).Seconds()
	v.Latency, err = latency(f, p[:PageSize], size, random)
	return v, err
}

// latency is the median of reads of one page anywhere in a file.
func latency(f durable.File, p []byte, size int64, random *rand.Rand) (time.Duration, error) {
	took := make([]time.Duration, testReads)
	for i := range took {
		began := time.Now()
		if _, err := durable.ReadVAt(f, [][]byte{p}, random.Int64N(size/PageSize)*PageSize); err != nil {
			return 0, err
		}
		took[i] = time.Since(began)
	}
	return median(took), nil
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}
