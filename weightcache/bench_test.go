package weightcache

import (
	"context"
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const benchSize = 256 << 20

// benchFiles are n files of benchSize/n bytes.
func benchFiles(n int) map[string][]byte {
	files := map[string][]byte{}
	for i := range n {
		files[string(rune('a'+i))+".bin"] = tensorFile("x", benchSize/n, uint64(i))
	}
	return files
}

func benchLanding(b *testing.B, files int) {
	src := newMemSource(benchFiles(files))
	b.SetBytes(benchSize)
	for b.Loop() {
		b.StopTimer()
		r := newRig(b, src, func(_ *Options, p *PullerOptions) { p.SegmentSize, p.Streams = defaultSegment, defaultStreams })
		// memSource hashes its files to list them; that is no part of a landing.
		if _, err := r.puller.Manifest(context.Background(), testRef); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		r.ensure(b)
		b.StopTimer()
		if err := r.puller.Remove(context.Background(), testRef); err != nil {
			b.Fatal(err)
		}
		r.close(b)
		b.StartTimer()
	}
}

func BenchmarkLandingOfOneFile(b *testing.B)    { benchLanding(b, 1) }
func BenchmarkLandingOfEightFiles(b *testing.B) { benchLanding(b, 8) }

// BenchmarkRawWrite is the drive's own rate: one file, allocated, one fsync.
func BenchmarkRawWrite(b *testing.B) {
	piece := tensorFile("x", pieceSize, 1)[:pieceSize]
	path := filepath.Join(b.TempDir(), "raw")
	b.SetBytes(benchSize)
	for b.Loop() {
		f, err := durable.OS.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
		if err != nil {
			b.Fatal(err)
		}
		if err := f.Allocate(benchSize); err != nil {
			b.Fatal(err)
		}
		for off := 0; off < benchSize; off += pieceSize {
			if _, err := f.Write(piece); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
		if err := f.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkHashPlain(b *testing.B) {
	piece := make([]byte, pieceSize)
	h := sha256.New()
	b.SetBytes(pieceSize)
	for b.Loop() {
		_, _ = h.Write(piece)
	}
}

// BenchmarkHashWithChunks is the same with the chunk list made in passing.
func BenchmarkHashWithChunks(b *testing.B) {
	piece := make([]byte, pieceSize)
	c := artifact.NewChunker()
	b.SetBytes(pieceSize)
	for b.Loop() {
		_, _ = c.Write(piece)
	}
}

// zeroSource yields large files without holding them.
type zeroSource struct {
	*memSource
	size int64
}

func (s *zeroSource) Open(_ context.Context, _ *artifact.Listing, _ artifact.File, _, n int64) (io.ReadCloser, error) {
	return io.NopCloser(io.LimitReader(zeroes{}, n)), nil
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestMemoryOfAPullDoesNotGrowWithItsSize(t *testing.T) {
	t.Parallel()
	const size = 256 << 20
	h := sha256.New()
	if _, err := io.CopyN(h, zeroes{}, size); err != nil {
		t.Fatal(err)
	}
	src := &zeroSource{memSource: newMemSource(map[string][]byte{"w.bin": nil}), size: size}
	src.listing = func(l *artifact.Listing) {
		l.Files[0].Size, l.Files[0].SHA256 = size, artifact.Digest(h.Sum(nil))
	}
	r := newRig(t, src.memSource, func(_ *Options, p *PullerOptions) {
		p.Sources = []Rule{{Source: src, Refs: []string{"acme/*"}}}
		p.SegmentSize, p.Streams = defaultSegment, defaultStreams
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r.ensure(t)
	runtime.ReadMemStats(&after)
	// Other tests run beside this one; a pull that held its file would show.
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > size/2 {
		t.Errorf("the heap grew by %d bytes for a pull of %d", grown, size)
	}
}
