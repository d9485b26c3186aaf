package weightcache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// gate is a body that yields its bytes only up to a point until it is opened.
type gate struct {
	r    io.Reader
	n    int
	open chan struct{}
}

func (g *gate) Read(p []byte) (int, error) {
	if g.n == 0 {
		<-g.open
		return g.r.Read(p)
	}
	n, err := g.r.Read(p[:min(len(p), g.n)])
	g.n -= n
	return n, err
}

func readAll(ctx context.Context, r *Reader, from, to int64) ([]byte, error) {
	got := make([]byte, 0, to-from)
	buf := make([]byte, 40<<10)
	for off := from; off < to; {
		n, err := r.ReadAt(ctx, buf[:min(int64(len(buf)), to-off)], off)
		got = append(got, buf[:n]...)
		off += int64(n)
		if err != nil {
			return got, err
		}
	}
	return got, nil
}

func TestReaderServesWhatLandedAndWaitsAtTheFrontier(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 4*testSegment))
	release := make(chan struct{})
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 2*testSegment {
			return &gate{r: bytes.NewReader(body), n: readAtLeast / 2, open: release}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := src.files[shard1]
	got, err := readAll(t.Context(), rd, 0, 2*testSegment)
	if err != nil || !bytes.Equal(got, want[:2*testSegment]) {
		t.Fatalf("read %d bytes before the pull stopped, %v", len(got), err)
	}
	if rd.File() != nil {
		t.Error("an unverified file was handed out")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := rd.ReadAt(ctx, make([]byte, 10), int64(len(want))-10); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("read of bytes that have not come: %d, %v", n, err)
	}
	close(release)
	got, err = readAll(t.Context(), rd, 2*testSegment, int64(len(want)))
	if err != nil || !bytes.Equal(got, want[2*testSegment:]) {
		t.Fatalf("read %d bytes of the rest, %v", len(got), err)
	}
	if rd.File() == nil {
		t.Error("the verified file is not handed out")
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 1), rd.Size()); !errors.Is(err, io.EOF) {
		t.Errorf("read past the end: %v, want io.EOF", err)
	}
	if err := errors.Join(rd.Close(), rd.Close()); err != nil {
		t.Error(err)
	}
	r.ensure(t)
}

func TestLastSegmentIsHeldBackUntilTheDigestIsRight(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	first := true
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		// memSource calls this under its lock.
		if f.Path == shard1 && off == 0 && first {
			first = false
			wrong := bytes.Clone(body)
			wrong[0] ^= 0x80
			return bytes.NewReader(wrong), nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := src.files[shard1]
	got, err := readAll(t.Context(), rd, 0, int64(len(want)))
	switch {
	case err == nil:
		// The reader came only after the wrong bytes were gone.
		if !bytes.Equal(got, want) {
			t.Error("wrong bytes were given as a whole file")
		}
	case !errors.Is(err, ErrMismatch):
		t.Errorf("read of a wrong file: %v, want ErrMismatch", err)
	case len(got) > 3*testSegment:
		t.Errorf("%d bytes were given: the last segment must be held back", len(got))
	default:
		if _, err := rd.ReadAt(t.Context(), make([]byte, 1), 0); !errors.Is(err, ErrMismatch) {
			t.Errorf("read after the break: %v, want ErrMismatch", err)
		}
	}
	later, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err = readAll(t.Context(), later, 0, int64(len(want)))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("a later reader got %d bytes, %v", len(got), err)
	}
	if err := errors.Join(rd.Close(), later.Close()); err != nil {
		t.Error(err)
	}
}

func TestFileThatAReaderWaitsForIsFetchedFirst(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(6, 2*testSegment))
	last := "model-00006-of-00006.safetensors"
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	src.set(func() {
		src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if f.Path == "config.json" {
				return &gate{r: bytes.NewReader(body), open: release}, nil
			}
			return bytes.NewReader(body), nil
		}
	})
	rd, err := r.puller.Open(t.Context(), m, last, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	close(release)
	if _, err := readAll(t.Context(), rd, 0, rd.Size()); err != nil {
		t.Fatal(err)
	}
	src.set(func() {
		for _, open := range src.opens {
			if strings.HasPrefix(open, "model-") && strings.Contains(open, ".safetensors ") {
				if !strings.HasPrefix(open, last) {
					t.Errorf("%q was fetched before the file a reader waits for", open)
				}
				break
			}
		}
	})
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
}

func TestReaderOfAFailingPullGetsItsError(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	cause := errors.New("no such bytes")
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Attempts = 2 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	src.set(func() {
		src.fault = func(artifact.File, int64, int64, []byte) (io.Reader, error) { return nil, cause }
	})
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 10), 0); !errors.Is(err, cause) {
		t.Errorf("ReadAt: %v, want the pull's error", err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	if _, err := r.puller.Open(t.Context(), m, "none", OpenOptions{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("Open of an unlisted file: %v, want ErrUnknown", err)
	}
}

func TestManifestOfARemovedRefBringsNoBytesBack(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	before := src.servedBytes()
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 1), 0); !errors.Is(err, ErrUnknown) {
		t.Errorf("ReadAt: %v, want ErrUnknown", err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	if got := src.servedBytes(); got != before {
		t.Errorf("%d bytes were fetched for a ref that was removed", got-before)
	}
}
