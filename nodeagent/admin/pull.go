package admin

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"reflect"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	// progressEvery is the least time between two lines of a pull's answer.
	progressEvery = 100 * time.Millisecond
	// progressLook is how often bytes that landed are looked for: the store
	// signals changes of state, not every segment.
	progressLook = 500 * time.Millisecond
	// progressIdle is the most, so that a caller can tell a slow pull from a dead agent.
	progressIdle = 5 * time.Second
	// lineTimeout bounds the writing of one line to a caller that does not read.
	lineTimeout = 30 * time.Second
)

// pull answers with one line per change of the model until it is Ready or the
// pull failed.
func (a *api) pull(w http.ResponseWriter, r *http.Request) {
	var request PullRequest
	if err := readBody(r, &request); err != nil {
		fail(w, errorOf(err))
		return
	}
	ref, err := artifact.ParseRef(request.Ref)
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	ctx := r.Context()
	changed, unsubscribe := a.opts.Weights.Subscribe()
	defer unsubscribe()
	ended := make(chan error, 1)
	go func() {
		_, err := a.opts.Weights.Ensure(ctx, ref, weightcache.EnsureOptions{Refresh: request.Refresh, Reason: weightcache.ReasonPull})
		ended <- err
	}()

	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Hearth-API", Version)
	line := &lineWriter{w: w, control: http.NewResponseController(w)}
	idle := time.NewTicker(progressIdle)
	defer idle.Stop()
	look := time.NewTicker(progressLook)
	defer look.Stop()
	var last Model
	show := func() {
		model, _ := a.model(ref)
		if reflect.DeepEqual(model, last) {
			return
		}
		last = model
		line.write(Progress{Model: &model})
		idle.Reset(progressIdle)
	}
	for {
		select {
		case err := <-ended:
			model, _ := a.model(ref)
			p := Progress{Model: &model, Done: true}
			if err != nil {
				p.Error = errorOf(err)
			}
			line.write(p)
			return
		case <-ctx.Done():
			a.opts.Log.Debug("caller of a pull left", slog.String("artifact", ref.String()), slog.Any("error", <-ended))
			return
		case <-look.C:
			show()
		case <-changed:
			show()
			// Changes of the next moment merge into one line.
			select {
			case err := <-ended:
				ended <- err
			case <-ctx.Done():
			case <-time.After(progressEvery):
			}
		case <-idle.C:
			model, _ := a.model(ref)
			line.write(Progress{Model: &model})
		}
	}
}

type lineWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

// write sends one line at once. A caller that went away ends the request's
// context, so its errors tell nothing more.
func (l *lineWriter) write(p Progress) {
	data, err := json.Marshal(p)
	if err != nil {
		return
	}
	_ = l.control.SetWriteDeadline(time.Now().Add(lineTimeout))
	_, _ = l.w.Write(append(data, '\n'))
	_ = l.control.Flush()
}
