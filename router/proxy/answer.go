package proxy

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

const slogWarn = slog.LevelWarn

func requestAttr(id string) slog.Attr  { return slog.String("request", id) }
func endpointAttr(id string) slog.Attr { return slog.String("endpoint", id) }
func errorAttr(err error) slog.Attr    { return slog.Any("error", err) }

// answer relays one response.
type answer struct {
	p    *Proxy
	w    http.ResponseWriter
	r    *http.Request
	c    *call
	res  Reservation
	resp *wire.Response
	sent time.Time

	mu      sync.Mutex // of a stream: a probe may write too; guards what follows
	pending bool       // w holds bytes the client has not got
	within  int        // how many bytes w holds of its own buffer, at most
	out     []byte     // bytes for w, gathered until a read waits
	lost    bool       // a write to w failed

	scan sseScanner
}

var errClientLost = errors.New("write to client failed")

// BeforeWait implements wire.Waiter: the client gets what there is before the
// next read waits for the engine, never while more bytes are there to be had.
func (a *answer) BeforeWait() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.drain() {
		return errClientLost
	}
	if a.pending {
		a.pending, a.within = false, 0
		if f, ok := a.w.(http.Flusher); ok {
			a.arm()
			f.Flush()
			a.disarm()
		}
	}
	return nil
}

// copy relays a response that is not an event stream, unchanged.
func (a *answer) copy(length int64) {
	if length < 0 {
		a.resp.SetWaiter(a) // else whole at once: nothing to flush early
	}
	a.res.FirstByte()
	ttft := a.p.options.Now().Sub(a.sent)
	look := bodyScan{wantID: a.c.route.responses}
	metered := a.c.route.metered && a.c.Status < 300
	total := 0
	// A short answer is had whole before its head leaves, so that one which
	// breaks off can still be a status.
	var early []byte
	short := length > 0 && length <= gatherBytes && a.r.Method != http.MethodHead
	if !short {
		a.w.WriteHeader(a.c.Status)
	}
	for {
		piece, err := a.resp.Next()
		if len(piece) > 0 {
			total += len(piece)
			if metered {
				look.feed(piece)
			}
			if short && (early != nil || int64(total) < length) {
				early = append(early, piece...)
				piece = early
			}
		}
		if len(piece) > 0 && (!short || int64(total) >= length) {
			if short {
				a.w.WriteHeader(a.c.Status)
			}
			a.pending = true
			a.arm()
			_, werr := a.w.Write(piece)
			a.disarm()
			if werr != nil {
				a.end(outcomeGone(a.r.Context()), FailureClientGone, look.usage, ttft, 0)
				return
			}
		}
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			break
		}
		if err != nil && short && int64(total) < length {
			a.unbegun(err)
			return
		}
		if err != nil {
			a.broken(err, look.usage, ttft, 0)
		}
	}
	if short && int64(total) < length { // a status that has no body, whatever its head says
		a.w.WriteHeader(a.c.Status)
	}
	a.remember(look.id)
	outcome, failure := verdict(a.c.Status, false)
	a.end(outcome, failure, look.usage, ttft, total/4)
}

// unbegun ends an answer of which the client has nothing yet.
func (a *answer) unbegun(err error) {
	header := a.w.Header()
	for name := range header {
		if name != "X-Request-Id" && name != "Connection" { // the router's own
			delete(header, name)
		}
	}
	failure := classify(a.r.Context(), err)
	a.res.Done(Outcome{Failure: failure})
	if failure == FailureClientGone {
		a.p.abandoned(a.w, a.r, a.c)
		return
	}
	a.p.options.Log.LogAttrs(a.r.Context(), slogWarn, "answer broke off",
		requestAttr(a.c.ID), endpointAttr(a.c.EndpointID), errorAttr(err))
	a.p.unanswered(a.w, a.r, a.c, failure)
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
	a.resp.SetWaiter(a)
	if c := clientOf(a.r.Context()); c != nil && a.w.Header()["Content-Length"] == nil {
		c.setProbe(a.comment)
		defer c.setProbe(nil)
	}
	a.scan.stripUsage, a.scan.cutUsage, a.scan.wantID = a.c.strip, a.c.cut, a.c.route.responses
	var ttft time.Duration
	for {
		piece, err := a.resp.Next()
		a.mu.Lock()
		var head, body []byte
		if len(piece) > 0 {
			head, body = a.scan.feed(piece)
			if ttft == 0 && a.scan.content > 0 {
				ttft = a.p.options.Now().Sub(a.sent)
				a.res.FirstByte()
			}
		}
		last := false
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			var tail []byte
			if tail, last = a.ending(); last {
				a.through(head, body, tail)
			}
		}
		if !last {
			a.gather(head, body)
		}
		if err != nil && err != io.EOF && a.scan.done && !a.scan.midEvent && a.r.Context().Err() == nil { //nolint:errorlint // only a bare EOF is a clean end
			// The stream has told its end, and only the framing lacks its own: the
			// client has all there is, and an error behind it would unsay that.
			last = true
			a.drain()
		}
		lost := a.lost
		a.mu.Unlock()
		if lost {
			a.end(outcomeGone(a.r.Context()), FailureClientGone, a.scan.usage, ttft, a.scan.content)
			return
		}
		if last {
			break
		}
		if err == nil {
			continue
		}
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			err = io.ErrUnexpectedEOF
		}
		a.broken(err, a.scan.usage, ttft, a.scan.content)
	}
	a.remember(a.scan.id)
	outcome, failure := verdict(a.c.Status, a.scan.failed)
	a.end(outcome, failure, a.scan.usage, ttft, a.scan.content)
}

// ending looks at a stream that the engine ended: the line that had no end of
// its own, and whether all is there. An engine's framing alone is no proof: one
// that fails within may end its answer as if it were complete, so the events
// must say that they end. Streams of other routes, and lines that are not
// read, have no such word.
func (a *answer) ending() (tail []byte, whole bool) {
	content, midEvent := a.scan.content, a.scan.midEvent
	tail = a.scan.finish()
	whole = a.resp.Delimited() || a.scan.done
	if (a.c.route.stream || a.c.route.responses) && a.c.Status < 300 && !a.scan.unread {
		whole = whole && a.scan.ended()
	}
	if !whole { // the client does not get the tail
		a.scan.content, a.scan.midEvent = content, midEvent
	}
	return tail, whole
}

// gatherBytes is how much is gathered before it is written all the same.
const gatherBytes = 16 << 10

// serverBytes is what net/http's server keeps of writes before it sends them
// as a chunk: pieces that fit need no gathering of ours.
const serverBytes = 2 << 10

// gather takes both pieces for w. They leave when a read waits, when the
// answer ends, or with gatherBytes.
func (a *answer) gather(head, body []byte) {
	n := len(head) + len(body)
	if n == 0 {
		return
	}
	a.pending = true
	if n >= gatherBytes {
		a.through(head, body) // large enough to go as it is
		return
	}
	if a.out == nil {
		if a.within += n; a.within <= serverBytes {
			a.put(head)
			a.put(body)
			return
		}
		// A large piece mostly has more behind it.
		a.out = getBuffer(gatherBytes)
	}
	a.out = append(append(a.out, head...), body...)
	if len(a.out) >= gatherBytes {
		a.drain()
	}
}

// put writes p to w.
func (a *answer) put(p []byte) {
	if len(p) == 0 || a.lost {
		return
	}
	a.arm()
	if _, err := a.w.Write(p); err != nil {
		a.lost = true
	}
	a.disarm()
}

// arm bounds the writes until disarm, for HTTP/2: flow control stalls a stream
// while its connection lives, so the kernel, which ends HTTP/1 connections that
// stall, sees nothing of it.
func (a *answer) arm() {
	if a.r.ProtoMajor == 2 {
		_ = http.NewResponseController(a.w).SetWriteDeadline(time.Now().Add(a.p.options.StalledWrite))
	}
}

func (a *answer) disarm() {
	if a.r.ProtoMajor == 2 {
		_ = http.NewResponseController(a.w).SetWriteDeadline(time.Time{})
	}
}

// comment sends a client that may be gone a line that means nothing, where
// the stream is between two events.
func (a *answer) comment() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lost || a.scan.done || a.scan.midEvent || a.scan.through || a.out != nil {
		return // more is on its way, or will be
	}
	a.put(streamComment)
	if f, ok := a.w.(http.Flusher); ok {
		f.Flush()
	}
}

var streamComment = []byte(":\n\n")

// through writes what is gathered and then the pieces, without a copy of ours.
func (a *answer) through(pieces ...[]byte) {
	a.drain()
	for _, p := range pieces {
		a.put(p)
	}
}

// drain writes what is gathered; false if the client is gone.
func (a *answer) drain() bool {
	if len(a.out) > 0 {
		a.put(a.out)
		putBuffer(a.out)
		a.out = nil
	}
	return !a.lost
}

// broken ends an answer that the engine did not: an error event for a stream
// whose client is there, and in any case an end that no client can take for
// success. It does not return.
func (a *answer) broken(err error, u usage, ttft time.Duration, counted int) {
	switch ctx := a.r.Context(); {
	case wasCut(ctx):
		a.lastEvent(cutMessage, "router_stopped")
		a.end(outcomeCut, FailureClientGone, u, ttft, counted)
	case gone(ctx):
		a.end(outcomeClientGone, FailureClientGone, u, ttft, counted)
	default:
		a.p.options.Log.LogAttrs(ctx, slogWarn, "answer broke off",
			requestAttr(a.c.ID), endpointAttr(a.c.EndpointID), errorAttr(err))
		a.lastEvent("The engine was lost while it answered.", "engine_lost")
		a.end(outcomeEngineLost, FailureMidStream, u, ttft, counted)
	}
	panic(http.ErrAbortHandler)
}

// lastEvent tells the client of a stream why it breaks off.
func (a *answer) lastEvent(message, code string) {
	if !isEventStream(a.w.Header()) {
		return
	}
	var gap []byte
	if a.scan.midEvent {
		gap = []byte("\n")
	}
	a.mu.Lock()
	a.gather(gap, errorFrame(message, code))
	a.mu.Unlock()
	_ = a.BeforeWait() // the answer ends uncleanly in any case
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
	a.arm() // what the server still holds is written behind the handler
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
