package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// patience is the silence on which hub clients give up.
const patience = 10 * time.Second

// drip is a body that yields step bytes at a time with a pause before each, or
// with no pause given the first step and then nothing. It ends when it is closed.
type drip struct {
	r      io.Reader
	step   int
	every  time.Duration
	begun  bool
	closed chan struct{}
}

func newDrip(body []byte, step int, every time.Duration) *drip {
	return &drip{r: bytes.NewReader(body), step: step, every: every, closed: make(chan struct{})}
}

func (d *drip) Read(p []byte) (int, error) {
	if d.every == 0 && !d.begun {
		d.begun = true
		return d.r.Read(p[:min(len(p), d.step)])
	}
	var tick <-chan time.Time
	if d.every > 0 {
		timer := time.NewTimer(d.every)
		defer timer.Stop()
		tick = timer.C
	}
	select {
	case <-tick:
		return d.r.Read(p[:min(len(p), d.step)])
	case <-d.closed:
		return 0, errors.New("closed")
	}
}

func (d *drip) Close() error {
	select {
	case <-d.closed:
	default:
		close(d.closed)
	}
	return nil
}

func shardPath(i, of int) string { return fmt.Sprintf("model-%05d-of-%05d.safetensors", i, of) }

// waitAll opens every shard at once and gives the longest wait for a first byte.
func waitAll(t *testing.T, r *rig, shards int) time.Duration {
	t.Helper()
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	waits := make(chan time.Duration, shards)
	var readers []*Reader
	for i := range shards {
		rd, err := r.puller.Open(t.Context(), m, shardPath(i+1, shards), OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		readers = append(readers, rd)
		go func() {
			n, err := rd.ReadAt(t.Context(), make([]byte, 1), 0)
			if n != 1 || err != nil {
				t.Errorf("first byte of %s: %d, %v", rd.path, n, err)
			}
			waits <- time.Since(began)
		}()
	}
	var longest time.Duration
	for range shards {
		longest = max(longest, <-waits)
	}
	for _, rd := range readers {
		if err := rd.Close(); err != nil {
			t.Error(err)
		}
	}
	return longest
}

func TestEveryReaderHasItsFirstBytesEarlyHoweverLowTheRate(t *testing.T) {
	t.Parallel()
	for _, rate := range []int64{4 << 10, 64 << 10, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			src := newMemSource(model(32, 3<<20))
			r := newRig(t, src, func(_ *Options, p *PullerOptions) {
				p.Streams, p.SegmentSize, p.Limiter = 4, 16<<20, NewLimiter(units.Rate(rate))
			})
			if got := waitAll(t, r, 32); got > patience-2*time.Second {
				t.Errorf("at %d bytes a second a reader waited %v", rate, got)
			}
		})
	}
}

func TestEveryReaderHasItsFirstBytesEarlyHoweverSlowTheSource(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(32, 3<<20))
		src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if f.Kind != artifact.Weights {
				return bytes.NewReader(body), nil
			}
			return newDrip(body, 1500, time.Second/4), nil
		}
		r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams, p.SegmentSize = 4, 16<<20 })
		if got := waitAll(t, r, 32); got > patience-time.Second {
			t.Errorf("a reader waited %v", got)
		}
	})
}

func TestStreamsThatStallGiveWayToAReaderThatHasNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(3, 4*testSegment))
		stalled := true
		src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
			// memSource calls this under its lock.
			if stalled && f.Kind == artifact.Weights && f.Path != shardPath(3, 3) && off > 0 {
				return newDrip(body, 100, 0), nil
			}
			return bytes.NewReader(body), nil
		}
		r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 2 })
		m, err := r.puller.Manifest(t.Context(), testRef)
		if err != nil {
			t.Fatal(err)
		}
		var readers []*Reader
		for i := range 2 {
			rd, err := r.puller.Open(t.Context(), m, shardPath(i+1, 3), OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			readers = append(readers, rd)
			if _, err := readAll(t.Context(), rd, 0, testSegment); err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = readAll(t.Context(), rd, testSegment, rd.Size()) }()
		}
		synctest.Wait()
		began := time.Now()
		late, err := r.puller.Open(t.Context(), m, shardPath(3, 3), OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := late.ReadAt(t.Context(), make([]byte, 1), 0); err != nil {
			t.Fatal(err)
		}
		if got := time.Since(began); got > 2*turnLength {
			t.Errorf("the reader waited %v for streams that stall", got)
		}
		src.set(func() { stalled = false })
		for _, rd := range append(readers, late) {
			if err := rd.Close(); err != nil {
				t.Error(err)
			}
		}
		r.ensure(t)
	})
}

func TestAReaderInMidFileIsServedFromThereFirst(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 9*testSegment))
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	held, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	src.set(func() {
		src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if f.Path == "config.json" {
				once.Do(func() { close(held) })
				return &gate{r: bytes.NewReader(body), open: release}, nil
			}
			return bytes.NewReader(body), nil
		}
	})
	// The one stream is with another file until the reader waits.
	pulled := make(chan error, 1)
	go func() {
		_, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
		pulled <- err
	}()
	<-held
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	buf := make([]byte, 100)
	off := int64(6*testSegment + 10)
	go func() {
		_, err := rd.ReadAt(t.Context(), buf, off)
		got <- err
	}()
	for { // until it waits
		r.puller.mu.Lock()
		at, wake := rd.waitsAt, r.puller.wake.wait()
		r.puller.mu.Unlock()
		if at == off {
			break
		}
		<-wake
	}
	close(release)
	if err := <-got; err != nil || !bytes.Equal(buf, src.files[shard1][off:off+100]) {
		t.Errorf("read in mid-file: %v", err)
	}
	if err := <-pulled; err != nil {
		t.Fatal(err)
	}
	src.set(func() {
		for _, open := range src.opens {
			if strings.HasPrefix(open, shard1) {
				if want := fmt.Sprintf("%s %d %d", shard1, 6*testSegment, testSegment); open != want {
					t.Errorf("the first range of the file is %q, want %q", open, want)
				}
				break
			}
		}
	})
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
}

func TestAFileOfOneSegmentIsServedBeforeItIsWholeButForItsEnd(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*minSegment))
	release := make(chan struct{})
	src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 {
			return &gate{r: bytes.NewReader(body), n: len(body) - 1, open: release}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.SegmentSize = maxSegment })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := src.files[shard1]
	tail := rd.Size() - minSegment
	got, err := readAll(t.Context(), rd, 0, tail)
	if err != nil || !bytes.Equal(got, want[:tail]) {
		t.Fatalf("%d bytes and %v of what has come", len(got), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := rd.ReadAt(ctx, make([]byte, 1), tail); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("read of the end before the digest is known: %d, %v", n, err)
	}
	close(release)
	if got, err := readAll(t.Context(), rd, tail, rd.Size()); err != nil || !bytes.Equal(got, want[tail:]) {
		t.Errorf("%d bytes and %v of the end", len(got), err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	r.ensure(t)
}

func TestSegmentsAndPiecesSuitTheRate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate, size, segment int64
		piece               int
	}{
		{0, 1 << 40, 16 << 20, pieceSize},
		{1 << 30, 1 << 40, 16 << 20, pieceSize},
		{1 << 20, 1 << 30, 4 << 20, pieceSize},
		{100 << 10, 1 << 30, 256 << 10, 25 << 10},
		{1, 1 << 30, minSegment, leastPiece},
		{1, 1 << 40, 16 << 20, leastPiece}, // not more than maxSegments
		{1, 100, minSegment, leastPiece},
	} {
		p := &Puller{segment: 16 << 20, limiter: NewLimiter(units.Rate(c.rate))}
		if s, n := p.segmentFor(c.size), p.pieceFor(); s != c.segment || n != c.piece {
			t.Errorf("rate %d, size %d: segments of %d and pieces of %d, want %d and %d", c.rate, c.size, s, n, c.segment, c.piece)
		}
	}
}

func TestSlowAnswersGetSmallFilesWholeHoweverManyWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(8, minSegment/4*3))
		src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if f.Kind != artifact.Weights {
				return bytes.NewReader(body), nil
			}
			return newDrip(body, len(body), turnLength*3/2), nil
		}
		r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 2 })
		m, err := r.puller.Manifest(t.Context(), testRef)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		got := make(chan error, 8)
		for i := range 8 {
			rd, err := r.puller.Open(t.Context(), m, shardPath(i+1, 8), OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				_, err := readAll(ctx, rd, 0, rd.Size())
				got <- errors.Join(err, rd.Close())
			}()
		}
		for range 8 {
			if err := <-got; err != nil {
				t.Error(err)
			}
		}
	})
}

// otherRef is of a second source.
var otherRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "other/tiny", Revision: artifact.DefaultRevision}

func TestASourceThatAsksForAPauseOrFailsHoldsNobodyElseUp(t *testing.T) {
	t.Parallel()
	pause := &source.Error{Source: "mem", Op: "open", Err: source.ErrThrottled, RetryAfter: 2 * time.Minute}
	failure := &source.Error{Source: "mem", Op: "open", Err: source.ErrUnavailable}
	for name, c := range map[string]struct {
		fault error
		noSHA bool
	}{
		"pause":              {pause, false},
		"failure":            {failure, false},
		"pause in resolve":   {pause, true},
		"failure in resolve": {failure, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			src, other := newMemSource(model(8, 4*testSegment)), newMemSource(model(2, 4*testSegment+1))
			other.name = "other"
			failing := true
			for i := range 8 {
				src.noSHA[shardPath(i+1, 8)] = c.noSHA
			}
			src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
				if failing && f.Kind == artifact.Weights {
					return nil, c.fault
				}
				return bytes.NewReader(body), nil
			}
			r := newRig(t, src, func(_ *Options, p *PullerOptions) {
				p.Streams, p.RetryBase, p.RetryMax, p.Attempts = 2, time.Minute, time.Minute, 20
				p.Sources = append(p.Sources, Rule{Source: other, Refs: []string{"other/*"}})
			})
			pulled := make(chan error, 1)
			go func() {
				_, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
				pulled <- err
			}()
			synctest.Wait()
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			if _, err := r.puller.Ensure(ctx, otherRef, EnsureOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(began); got > 2*turnLength {
				t.Errorf("%s: a pull from another source took %v", name, got)
			}
			src.set(func() { failing = false })
			if err := <-pulled; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAPullFromASourceThatOnlyEverAsksForPausesEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(8, 4*testSegment))
		longer := time.Minute // each answer asks for more than the one before
		src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if f.Kind == artifact.Weights {
				longer += time.Millisecond
				return nil, &source.Error{Source: "mem", Op: "open", Err: source.ErrThrottled, RetryAfter: longer}
			}
			return bytes.NewReader(body), nil
		}
		r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams, p.Attempts = 4, 3 })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute) // four streams, each of three tries
		defer cancel()
		if _, err := r.puller.Ensure(ctx, testRef, EnsureOptions{}); !errors.Is(err, source.ErrThrottled) {
			t.Errorf("pull: %v", err)
		}
	})
}
