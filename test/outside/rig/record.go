package rig

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"time"
)

// Exchange is one request as a Recorder saw it.
type Exchange struct {
	Method, Path, Query, Range, Agent string    // Path is escaped, as it was sent
	Status                            int       // 0 where no answer came
	Bytes                             int64     // of the body that was passed on
	Cut                               bool      // the body broke off
	Code                              string    // X-Error-Code
	Began, First, Ended               time.Time // First: of the body's first byte
}

// Recorder stands between a client and a server, passes everything on as it
// comes and keeps what it saw. Where the server cannot be reached it drops the
// client's connection: it answers nothing of its own.
type Recorder struct {
	URL string // http://127.0.0.1:port

	mu     sync.Mutex
	seen   []*Exchange
	paused chan struct{} // closed when requests go on; nil while they do
}

// maxExchanges bounds what a Recorder keeps; what comes later is passed on
// unseen and fails whoever counts.
const maxExchanges = 100_000

// Record starts a Recorder in front of a base URL. It ends with Close.
func (r *Rig) Record(ctx context.Context, target string) (*Recorder, error) {
	to, err := url.Parse(target)
	if err != nil {
		return nil, fmt.Errorf("record %s: %w", target, err)
	}
	rec := &Recorder{}
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}
	r.OnClose(transport.CloseIdleConnections)
	proxy := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1,
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.SetURL(to)
			pr.Out.Host = pr.In.Host // addresses in answers lead back here
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:     slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	rec.URL, err = r.Serve(ctx, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		x := rec.begin(req)
		watched := &watchedWriter{ResponseWriter: w, rec: rec, x: x}
		defer func() {
			rec.change(func() { x.Ended = time.Now() })
			if broken := recover(); broken != nil {
				rec.change(func() { x.Cut = true })
				panic(broken) // ends the connection, as the server did
			}
		}()
		if rec.wait(req.Context()) {
			proxy.ServeHTTP(watched, req)
		}
	}))
	return rec, err
}

func (rec *Recorder) begin(req *http.Request) *Exchange {
	x := &Exchange{
		Method: req.Method, Path: req.URL.EscapedPath(), Query: req.URL.RawQuery,
		Range: req.Header.Get("Range"), Agent: req.UserAgent(), Began: time.Now(),
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if len(rec.seen) < maxExchanges {
		rec.seen = append(rec.seen, x)
	}
	return x
}

// Pause lets requests that come from now on wait until resume is called: the
// server may be restarted meanwhile, however long that takes.
func (rec *Recorder) Pause() (resume func()) {
	paused := make(chan struct{})
	rec.change(func() { rec.paused = paused })
	return sync.OnceFunc(func() {
		rec.change(func() { rec.paused = nil })
		close(paused)
	})
}

// wait waits while requests are paused; false means that the client left.
func (rec *Recorder) wait(ctx context.Context) bool {
	rec.mu.Lock()
	paused := rec.paused
	rec.mu.Unlock()
	if paused == nil {
		return true
	}
	select {
	case <-paused:
		return true
	case <-ctx.Done():
		return false
	}
}

func (rec *Recorder) change(f func()) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	f()
}

// Exchanges gives what was seen since the start or the last call of Take, in the
// order in which requests came.
func (rec *Recorder) Exchanges() []Exchange {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	out := make([]Exchange, 0, len(rec.seen))
	for _, x := range rec.seen {
		out = append(out, *x)
	}
	return out
}

// Take gives what Exchanges gives and forgets it.
func (rec *Recorder) Take() []Exchange {
	out := rec.Exchanges()
	rec.change(func() { rec.seen = slices.Delete(rec.seen, 0, len(rec.seen)) })
	return out
}

// watchedWriter notes an answer as it passes.
type watchedWriter struct {
	http.ResponseWriter
	rec *Recorder
	x   *Exchange
}

// Unwrap gives http.ResponseController the writer below.
func (w *watchedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader notes the status.
func (w *watchedWriter) WriteHeader(status int) {
	if status >= http.StatusOK {
		w.rec.change(func() { w.x.Status, w.x.Code = status, w.Header().Get("X-Error-Code") })
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write counts the body.
func (w *watchedWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.rec.change(func() {
		if w.x.Bytes == 0 && n > 0 {
			w.x.First = time.Now()
		}
		w.x.Bytes += int64(n)
	})
	return n, err
}
