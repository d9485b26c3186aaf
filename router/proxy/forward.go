package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// Outcomes of an exchange.
const (
	outcomeOK          = "ok"
	outcomeClientGone  = "client_gone"
	outcomeEngineError = "engine_error" // the engine answered, with an error
	outcomeEngineLost  = "engine_lost"  // the engine went away before or while answering
	outcomeTimeout     = "timeout"
	outcomeCut         = "cut" // the router ended it, with ErrCut
)

// statusClientGone stands in records for a client that left before a status.
const statusClientGone = 499

// ErrCut is the cause with which a server that stops ends the contexts of the
// requests it still has. Their clients are told, as far as they can be.
var ErrCut = errors.New("the router cuts what outlasts its drain time")

const cutMessage = "The router stopped before the answer was whole."

func wasCut(ctx context.Context) bool { return errors.Is(context.Cause(ctx), ErrCut) }

// outcomeGone is the outcome of a request whose context has ended, or whose
// client takes no more bytes.
func outcomeGone(ctx context.Context) string {
	if wasCut(ctx) {
		return outcomeCut
	}
	return outcomeClientGone
}

// abandoned ends the exchange of a request whose context ended before an answer
// began. A client that is gone for all the router knows gets no answer: an
// empty one would look like success. It does not return then.
func (p *Proxy) abandoned(w http.ResponseWriter, r *http.Request, c *call) {
	c.Outcome, c.Status = outcomeGone(r.Context()), statusClientGone
	if c.Outcome == outcomeCut {
		e := &Refusal{
			Status: http.StatusServiceUnavailable, Message: cutMessage,
			Type: "server_error", Code: "router_stopped", Reason: "cut", RetryAfter: 1,
		}
		WriteRefusal(w, e)
		c.Status, c.Reason = e.Status, e.Reason
		p.finish(c.Exchange)
		return
	}
	p.finish(c.Exchange)
	panic(http.ErrAbortHandler)
}

// forward sends the request to an endpoint, once more to another where the
// first was lost before it had begun to answer, and relays the answer.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request, c *call) {
	p.budget.request()
	var avoid func(string) bool
	failure, unbegun := FailureNone, false // of the attempt before
	for {
		res, err := p.balancer.Acquire(&c.plan.req, avoid)
		if err != nil && avoid != nil && failure == FailureReset && !unbegun {
			// Nothing else can serve: the endpoint itself may have closed an idle
			// connection just as it was used.
			res, err = p.balancer.Acquire(&c.plan.req, nil)
		}
		if err != nil && c.Retries > 0 {
			c.Retries--                    // there was no second attempt
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
		resp, err := p.send(r, c, t)
		unbegun = false
		if err == nil && c.route.metered && resp.Status < 300 && isEvents(resp.Get("Content-Type")) {
			// Engines send the head of a stream at once, also where the request then
			// waits its turn (vLLM): it is no answer yet.
			if err = resp.Await(); err != nil {
				unbegun = true
				resp.Close()
			}
		}
		if err == nil {
			p.relay(w, r, c, res, resp, sent)
			return
		}
		failure = classify(r.Context(), err)
		res.Done(Outcome{Failure: failure})
		if failure == FailureClientGone {
			p.abandoned(w, r, c)
			return
		}
		p.options.Log.LogAttrs(r.Context(), slogWarn, "attempt failed", requestAttr(c.ID), endpointAttr(t.EndpointID), errorAttr(err))
		retryable := failure == FailureDial || failure == FailureReset && (unbegun || resetBeforeByte(err))
		held := failure == FailureReset && retryable && p.budget.heldAtLoss(t.EndpointID, sent)
		if !retryable || c.Retries > 0 || !held && !p.budget.retry() {
			p.unanswered(w, r, c, failure)
			return
		}
		c.Retries++
		failed := t.EndpointID
		avoid = func(id string) bool { return id == failed }
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

// send makes one attempt. The error is the transport's own.
func (p *Proxy) send(r *http.Request, c *call, t *Target) (*wire.Response, error) {
	to, err := p.base(t.URL)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	if t.ForwardAuthorization && len(c.authorization) > 0 {
		r.Header["Authorization"] = c.authorization
	} else {
		delete(r.Header, "Authorization")
	}
	out := wire.Request{
		Method: r.Method, Secure: to.secure, Address: to.address, Host: to.host,
		Target: target(to.path, r.URL), Header: r.Header,
	}
	if pl := c.plan; pl.body != nil {
		var list []edit
		if pl.json {
			list, c.strip, c.cut = pl.facts.edits(pl.body.b, t.ServedModel, !c.route.anyMethod, c.route.stream, t.ContinuousUsage)
		}
		pl.pieces = splice(pl.pieces[:0], pl.body.b, list)
		out.Body, out.Keeper = pl.pieces, pl.body
	}
	return p.options.Transport.Do(r.Context(), &out)
}

// target is the path and query an engine is asked for.
func target(base string, u *url.URL) string {
	path := u.EscapedPath()
	if base != "" {
		path = base + path
	}
	if u.RawQuery != "" || u.ForceQuery {
		return path + "?" + u.RawQuery
	}
	return path
}

// base is a parsed engine URL.
type base struct {
	secure              bool
	address, host, path string
}

// maxBases bounds the parsed engine URLs that are kept; past it they are
// parsed anew until the map has been emptied.
const maxBases = 8192

func (p *Proxy) base(text string) (*base, error) {
	if b, ok := p.bases.Load(text); ok {
		return b.(*base), nil
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, err
	}
	if u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("parse engine URL %q: want http://HOST:PORT or https://HOST:PORT", text)
	}
	b := &base{secure: u.Scheme == "https", address: u.Host, host: u.Host, path: strings.TrimSuffix(u.EscapedPath(), "/")}
	if u.Port() == "" {
		port := "80"
		if b.secure {
			port = "443"
		}
		b.address = net.JoinHostPort(u.Hostname(), port)
	}
	if p.baseSize.Add(1) > maxBases {
		p.bases.Clear()
		p.baseSize.Store(1)
	}
	p.bases.Store(text, b)
	return b, nil
}

// classify says what an attempt's error means for the endpoint.
func classify(ctx context.Context, err error) Failure {
	if gone(ctx) {
		return FailureClientGone
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return FailureDial // in time or not: nothing was sent
	}
	var timeout interface{ Timeout() bool }
	if errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return FailureTimeout
	}
	return FailureReset
}

// resetBeforeByte says whether err is the transport's word for a connection
// that ended before a response byte, as against a broken response.
func resetBeforeByte(err error) bool {
	var lost *wire.LostError
	return errors.As(err, &lost) && lost.BeforeByte
}

// relay passes the answer on.
func (p *Proxy) relay(w http.ResponseWriter, r *http.Request, c *call, res Reservation, resp *wire.Response, sent time.Time) {
	// No retry can follow, and the engine has the request: let go of it. An
	// early answer may leave the transport sending, so that holds its own share.
	p.drop(c)
	header := w.Header()
	copyResponseHeaders(header, resp.Fields)
	header[ReasonHeader] = []string{c.Reason}
	c.Status = resp.Status
	a := &answer{p: p, w: w, r: r, c: c, res: res, resp: resp, sent: sent, pending: true}
	defer resp.Close()
	if isEventStream(header) && r.Method != http.MethodHead {
		if c.strip || c.cut {
			delete(header, "Content-Length")
		}
		w.WriteHeader(resp.Status)
		a.stream()
		return
	}
	a.copy(resp.Length)
}

func isEventStream(h http.Header) bool {
	kinds := h["Content-Type"]
	return len(kinds) > 0 && isEvents(kinds[0])
}

func isEvents(kind string) bool { return strings.HasPrefix(kind, "text/event-stream") }
