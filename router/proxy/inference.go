package proxy

import (
	"errors"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// plan is what a request needs until its answer begins: the body, what the
// scan found and the prefix keys. It goes back to its pool as soon as no retry
// can follow, so that a long stream does not hold it.
type plan struct {
	facts  facts
	walk   walker
	req    pick.Request
	body   *bodyBuffer // nil for requests without a body
	pieces [][]byte    // body as it is sent, with splices
	json   bool        // body is a JSON object: splices apply
	weight int64       // bytes counted against MaxBufferedBytes
}

var plans = sync.Pool{New: func() any { return new(plan) }}

// drop gives everything back. It may be called twice.
func (p *Proxy) drop(c *call) {
	pl := c.plan
	if pl == nil {
		return
	}
	c.plan = nil
	if pl.body != nil {
		pl.body.Release()
		clear(pl.pieces)
	}
	p.buffered.Add(-pl.weight)
	keys := pl.walk.keys
	if cap(keys) > 2048 {
		keys = nil
	}
	if cap(pl.facts.long) > 512 {
		pl.facts.long = nil
	}
	pl.walk.long = nil
	pl.walk.keys, pl.req, pl.body, pl.json, pl.weight = keys, pick.Request{}, nil, false, 0
	plans.Put(pl)
}

// call is one request on its way.
type call struct {
	*Exchange
	route         route
	plan          *plan
	prompt        int // estimated prompt tokens
	authorization []string
	strip, cut    bool // what the stream scanner must take out again
}

// inference handles every path whose request goes to an engine by model.
func (p *Proxy) inference(w http.ResponseWriter, r *http.Request, rt route) {
	if !rt.anyMethod && !p.allow(w, r, rt.path, http.MethodPost) {
		return
	}
	c := &call{Exchange: p.begin(w, r, rt.path), route: rt}
	pl, _ := plans.Get().(*plan)
	c.plan = pl
	defer p.drop(c)
	if refusal := p.prepare(w, r, c); refusal != nil {
		// The server takes a read past its deadline for a client that left.
		if gone(r.Context()) && refusal.Status != http.StatusRequestTimeout {
			if !wasCut(r.Context()) {
				WriteRefusal(w, refusal) // it may still read, having closed its sending side too early
				c.Outcome, c.Status = outcomeClientGone, statusClientGone
				p.finish(c.Exchange)
				return
			}
			p.abandoned(w, r, c)
			return
		}
		p.drop(c) // what lingers holds nothing
		p.refuse(w, r, c.Exchange, refusal)
		return
	}
	p.forward(w, r, c)
}

// prepare reads and scans the body and fills the pick request.
func (p *Proxy) prepare(w http.ResponseWriter, r *http.Request, c *call) *Refusal {
	pl := c.plan
	if refusal := p.takeBody(w, r, c); refusal != nil {
		return refusal
	}
	pl.req.ID, pl.req.Tie = c.ID, rand.Uint64()
	if pl.body != nil && len(pl.body.b) > 0 && (!c.route.anyMethod || looksJSON(r.Header)) {
		body := pl.body.b
		if err := scan(body, &pl.facts); err != nil {
			return refusalFor(err, "")
		}
		pl.json = true
		pl.walk.run(body, &pl.facts)
		fill(&pl.req, body, &pl.facts, &pl.walk)
		c.Stream = pl.facts.stream
		if id := text(body, pl.facts.previousResponse); id != "" && c.route.responses {
			holder, ok := p.balancer.Holder(id)
			if !ok {
				return unknownResponse(id, "previous_response_id")
			}
			pl.req.Pin = holder
		}
	} else if !c.route.anyMethod {
		return refusalFor(scan(nil, &pl.facts), "")
	}
	c.prompt = pl.req.PromptTokens
	if pl.req.Model == "" {
		models := p.balancer.Models()
		if len(models) != 1 {
			r := invalid(http.StatusBadRequest, "missing_model", "no-model", "you must provide a model parameter")
			r.Param = "model"
			return r
		}
		pl.req.Model = models[0].Name
	}
	c.authorization = p.upstreamHeaders(r, c.ID)
	return nil
}

// takeBody buffers the request body within the caps.
func (p *Proxy) takeBody(w http.ResponseWriter, r *http.Request, c *call) *Refusal {
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		return nil
	}
	if refusal := mediaType(r.Header, c.route.anyMethod); refusal != nil {
		return refusal
	}
	// A body that trickles may not hold its buffer for ever. Answers have no such
	// bound; but where the body has not come whole the bound stands, since the
	// server reads on.
	control, bounded := http.NewResponseController(w), !clientOf(r.Context()).hasBody(r.ContentLength)
	if bounded {
		_ = control.SetReadDeadline(time.Now().Add(p.options.BodyTimeout))
	}
	b, err := readBody(r.Body, r.ContentLength, p.options.MaxBodyBytes, func(n int) bool { return p.charge(c.plan, int64(n)) })
	if bounded && err == nil {
		_ = control.SetReadDeadline(time.Time{})
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &Refusal{
			Status: http.StatusRequestTimeout, Message: "The request body did not arrive in time.",
			Type: "invalid_request_error", Code: "request_timeout", Reason: "body-timeout", RetryAfter: 1,
		}
	case errors.Is(err, errNoRoom):
		return noRoom()
	case errors.Is(err, errBodyTooLarge):
		return invalid(http.StatusRequestEntityTooLarge, "request_too_large", "body-too-large",
			"The request body is longer than this router's limit.")
	case err != nil:
		return invalid(http.StatusBadRequest, "incomplete_body", "bad-body", "The request body ended early, or its chunks are broken.")
	}
	r.Body = http.NoBody // all of it has come
	c.plan.body = &bodyBuffer{b: b}
	c.plan.body.refs.Store(1)
	return nil
}

// charge counts n more bytes of a plan's body against MaxBufferedBytes, until
// drop takes them back; false, and none counted, where there is no room.
func (p *Proxy) charge(pl *plan, n int64) bool {
	if p.buffered.Add(n) > p.options.MaxBufferedBytes {
		p.buffered.Add(-n)
		return false
	}
	pl.weight += n
	return true
}

const reasonBodyMemory = "body-memory"

func noRoom() *Refusal {
	return &Refusal{
		Status: http.StatusServiceUnavailable, Message: "The router holds too many request bodies now.",
		Type: "server_error", Code: "overloaded", Reason: reasonBodyMemory, RetryAfter: 1,
	}
}

// mediaType refuses a body that would be read otherwise by the engine than here.
func mediaType(h http.Header, anyType bool) *Refusal {
	message := ""
	json := looksJSON(h)
	switch {
	case len(h["Content-Type"]) > 1:
		message = "There must be one Content-Type."
	case !json && !anyType:
		message = "Content-Type must be application/json."
	case json && encoded(h["Content-Encoding"]):
		message = "Content-Encoding is not supported: send the body as it is."
	default:
		return nil
	}
	return invalid(http.StatusUnsupportedMediaType, "unsupported_media_type", "media-type", message)
}

func encoded(codings []string) bool {
	for _, c := range codings {
		if !strings.EqualFold(c, "identity") {
			return true
		}
	}
	return false
}

// looksJSON accepts application/json, */*+json and no type at all.
func looksJSON(h http.Header) bool {
	kinds := h["Content-Type"]
	if len(kinds) == 0 || kinds[0] == "application/json" {
		return true
	}
	kind, _, _ := strings.Cut(kinds[0], ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

func unknownResponse(id, param string) *Refusal {
	r := invalid(http.StatusNotFound, "response_not_found", "unknown-response",
		"Response with id '"+clip(id)+"' not found: it is unknown to this router or its endpoint is gone.")
	r.Param = param
	return r
}

// storedResponse sends GET, DELETE and POST under /v1/responses/{id} to the
// endpoint that holds the response.
func (p *Proxy) storedResponse(w http.ResponseWriter, r *http.Request) {
	const label = "/v1/responses/*"
	if !p.allow(w, r, label, http.MethodGet, http.MethodDelete, http.MethodPost) {
		return
	}
	c := &call{Exchange: p.begin(w, r, label), route: route{path: label, anyMethod: true}}
	pl, _ := plans.Get().(*plan)
	c.plan = pl
	defer p.drop(c)
	id, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/responses/"), "/")
	holder, ok := p.balancer.Holder(id)
	if !ok {
		p.refuse(w, r, c.Exchange, unknownResponse(id, ""))
		return
	}
	if refusal := p.takeBody(w, r, c); refusal != nil {
		p.drop(c)
		p.refuse(w, r, c.Exchange, refusal)
		return
	}
	pl.req.ID, pl.req.Pin, pl.req.Tie = c.ID, holder, rand.Uint64()
	c.authorization = p.upstreamHeaders(r, c.ID)
	p.forward(w, r, c)
}
