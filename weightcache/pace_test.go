package weightcache

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// slowReader yields at most piece bytes after each pause.
type slowReader struct {
	io.Reader
	pause func()
	piece int
}

func (r slowReader) Read(p []byte) (int, error) {
	r.pause()
	return r.Reader.Read(p[:min(len(p), r.piece)])
}

func TestASourceThatTricklesIsGivenUpAndOneThatWeThrottleIsNot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pause    time.Duration
		piece    int
		rate     units.Rate
		trickles bool
	}{
		"a byte for each stall timeout":     {pause: defaultStall - time.Second, piece: 1, trickles: true},
		"bytes one by one":                  {pause: 10 * time.Millisecond, piece: 1, trickles: true},
		"somewhat more than the least":      {pause: 250 * time.Millisecond, piece: 300},
		"our limiter far below the least":   {pause: time.Millisecond, piece: 4096, rate: 100},
		"a fast source without any limiter": {piece: 4096},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				src := newMemSource(map[string][]byte{"config.json": tensorFile("x", testSegment, 1)})
				src.fault = func(_ artifact.File, _, _ int64, body []byte) (io.Reader, error) {
					return slowReader{bytes.NewReader(body), func() { time.Sleep(c.pause) }, c.piece}, nil
				}
				fsys := durabletest.New()
				if err := fsys.Mkdir("/var", 0o755); err != nil {
					t.Fatal(err)
				}
				s, err := startSession(fsys, src)
				if err != nil {
					t.Fatal(err)
				}
				s.puller.limiter = NewLimiter(c.rate)
				_, err = s.puller.Ensure(t.Context(), testRef, EnsureOptions{})
				if c.trickles != errors.Is(err, errTrickles) || !c.trickles && err != nil {
					t.Errorf("the pull gave %v", err)
				}
				if stalls := s.puller.Stats().Stalls; c.trickles != (stalls > 0) {
					t.Errorf("%d stalls were counted", stalls)
				}
			})
		})
	}
}

func TestASourceThatFallsSilentAfterAByteEachTimeIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(map[string][]byte{"config.json": tensorFile("x", testSegment/2, 1)})
		src.fault = func(_ artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			silent := &closableReader{closed: make(chan struct{})}
			return struct {
				io.Reader
				io.Closer
			}{io.MultiReader(bytes.NewReader(body[:1]), silent), silent}, nil
		}
		fsys := durabletest.New()
		if err := fsys.Mkdir("/var", 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := startSession(fsys, src)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = s.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, errStalled) {
			t.Errorf("the pull gave %v", err)
		}
		if stalls := s.puller.Stats().Stalls; stalls != int64(s.puller.attempts) {
			t.Errorf("%d stalls were counted, want %d", stalls, s.puller.attempts)
		}
	})
}
