package engine

import (
	"context"
	"net/http"
)

// Work is what one request made an engine do. Options.Worked gets it twice:
// with Phase WorkBegun as the request arrives, and with WorkEnded before the
// last bytes of the answer leave, so that whoever has a whole answer finds its
// work told. An engine that dies owes the second.
type Work struct {
	Phase   string `json:"phase"`
	Request string `json:"request"` // the X-Request-Id header
	Path    string `json:"path"`
	Fault   string `json:"fault,omitempty"` // mode of the fault it got
	// Tokens: of the prompt, of these found in the cache, generated.
	Prompt     int `json:"prompt"`
	Cached     int `json:"cached"`
	Completion int `json:"completion"`
	// Finish is how it ended: WorkWhole, WorkAborted, WorkRefused.
	Finish string `json:"finish,omitempty"`
}

// Phases and ends of a Work.
const (
	WorkBegun   = "begun"
	WorkEnded   = "ended"
	WorkWhole   = "whole"   // the answer was made to its end
	WorkAborted = "aborted" // the client left or a fault ended it
	WorkRefused = "refused" // an error status, nothing generated
)

// task is the Work of a request under way. Its fields are written by the
// request's own goroutine.
type task struct {
	Work
	tell func(Work)
}

type taskKey struct{}

// watched runs a request and tells Options.Worked of it.
func (e *Engine) watched(w http.ResponseWriter, r *http.Request) {
	t := &task{tell: e.opts.Worked, Work: Work{Phase: WorkBegun, Request: r.Header.Get("X-Request-Id"), Path: r.URL.Path}}
	t.tell(t.Work)
	ended := false
	defer func() {
		if !ended || t.Prompt > 0 {
			t.end(WorkAborted) // unless the whole answer was told already
			return
		}
		t.end(WorkRefused)
	}()
	e.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), taskKey{}, t)))
	ended = true
}

func taskOf(ctx context.Context) *task {
	t, _ := ctx.Value(taskKey{}).(*task)
	return t
}

// end tells how the work ended, once; a nil task is one that nobody watches.
func (t *task) end(finish string) {
	if t == nil || t.Phase == WorkEnded {
		return
	}
	t.Phase, t.Finish = WorkEnded, finish
	t.tell(t.Work)
}

// whole tells that the answer is complete with the usage it will report.
func (t *task) whole(u usage) {
	if t != nil {
		t.Prompt, t.Cached, t.Completion = u.Prompt, u.Details["cached_tokens"], u.Completion
	}
	t.end(WorkWhole)
}

func (t *task) admitted(s *sequence) {
	if t != nil {
		t.Prompt += s.promptTokens()
		t.Cached += s.cached
	}
}

func (t *task) generated() {
	if t != nil {
		t.Completion++
	}
}
