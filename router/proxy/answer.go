package proxy

import (
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

const slogWarn = slog.LevelWarn

func requestAttr(id string) slog.Attr  { return slog.String("request", id) }
func endpointAttr(id string) slog.Attr { return slog.String("endpoint", id) }
func errorAttr(err error) slog.Attr    { return slog.Any("error", err) }

// answer relays one response.
type answer struct {
	p         *Proxy
	w         http.ResponseWriter
	r         *http.Request
	c         *call
	res       Reservation
	body      io.ReadCloser
	sent      time.Time
	delimited bool // the response says itself where it ends

	// A read that is about to wait flushes w. It does so in the goroutine that
	// reads; only at a body's very end may the transport's own goroutine, which
	// reads on, come upon the same hook, hence the lock.
	mu      sync.Mutex
	reading bool   // the handler is in Read and not using w; guarded by mu
	pending bool   // w holds bytes the client has not got; guarded by mu
	out     []byte // bytes for w, gathered until a read waits; guarded by mu
	lost    bool   // a write to w failed; guarded by mu

	scan sseScanner
}

// hook makes reads flush before they wait; unhook ends that, after which w is
// not touched from elsewhere. Without a connection of ours every read flushes.
func (a *answer) hook() {
	if a.c.conn != nil {
		a.c.conn.waiting.Store(a)
	}
}

func (a *answer) unhook() {
	if a.c.conn != nil {
		// The connection may already serve another answer, with its own hook.
		a.c.conn.waiting.CompareAndSwap(a, nil)
	}
	a.mu.Lock()
	a.reading = false
	a.mu.Unlock()
}

// read reads the engine's answer.
func (a *answer) read(p []byte) (int, error) {
	a.mu.Lock()
	a.reading = true
	if a.c.conn == nil {
		a.flushLocked()
	}
	a.mu.Unlock()
	n, err := a.body.Read(p)
	a.mu.Lock()
	a.reading = false
	a.mu.Unlock()
	return n, err
}

// beforeWait is called by the connection.
func (a *answer) beforeWait() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.reading {
		a.flushLocked()
	}
}

func (a *answer) flushLocked() {
	a.drainLocked()
	if !a.pending {
		return
	}
	a.pending = false
	if f, ok := a.w.(http.Flusher); ok {
		f.Flush()
	}
}

// copy relays a response that is not an event stream, unchanged.
func (a *answer) copy(length int64) {
	defer a.body.Close()
	if length < 0 {
		a.hook()
		defer a.unhook()
	} else {
		a.pending = false // whole at once: nothing to flush early
	}
	a.res.FirstByte()
	ttft := a.p.options.Now().Sub(a.sent)
	size := 32 << 10
	if length >= 0 && length < 4<<10 {
		size = 4 << 10
	}
	buf := getBuffer(size)
	defer putBuffer(buf)
	buf = buf[:cap(buf)]
	look := bodyScan{wantID: a.c.route.responses}
	metered := a.c.route.metered && a.c.Status < 300
	total := 0
	for {
		n, err := a.read(buf)
		if n > 0 {
			a.mu.Lock()
			a.pending = true
			a.mu.Unlock()
			total += n
			if metered {
				look.feed(buf[:n])
			}
			if _, werr := a.w.Write(buf[:n]); werr != nil {
				a.end(outcomeClientGone, FailureClientGone, look.usage, ttft, total/4)
				return
			}
		}
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			break
		}
		if err != nil {
			a.broken(err, look.usage, ttft, total/4)
		}
	}
	a.remember(look.id)
	outcome, failure := verdict(a.c.Status, false)
	a.end(outcome, failure, look.usage, ttft, total/4)
}

// verdict says what a whole answer means for the record and for the endpoint.
func verdict(status int, failed bool) (string, Failure) {
	switch {
	case status >= 500:
		return outcomeEngineError, FailureServer
	case status >= 400:
		return outcomeEngineError, FailureClient
	case failed:
		return outcomeEngineError, FailureNone
	}
	return outcomeOK, FailureNone
}

// stream relays an event stream, scanning it and flushing as it comes.
func (a *answer) stream() {
	defer a.body.Close()
	a.hook()
	defer a.unhook()
	a.scan.stripUsage, a.scan.cutUsage, a.scan.wantID = a.c.strip, a.c.cut, a.c.route.responses
	buf := getBuffer(4 << 10)
	defer putBuffer(buf)
	buf = buf[:cap(buf)]
	var ttft time.Duration
	for {
		n, err := a.read(buf)
		var head, body []byte
		if n > 0 {
			head, body = a.scan.feed(buf[:n])
			if ttft == 0 && a.scan.content > 0 {
				ttft = a.p.options.Now().Sub(a.sent)
				a.res.FirstByte()
			}
		}
		if !a.write(head, body) {
			a.end(outcomeClientGone, FailureClientGone, a.scan.usage, ttft, a.scan.content)
			return
		}
		if err == nil {
			continue
		}
		if err == io.EOF && (a.delimited || a.scan.done) { //nolint:errorlint // only a bare EOF is a clean end
			break
		}
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			err = io.ErrUnexpectedEOF
		}
		a.broken(err, a.scan.usage, ttft, a.scan.content)
	}
	if !a.write(a.scan.finish(), nil) || !a.drain() {
		a.end(outcomeClientGone, FailureClientGone, a.scan.usage, ttft, a.scan.content)
		return
	}
	a.remember(a.scan.id)
	outcome, failure := verdict(a.c.Status, a.scan.failed)
	a.end(outcome, failure, a.scan.usage, ttft, a.scan.content)
}

// gatherBytes is how much is gathered before it is written all the same.
const gatherBytes = 16 << 10

// write takes both pieces for w; false if the client is gone. They leave when
// a read waits, when the answer ends, or with gatherBytes.
func (a *answer) write(head, body []byte) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(head) + len(body); n > 0 {
		a.pending = true
		if a.out == nil {
			// A full read of the transport's 4 KiB mostly has more behind it.
			size := 4 << 10
			if n > size/2 {
				size = 32 << 10
			}
			a.out = getBuffer(size)
		}
		a.out = append(append(a.out, head...), body...)
		if len(a.out) >= gatherBytes {
			a.drainLocked()
		}
	}
	return !a.lost
}

// drain writes what is gathered, at the end of an answer.
func (a *answer) drain() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drainLocked()
	return !a.lost
}

func (a *answer) drainLocked() {
	if len(a.out) == 0 {
		return
	}
	if _, err := a.w.Write(a.out); err != nil {
		a.lost = true
	}
	putBuffer(a.out)
	a.out = nil
}

// broken ends an answer whose engine was lost: an error event for a stream,
// and in any case an end that no client can take for success. It does not return.
func (a *answer) broken(err error, u usage, ttft time.Duration, counted int) {
	if gone(a.r.Context()) {
		a.end(outcomeClientGone, FailureClientGone, u, ttft, counted)
		panic(http.ErrAbortHandler)
	}
	a.p.options.Log.LogAttrs(a.r.Context(), slogWarn, "answer broke off",
		requestAttr(a.c.ID), endpointAttr(a.c.EndpointID), errorAttr(err))
	if isEventStream(a.w.Header()) {
		var gap []byte
		if a.scan.midEvent {
			gap = []byte("\n")
		}
		a.write(gap, errorFrame("The engine was lost while it answered.", "engine_lost"))
		a.mu.Lock()
		a.flushLocked()
		a.mu.Unlock()
	}
	a.end(outcomeEngineLost, FailureMidStream, u, ttft, counted)
	panic(http.ErrAbortHandler)
}

// remember notes which endpoint holds a stored response.
func (a *answer) remember(id string) {
	if id != "" && a.c.Status < 300 {
		a.p.balancer.Remember(id, a.c.EndpointID)
	}
}

// end releases the reservation and closes the exchange. counted stands in for
// the completion tokens where the engine reported none.
func (a *answer) end(outcome string, failure Failure, u usage, ttft time.Duration, counted int) {
	c := a.c
	c.Outcome, c.TTFT = outcome, ttft
	c.PromptTokens, c.CachedTokens, c.CompletionTokens, c.CachedKnown = u.prompt, u.cached, u.completion, u.cachedKnown
	if !u.known && c.route.metered && c.Status < 300 {
		c.Estimated = true
		c.PromptTokens, c.CompletionTokens = c.prompt, counted
		if c.Path == "/v1/embeddings" {
			c.CompletionTokens = 0
		}
	}
	a.res.Done(Outcome{
		Failure: failure, PromptTokens: u.prompt, CachedTokens: u.cached, UsageKnown: u.known,
		CompletionTokens: u.completion, TTFT: ttft,
	})
	a.p.finish(c.Exchange)
}
