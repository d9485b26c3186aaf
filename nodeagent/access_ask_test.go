package nodeagent

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// fakeAsker notes when it was asked, and about what.
type fakeAsker struct {
	unknown atomic.Bool
	began   time.Time
	asked   []string
}

func (f *fakeAsker) AccessUnknown() bool { return f.unknown.Load() }

func (f *fakeAsker) CheckAccess(_ context.Context, onlyUnknown bool) (int, error) {
	what := "all"
	if onlyUnknown {
		what = "unknown"
	}
	f.asked = append(f.asked, what+" at "+time.Since(f.began).String())
	if f.unknown.Load() {
		return 1, nil
	}
	return 0, nil
}

func TestAccessIsAskedEveryHourAndSoonOfWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		atStart bool
		want    []string
	}{
		"all is known at the start": {false, []string{"unknown at 11m0s", "unknown at 12m0s", "all at 1h0m0s", "all at 2h0m0s"}},
		"not all is":                {true, []string{"unknown at 0s", "unknown at 1m0s", "unknown at 11m0s", "unknown at 12m0s", "all at 1h0m0s", "all at 2h0m0s"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour+time.Second)
			defer cancel()
			f := &fakeAsker{began: time.Now()}
			f.unknown.Store(c.atStart)
			changed := make(chan struct{}, 1)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				askAccess(ctx, f, changed, slog.New(slog.DiscardHandler))
			}()
			synctest.Wait()
			f.unknown.Store(false)
			time.Sleep(10 * time.Minute)
			changed <- struct{}{} // nothing is unknown
			synctest.Wait()
			f.unknown.Store(true) // resolved while its source could not tell
			for range 5 {         // further changes put nothing off
				changed <- struct{}{}
				time.Sleep(10 * time.Second)
			}
			time.Sleep(45 * time.Second)
			f.unknown.Store(false)
			<-ended
			if !slices.Equal(f.asked, c.want) {
				t.Errorf("%s: asked %v, want %v", name, f.asked, c.want)
			}
		})
	}
}
