package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// Outcomes of an exchange.
const (
	outcomeOK          = "ok"
	outcomeClientGone  = "client_gone"
	outcomeEngineError = "engine_error" // the engine answered, with an error
	outcomeEngineLost  = "engine_lost"  // the engine went away before or while answering
	outcomeTimeout     = "timeout"
)

// statusClientGone stands in records for a client that left before a status.
const statusClientGone = 499

// abandoned ends the exchange of a client that left before an answer began.
func (p *Proxy) abandoned(c *call) {
	c.Outcome, c.Status = outcomeClientGone, statusClientGone
	p.finish(c.Exchange)
}

// forward sends the request to an endpoint, once more to another where the
// first was lost before it could have answered, and relays the answer.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request, c *call) {
	p.budget.request()
	var avoid func(string) bool
	headers := r.Header
	failure := FailureNone // of the attempt before
	for {
		res, err := p.balancer.Acquire(&c.plan.req, avoid)
		if err != nil && avoid != nil && c.Retries > 0 && c.Reason == "reset" {
			// Nothing else can serve: the endpoint itself may have closed an idle
			// connection just as it was used.
			res, err = p.balancer.Acquire(&c.plan.req, nil)
		}
		if err != nil && c.Retries > 0 {
			p.unanswered(w, r, c, failure) // an endpoint had it: that is what went wrong
			return
		}
		if err != nil {
			p.refuse(w, r, c.Exchange, refusalFor(err, c.plan.req.Model))
			return
		}
		t := res.Target()
		c.Model, c.ServedModel, c.Pool = t.LogicalModel, t.ServedModel, t.Pool
		c.EndpointID, c.Accelerator = t.EndpointID, t.Accelerator
		c.Reason, c.PredictedCached = t.Reason, t.CachedTokens
		sent := p.options.Now()
		if c.Retries == 0 {
			c.Added = sent.Sub(c.Start)
		}
		resp, err := p.send(r, headers, c, t) //nolint:bodyclose // relay closes it
		if err == nil {
			p.relay(w, r, c, res, resp, sent)
			return
		}
		failure = classify(r.Context(), err)
		res.Done(Outcome{Failure: failure})
		if failure == FailureClientGone {
			p.abandoned(c)
			return
		}
		p.options.Log.LogAttrs(r.Context(), slogWarn, "attempt failed", requestAttr(c.ID), endpointAttr(t.EndpointID), errorAttr(err))
		retryable := failure == FailureDial || failure == FailureReset && resetBeforeByte(err)
		if !retryable || c.Retries > 0 || !p.budget.retry() {
			p.unanswered(w, r, c, failure)
			return
		}
		c.Retries++
		c.Reason = ""
		if failure == FailureReset {
			c.Reason = "reset"
		}
		failed := t.EndpointID
		avoid = func(id string) bool { return id == failed }
		headers = headers.Clone() // the lost attempt may still be reading its own
	}
}

// unanswered tells the client that no engine answered.
func (p *Proxy) unanswered(w http.ResponseWriter, r *http.Request, c *call, failure Failure) {
	e := &Refusal{
		Status: http.StatusBadGateway, Message: "The engine was lost before it answered.",
		Type: "server_error", Code: "engine_lost", Reason: "engine-lost", RetryAfter: 1,
	}
	c.Outcome = outcomeEngineLost
	switch failure {
	case FailureDial:
		e.Status, e.Message, e.Code, e.Reason = http.StatusServiceUnavailable, "The engine cannot be reached.", "engine_unreachable", "engine-unreachable"
	case FailureTimeout:
		e.Status, e.Message, e.Code, e.Reason = http.StatusGatewayTimeout, "The engine did not answer in time.", "engine_timeout", "engine-timeout"
		c.Outcome = outcomeTimeout
	}
	WriteRefusal(w, e)
	c.Status, c.Reason = e.Status, e.Reason
	p.finish(c.Exchange)
}

// send makes one attempt. The error is RoundTrip's own.
func (p *Proxy) send(r *http.Request, headers http.Header, c *call, t *Target) (*http.Response, error) {
	base, err := p.base(t.URL)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	c.conn = nil
	c.trace.GotConn = c.gotConn
	out := r.WithContext(httptrace.WithClientTrace(r.Context(), &c.trace))
	out.URL = &url.URL{Scheme: base.Scheme, Host: base.Host, Path: base.Path + r.URL.Path, RawQuery: r.URL.RawQuery}
	if r.URL.RawPath != "" {
		out.URL.RawPath = base.Path + r.URL.RawPath
	}
	if t.ForwardAuthorization && len(c.authorization) > 0 {
		headers["Authorization"] = c.authorization
	} else {
		delete(headers, "Authorization")
	}
	out.Header = headers
	out.Host, out.RequestURI, out.TLS = base.Host, "", nil
	out.TransferEncoding, out.Trailer, out.Close = nil, nil, false
	out.Body, out.ContentLength = http.NoBody, 0
	if pl := c.plan; pl.body != nil {
		var list []edit
		if pl.json {
			list, c.strip, c.cut = pl.facts.edits(pl.body.b, t.ServedModel, c.route.stream, t.ContinuousUsage)
		}
		out.Body, out.ContentLength = sendable(pl.body, list)
	}
	return p.options.Transport.RoundTrip(out)
}

// gotConn notes the connection an attempt uses.
func (c *call) gotConn(info httptrace.GotConnInfo) {
	conn := info.Conn
	if over, ok := conn.(interface{ NetConn() net.Conn }); ok { // TLS
		conn = over.NetConn()
	}
	c.conn, _ = conn.(*engineConn)
}

// classify says what an attempt's error means for the endpoint.
func classify(ctx context.Context, err error) Failure {
	if gone(ctx) {
		return FailureClientGone
	}
	var timeout interface{ Timeout() bool }
	if errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return FailureTimeout
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return FailureDial
	}
	return FailureReset
}

// resetBeforeByte says whether err is the transport's word for a connection
// that ended before a response byte, as against a broken response.
func resetBeforeByte(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		strings.Contains(err.Error(), "server closed idle connection")
}

// relay passes the answer on.
func (p *Proxy) relay(w http.ResponseWriter, r *http.Request, c *call, res Reservation, resp *http.Response, sent time.Time) {
	// No retry can follow, and the engine has the request: let go of it. An
	// early answer may leave the transport sending, so that holds its own share.
	p.drop(c)
	header := w.Header()
	copyResponseHeaders(header, resp.Header)
	header[ReasonHeader] = []string{c.Reason}
	c.Status = resp.StatusCode
	a := &answer{p: p, w: w, r: r, c: c, res: res, body: resp.Body, sent: sent, pending: true}
	if isEventStream(resp.Header) && r.Method != http.MethodHead {
		if c.strip || c.cut {
			delete(header, "Content-Length")
		}
		a.delimited = resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
		w.WriteHeader(resp.StatusCode)
		a.stream()
		return
	}
	w.WriteHeader(resp.StatusCode)
	a.copy(resp.ContentLength)
}

func isEventStream(h http.Header) bool {
	kinds := h["Content-Type"]
	return len(kinds) > 0 && strings.HasPrefix(kinds[0], "text/event-stream")
}
