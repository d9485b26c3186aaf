package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestFiveHundredGettersOfOneDigestShareOneDownload(t *testing.T) {
	t.Parallel()
	// In a bubble the deadlines come in the middle of a pull that the limiter
	// paces, and a goroutine that is left fails the test.
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(2, 8*testSegment+100))
		var total int64
		for _, data := range src.files {
			total += int64(len(data))
		}
		store, err := Open(Options{Dir: "/weights", FS: durabletest.New(), Boot: "boot"})
		if err != nil {
			t.Fatal(err)
		}
		puller, err := NewPuller(PullerOptions{
			Store: store, Sources: []Rule{{Source: src, Refs: []string{"acme/*"}}}, SegmentSize: testSegment, ScrubEvery: -1,
			Limiter: NewLimiter(units.Rate(total / 10)), // ten seconds
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := puller.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		m, err := puller.Manifest(ctx, testRef)
		if err != nil {
			t.Fatal(err)
		}
		var getters sync.WaitGroup
		var whole, gaveUp atomic.Int64
		for i := range 500 {
			getters.Go(func() {
				ctx, cancel := context.WithCancel(ctx)
				if i%5 == 3 { // a deadline in mid-way
					ctx, cancel = context.WithTimeout(ctx, time.Duration(1+i%7)*time.Second)
				}
				defer cancel()
				if i%5 == 4 { // a caller that goes away
					timer := time.AfterFunc(time.Duration(i%9)*time.Second, cancel)
					defer timer.Stop()
				}
				err := get(ctx, puller, m, i, src.files)
				switch {
				case err == nil:
					whole.Add(1)
				case ctx.Err() != nil && errors.Is(err, ctx.Err()):
					gaveUp.Add(1)
				default:
					t.Errorf("getter %d: %v", i, err)
				}
			})
		}
		getters.Wait()
		if whole.Load() < 300 || gaveUp.Load() < 100 {
			t.Errorf("%d getters got all and %d gave up", whole.Load(), gaveUp.Load())
		}
		if got := src.servedBytes(); got != total {
			t.Errorf("500 getters cost %d bytes, want %d", got, total)
		}
		if src.resolves != 1 {
			t.Errorf("the source was asked %d times what the ref means", src.resolves)
		}
		stop()
		running.Wait()
		if err := errors.Join(puller.Wait(t.Context()), store.Close()); err != nil {
			t.Error(err)
		}
	})
}

// get is getter i: by Ensure, or by a Reader of one file from some offset.
func get(ctx context.Context, p *Puller, m *artifact.Manifest, i int, files map[string][]byte) error {
	if i%2 == 0 {
		_, err := p.Ensure(ctx, m.Ref, EnsureOptions{})
		return err
	}
	f := m.Files[i%len(m.Files)]
	rd, err := p.Open(ctx, m, f.Path, OpenOptions{})
	if err != nil {
		return err
	}
	from := f.Size * int64(i%4) / 4
	got, err := readAll(ctx, rd, from, f.Size)
	if err = errors.Join(err, rd.Close()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if !bytes.Equal(got, files[f.Path][from:]) {
		return fmt.Errorf("%d bytes of %s from %d are wrong", len(got), f.Path, from)
	}
	return nil
}
