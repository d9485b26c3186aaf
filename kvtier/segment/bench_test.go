package segment

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// BenchmarkAppendBesideRawWrites and BenchmarkReadBesideRawReads measure blocks of
// 2 MiB through the log and plain O_DIRECT calls of the same size in turn, and
// give the medians' ratio. BenchmarkOpen measures a start.

const benchBlock = 2 << 20

func benchMemory(b *testing.B, bytes int64) []byte {
	b.Helper()
	p, free, err := newPages(bytes)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(free)
	random := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(p); i += 8 {
		le.PutUint64(p[i:], random.Uint64())
	}
	return p
}

// rawFile is a preallocated and written file, opened around the page cache.
func rawFile(b *testing.B, dir string, size int64, p []byte) durable.File {
	b.Helper()
	f, err := durable.OS.OpenFile(filepath.Join(dir, "raw"), os.O_RDWR|os.O_CREATE|syscall.O_DIRECT, 0o600)
	if err == nil {
		err = f.Allocate(size)
	}
	for off := int64(0); err == nil && off < size; off += benchBlock {
		_, err = f.WriteAt(p[:benchBlock], off)
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = f.Close() })
	return f
}

func benchLog(b *testing.B, dir string, bytes int64) *Log {
	b.Helper()
	l, err := Open(Options{
		FS: durable.OS, Dirs: []string{filepath.Join(dir, "blocks")}, Tenant: testTenant, Bytes: bytes, SegmentSize: MaxSize, LargestBlock: benchBlock, Direct: true,
	})
	if err != nil {
		b.Fatal(err)
	}
	if !l.Direct() {
		b.Fatal("the benchmark needs a file system with O_DIRECT")
	}
	b.Cleanup(func() { _ = l.Close() })
	return l
}

func BenchmarkAppendBesideRawWrites(b *testing.B) {
	for _, batch := range []int{1, 4} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			dir := b.TempDir()
			const part = 64 << 20
			p := benchMemory(b, int64(batch)*benchBlock)
			raw := rawFile(b, dir, MaxSize, p)
			l := benchLog(b, dir, 4*MaxSize)
			write := func(key *int) error {
				var writes []Write
				for i := range batch {
					w := writeOf(keyOf(*key), nil)
					w.Data, w.Size = p[i*benchBlock:][:benchBlock], benchBlock
					writes = append(writes, w)
					*key++
				}
				_, err := l.Append(context.Background(), writes)
				return err
			}
			key := 0
			for range 4 * MaxSize / benchBlock / batch { // its files are written once
				if err := write(&key); err != nil {
					b.Fatal(err)
				}
			}
			var ours, theirs []time.Duration
			at := int64(0)
			for b.Loop() {
				began := time.Now()
				for range part / benchBlock / batch {
					if err := write(&key); err != nil {
						b.Fatal(err)
					}
				}
				ours = append(ours, time.Since(began))
				began = time.Now()
				for range part / benchBlock / batch {
					if _, err := raw.WriteAt(p, at%(MaxSize-int64(len(p)))&^(PageSize-1)); err != nil {
						b.Fatal(err)
					}
					at += int64(len(p))
				}
				theirs = append(theirs, time.Since(began))
			}
			report(b, part, ours, theirs)
		})
	}
}

func BenchmarkReadBesideRawReads(b *testing.B) {
	dir := b.TempDir()
	p := benchMemory(b, benchBlock)
	const blocks = 200
	raw := rawFile(b, dir, blocks*benchBlock, p)
	l := benchLog(b, dir, 4*MaxSize)
	w := writeOf(keyOf(0), p)
	var locs []Loc
	for range blocks {
		got, err := l.Append(context.Background(), []Write{w})
		if err != nil {
			b.Fatal(err)
		}
		locs = append(locs, got...)
	}
	for _, readers := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
			memory := benchMemory(b, int64(readers)*benchBlock)
			const each = 64
			run := func(read func(i int, buf []byte) error) time.Duration {
				began := time.Now()
				var all sync.WaitGroup
				errs := make([]error, readers)
				for r := range readers {
					all.Go(func() {
						random := rand.New(rand.NewPCG(uint64(r), 3))
						for range each / readers {
							errs[r] = errors.Join(errs[r], read(random.IntN(blocks), memory[r*benchBlock:][:benchBlock]))
						}
					})
				}
				all.Wait()
				if err := errors.Join(errs...); err != nil {
					b.Fatal(err)
				}
				return time.Since(began)
			}
			var ours, theirs []time.Duration
			for b.Loop() {
				ours = append(ours, run(func(i int, buf []byte) error {
					_, err := l.Read(context.Background(), locs[i], w.Namespace, w.Key, buf)
					return err
				}))
				theirs = append(theirs, run(func(i int, buf []byte) error {
					_, err := raw.ReadAt(buf, int64(i)*benchBlock)
					return err
				}))
			}
			report(b, each*benchBlock, ours, theirs)
		})
	}
}

func report(b *testing.B, bytes int64, ours, theirs []time.Duration) {
	b.Helper()
	o, t := median(ours), median(theirs)
	b.SetBytes(bytes)
	b.ReportMetric(float64(bytes)/o.Seconds()/1e6, "ours-MB/s")
	b.ReportMetric(float64(bytes)/t.Seconds()/1e6, "raw-MB/s")
	b.ReportMetric(t.Seconds()/o.Seconds(), "ratio")
}

// BenchmarkOpen starts a log of 10 GiB of blocks of 2 MiB after it was killed.
// Files are sparse: what a start reads is there.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	const segments = 40
	l := benchLog(b, dir, segments*MaxSize)
	per := int(MaxSize/benchBlock) - 1
	for n := range segments - 1 {
		entries := []byte(nil)
		s := func() *segment {
			d := l.drives[0]
			s, err := d.create(uint32(n))
			if err == nil {
				err = d.begin(context.Background(), s)
			}
			if err != nil {
				b.Fatal(err)
			}
			return s
		}()
		for i := range per {
			r := sampleRecord()
			r.flags, r.seq = 0, uint64(n*per+i)
			r.key.Hash[0], r.key.Hash[1], r.key.Hash[2] = byte(i), byte(n), byte(i>>8)
			entries = appendEntry(entries, entryOf(r, uint32(1+i*(1+benchBlock/PageSize))))
		}
		if err := l.drives[0].foot(s, entries, s.incarnation, uint64((n+1)*per)); err != nil {
			b.Fatal(err)
		}
	}
	// The last is half full, and has no footer.
	l.drives[0].open = nil
	p := benchMemory(b, benchBlock)
	w := writeOf(keyOf(0), p)
	for i := range per / 2 {
		w.Key = keyOf(i).key
		if _, err := l.Append(context.Background(), []Write{w}); err != nil {
			b.Fatal(err)
		}
	}
	for _, after := range []string{"kill", "close"} {
		b.Run("after="+after, func(b *testing.B) {
			found := 0
			for b.Loop() {
				o := l.opts
				o.Recovered = func(Record) { found++ }
				began := time.Now()
				next, err := Open(o)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(time.Since(began).Seconds(), "s")
				for _, d := range next.drives {
					for _, s := range d.segments {
						_ = s.file.Close()
					}
				}
				next.release()
				if after == "kill" {
					// It has a footer now: that goes again.
					b.StopTimer()
					l.drives[0].unseal(b)
					b.StartTimer()
				}
			}
			if found == 0 {
				b.Error("nothing is found")
			}
		})
	}
}

// unseal takes the footer of the newest segment away.
func (d *drive) unseal(b *testing.B) {
	b.Helper()
	list := d.list()
	s := list[len(list)-1]
	clear(d.scratch[:PageSize])
	if _, err := s.file.WriteAt(d.scratch[:PageSize], d.log.size-PageSize); err != nil {
		b.Fatal(err)
	}
}
