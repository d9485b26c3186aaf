package nodeagent

import (
	"context"
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Pauses of keepReady after failures: the first, doubled up to the last.
const (
	keepFirst = time.Second
	keepLast  = 5 * time.Minute
)

// keepReady makes a configured model Ready, and again whenever it is not.
func (a *Agent) keepReady(ctx context.Context, ref artifact.Ref) error {
	changed, unsubscribe := a.inside.Subscribe()
	defer unsubscribe()
	room := "model " + ref.String()
	pause := keepFirst
	for {
		status, known := a.puller.Status(ref)
		if known && status.State == weightcache.Ready {
			a.setProblem(room, "")
			pause = keepFirst
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			}
			continue
		}
		_, err := a.inside.Ensure(ctx, ref, weightcache.EnsureOptions{Reason: weightcache.ReasonConfigured})
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			continue
		}
		a.setProblem(room, ref.String()+" is not ready: "+err.Error())
		a.log.Error("model not ready, trying again later", slog.String("artifact", ref.String()),
			slog.Duration("pause", pause), slog.Any("error", err))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		pause = min(2*pause, keepLast)
	}
}

// publishViews gives every Ready artifact the directories that engines read,
// whoever asked for it, save those that their source restricts and no grant
// opens to every program of the node.
func (a *Agent) publishViews(ctx context.Context) error {
	changed, unsubscribe := a.inside.Subscribe()
	defer unsubscribe()
	again := time.NewTicker(time.Minute)
	defer again.Stop()
	for {
		failed := ""
		for _, s := range a.inside.Models() {
			want := 1 // a flat one, and for hub refs a hub cache
			if s.Ref.Scheme == artifact.SchemeHub {
				want = 2
			}
			if s.State != weightcache.Ready || s.ViewsWithheld || len(s.Views) >= want {
				continue
			}
			if err := a.inside.PublishViews(s.Ref); err != nil {
				failed = err.Error()
			}
		}
		if a.setProblem("views", failed) && failed != "" {
			a.log.Error("views not published, trying again later", slog.String("error", failed))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again.C:
		}
	}
}
