package hubmirror

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// patience is the silence on which hub clients give up.
const patience = 10 * time.Second

// wait sleeps in a bubble's time.
func wait(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

// commit makes a filling's whole content a file on the drive.
func (f *filling) commit(t *testing.T) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "whole")
	if err := os.WriteFile(name, f.data, 0o444); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	f.set(func() { f.file, f.front = file, int64(len(f.data)) })
}

func TestAStalledSourceLeavesNoClientInSilence(t *testing.T) {
	t.Parallel()
	for _, stall := range []time.Duration{3 * time.Second, time.Minute, 2 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			data := pattern(2*SmallBody + 5)
			f := newFilling(data)
			m, p := inBubble(t, Options{}, func() (Content, error) { return f, nil })
			f.set(func() { f.front = SmallBody })
			go func() {
				wait(t, stall)
				f.set(func() { f.front = 2 * SmallBody })
				// The last bytes wait for the digest of the whole.
				wait(t, stall)
				f.commit(t)
			}()
			got := p.Get(t.Context(), weights)
			if got.Err != nil || !bytes.Equal(got.Body, data) {
				t.Errorf("stall of %v: %d bytes and %v, want %d", stall, len(got.Body), got.Err, len(data))
			}
			if got.Silence > trickleEvery {
				t.Errorf("stall of %v: silent for %v", stall, got.Silence)
			}
			if want := 2 * int64(stall/trickleEvery); m.Stats().Trickled < want-2 || m.Stats().Trickled > want+2 {
				t.Errorf("stall of %v: %d bytes trickled, want about %d", stall, m.Stats().Trickled, want)
			}
		})
	}
}

func TestTheFirstBytesOfAFileAreEnoughToKeepItsClient(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		data := pattern(100_000)
		f := newFilling(data)
		_, p := inBubble(t, Options{}, func() (Content, error) { return f, nil })
		go func() {
			// Nothing can be said before the source's first byte.
			wait(t, 9*time.Second)
			f.set(func() { f.front = 20 })
			wait(t, time.Minute)
			f.commit(t)
		}()
		got := p.Get(t.Context(), weights)
		if got.Err != nil || !bytes.Equal(got.Body, data) || got.First != 9*time.Second {
			t.Errorf("%d bytes and %v, the first after %v", len(got.Body), got.Err, got.First)
		}
		if got.Silence > patience {
			t.Errorf("silent for %v", got.Silence)
		}
	})
}

func TestAReserveIsHeldBackOnlyWhereMoreIsToCome(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		data := pattern(2 * SmallBody)
		f := newFilling(data)
		_, p := inBubble(t, Options{}, func() (Content, error) { return f, nil })
		f.set(func() { f.front = 2000 })
		got := p.Get(t.Context(), weights, "Range", "bytes=0-1999")
		if got.Status != http.StatusPartialContent || !bytes.Equal(got.Body, data[:2000]) || got.Silence > 0 {
			t.Errorf("%d: %d bytes after %v", got.Status, len(got.Body), got.Silence)
		}
	})
}

func TestBodiesThatWaitForAPlaceStayAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		data := pattern(2 * SmallBody)
		onDrive := onDisk(t, data)
		f := newFilling(data)
		contents := []func() (Content, error){onDrive, onDrive, func() (Content, error) { return f, nil }}
		next := 0
		m, p := inBubble(t, Options{Streams: 1}, func() (Content, error) {
			next++
			return contents[(next-1)%len(contents)]()
		})
		next = 0 // the size was asked for
		occupied := m.places.ask()
		f.set(func() { f.front = SmallBody })
		results := make(chan Got, 4)
		for range 3 {
			go func() { results <- p.Get(t.Context(), weights) }()
			synctest.Wait()
		}
		if got := m.Stats(); got.Waiting != 3 || got.Streams != 0 {
			t.Errorf("%d wait and %d are sent", got.Waiting, got.Streams)
		}
		wait(t, time.Minute)
		occupied.end()
		wait(t, time.Second)
		// The committed files are through; the third has what there is.
		if len(results) != 2 {
			t.Errorf("%d bodies are complete, want 2", len(results))
		}
		// A body that has nothing to send keeps no place from others.
		wait(t, 2*trickleEvery)
		next = 0
		if got := p.Get(t.Context(), weights); got.Err != nil || !bytes.Equal(got.Body, data) || got.Silence > 0 {
			t.Errorf("beside a stalled body: %d bytes and %v after %v", len(got.Body), got.Err, got.Silence)
		}
		f.commit(t)
		for range 3 {
			if got := <-results; got.Err != nil || !bytes.Equal(got.Body, data) || got.Silence > trickleEvery {
				t.Errorf("%d bytes and %v, silent for %v", len(got.Body), got.Err, got.Silence)
			}
		}
	})
}

func TestPlacesAreGivenInTheOrderAskedAndLeftByTheGone(t *testing.T) {
	t.Parallel()
	p := places{free: 1}
	first, second, third, fourth := p.ask(), p.ask(), p.ask(), p.ask()
	if !first.has() || second.has() {
		t.Fatal("the bound is not kept")
	}
	third.end()
	first.end()
	first.end()
	if !second.has() || third.has() || fourth.has() {
		t.Error("the place did not go to the one who waited longest")
	}
	second.end()
	if !fourth.has() {
		t.Error("a claim that left the queue was given the place")
	}
	fourth.end()
	if p.free != 1 || len(p.queue) != 0 {
		t.Errorf("%d free and %d waiting at the end", p.free, len(p.queue))
	}
}

func TestAWaitingClientThatGoesLeavesTheQueue(t *testing.T) {
	t.Parallel()
	data := pattern(2 * SmallBody)
	m, s := newSmall(t, Options{Streams: 1}, onDisk(t, data))
	occupied := m.places.ask()
	resp := begin(t, s.URL+weights)
	_ = resp.Body.Close()
	occupied.end()
	if a := ask(t, http.MethodGet, s.URL+weights, ""); a.err != nil || !bytes.Equal(a.body, data) {
		t.Errorf("next client: %d bytes and %v", len(a.body), a.err)
	}
}

func TestAMismatchNeverLetsTheReserveOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFilling(pattern(2 * SmallBody))
		_, p := inBubble(t, Options{}, func() (Content, error) { return f, nil })
		f.set(func() { f.front = 2*SmallBody - 1 })
		go func() {
			wait(t, 10*time.Second)
			f.set(func() { f.err = fmt.Errorf("check: %w", ErrMismatch) })
		}()
		got := p.Get(t.Context(), weights)
		if got.Err == nil || len(got.Body) > 2*SmallBody-reserveBytes+2 {
			t.Errorf("%d bytes and %v", len(got.Body), got.Err)
		}
	})
}
