package proxy

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// Defaults of Options.
const (
	DefaultMaxBodyBytes     = 32 << 20
	DefaultMaxBufferedBytes = 1 << 30
	DefaultBodyTimeout      = time.Minute
	DefaultStalledWrite     = 2 * time.Minute
)

// Options configure a Proxy. Balancer is required.
type Options struct {
	Balancer  Balancer
	Transport *wire.Transport // to the engines; nil means one with its defaults
	// MaxBodyBytes is the longest request body; a longer one gets 413. 0 = DefaultMaxBodyBytes.
	MaxBodyBytes int
	// MaxBufferedBytes bounds all request bodies held at one time, counted as
	// they arrive; a request past it gets 503 with Retry-After. 0 = DefaultMaxBufferedBytes.
	MaxBufferedBytes int64
	// BodyTimeout bounds the time a request body takes to arrive, 0 = DefaultBodyTimeout.
	BodyTimeout time.Duration
	// StalledWrite is how long an HTTP/2 client may keep one write of its answer
	// waiting, 0 = DefaultStalledWrite. Of HTTP/1 clients the listener's
	// TCP_USER_TIMEOUT sees to that.
	StalledWrite time.Duration
	// Consumer names who a request is charged to; nil means "anonymous".
	Consumer func(*http.Request) string
	// ConsumerHeader is never forwarded to an engine.
	ConsumerHeader string
	// Done gets every finished exchange, in the request's goroutine.
	Done func(*Exchange)
	Now  func() time.Time
	Log  *slog.Logger
}

// Proxy is the ingress handler. It is safe for concurrent use.
type Proxy struct {
	options  Options
	balancer Balancer
	budget   *retryBudget
	bases    sync.Map // engine base URL as text -> *base
	baseSize atomic.Int64
	buffered atomic.Int64
	inflight atomic.Int64
}

// New returns a Proxy. It starts nothing.
func New(o Options) *Proxy {
	if o.Transport == nil {
		o.Transport = wire.New(wire.Options{})
	}
	if o.MaxBodyBytes <= 0 {
		o.MaxBodyBytes = DefaultMaxBodyBytes
	}
	if o.MaxBufferedBytes <= 0 {
		o.MaxBufferedBytes = DefaultMaxBufferedBytes
	}
	if o.BodyTimeout <= 0 {
		o.BodyTimeout = DefaultBodyTimeout
	}
	if o.StalledWrite <= 0 {
		o.StalledWrite = DefaultStalledWrite
	}
	if o.Consumer == nil {
		o.Consumer = func(*http.Request) string { return "anonymous" }
	}
	if o.Done == nil {
		o.Done = func(*Exchange) {}
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Proxy{options: o, balancer: o.Balancer, budget: newRetryBudget(o.Now)}
}

// InFlight is the number of requests being handled now.
func (p *Proxy) InFlight() int64 { return p.inflight.Load() }

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.inflight.Add(1)
	defer p.inflight.Add(-1)
	if e := foreign(r); e != nil {
		p.refuse(w, r, p.begin(w, r, "other"), e)
		return
	}
	if r.ProtoMajor == 1 && len(r.TransferEncoding) > 0 && clientOf(r.Context()) == nil {
		w.Header()["Connection"] = []string{"close"} // nobody has looked whether it says its length twice
	}
	switch r.URL.Path {
	case "/v1/chat/completions", "/v1/completions":
		p.inference(w, r, route{path: r.URL.Path, stream: true, metered: true})
	case "/v1/embeddings":
		p.inference(w, r, route{path: r.URL.Path, metered: true})
	case "/v1/responses":
		p.inference(w, r, route{path: r.URL.Path, metered: true, responses: true})
	case "/tokenize", "/detokenize":
		p.inference(w, r, route{path: r.URL.Path})
	case "/v1/models", "/v1/models/":
		p.listModels(w, r)
	case "/health", "/healthz", "/ping":
		p.plain(w, r, "text/plain; charset=utf-8", "ok\n")
	case "/metrics":
		p.plain(w, r, "text/plain; version=0.0.4; charset=utf-8", "# The router's metrics are on its admin listener.\n")
	default:
		switch {
		case strings.HasPrefix(r.URL.Path, "/v1/models/"):
			p.showModel(w, r, strings.TrimPrefix(r.URL.Path, "/v1/models/"))
		case r.URL.Path != "/" && !plainPath(r.URL.Path):
			p.refuse(w, r, p.begin(w, r, "other"), invalid(http.StatusBadRequest, "invalid_url", "bad-path",
				"The path must not have empty, . or .. segments."))
		case strings.HasPrefix(r.URL.Path, "/v1/responses/"):
			p.storedResponse(w, r)
		case strings.HasPrefix(r.URL.Path, "/v1/"):
			p.inference(w, r, route{path: "/v1/*", anyMethod: true})
		default:
			p.refuse(w, r, p.begin(w, r, "other"), invalid(http.StatusNotFound, "unknown_url", "unknown-path",
				"Unknown request URL: "+r.Method+" "+clip(r.URL.Path)+". Requests go to /v1/chat/completions and its like; GET /v1/models lists the models."))
		}
	}
}

// route is what a path means to the proxy.
type route struct {
	path      string // label, one of a bounded set
	stream    bool   // include_usage may be spliced in
	metered   bool   // tokens are counted, estimated where the engine is silent
	responses bool   // response ids map to endpoints
	anyMethod bool   // unknown path: passed through, given no model it did not name
}

// begin starts an exchange: id, time, consumer.
func (p *Proxy) begin(w http.ResponseWriter, r *http.Request, path string) *Exchange {
	x := &Exchange{ID: requestID(r.Header), Start: p.options.Now(), Path: path}
	x.Consumer = p.options.Consumer(r)
	w.Header()["X-Request-Id"] = []string{x.ID}
	return x
}

// refuse answers with the router's own error and ends the exchange.
func (p *Proxy) refuse(w http.ResponseWriter, r *http.Request, x *Exchange, e *Refusal) {
	early := e.Status == http.StatusRequestEntityTooLarge || e.Reason == reasonBodyMemory || unread(r)
	if r.ProtoMajor == 1 && (early || e.Status == http.StatusRequestTimeout) {
		w.Header()["Connection"] = []string{"close"} // the rest of the body is not read
	}
	p.boundRest(w, r)
	WriteRefusal(w, e)
	x.Outcome, x.Status, x.Reason = "refused", e.Status, e.Reason
	p.finish(x)
	if early {
		p.linger(w, r)
	}
}

func (p *Proxy) finish(x *Exchange) {
	x.Duration = p.options.Now().Sub(x.Start)
	p.options.Done(x)
}

// allow answers 405 unless the method is one of the listed.
func (p *Proxy) allow(w http.ResponseWriter, r *http.Request, path string, methods ...string) bool {
	if slices.Contains(methods, r.Method) {
		return true
	}
	x := p.begin(w, r, path)
	w.Header()["Allow"] = []string{strings.Join(methods, ", ")}
	p.refuse(w, r, x, invalid(http.StatusMethodNotAllowed, "method_not_allowed", "method",
		"Method "+clip(r.Method)+" is not allowed here; use "+strings.Join(methods, " or ")+"."))
	return false
}

func (p *Proxy) plain(w http.ResponseWriter, r *http.Request, contentType, body string) {
	if !p.allow(w, r, r.URL.Path, http.MethodGet, http.MethodHead) {
		return
	}
	p.boundRest(w, r)
	w.Header()["Content-Type"] = []string{contentType}
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, _ = w.Write([]byte(body))
	}
}

// needs gives the capabilities a request depends on, without allocating.
func needs(body []byte, f *facts, images bool) []string {
	mask := 0
	if f.tools.is(body, '[') && body[skipSpace(body, f.tools.off+1)] != ']' && string(f.toolChoice.of(body)) != `"none"` {
		mask |= 1
	}
	if images {
		mask |= 2
	}
	if f.responseFormat.is(body, '{') {
		eachMember(body, f.responseFormat, func(key []byte, v span) {
			if string(key) == "type" && string(v.of(body)) != `"text"` {
				mask |= 4
			}
		})
	}
	return needsTable[mask]
}

var needsTable = [8][]string{
	nil,
	{"tools"},
	{"vision"},
	{"tools", "vision"},
	{"json"},
	{"tools", "json"},
	{"vision", "json"},
	{"tools", "vision", "json"},
}

// Inspect fills req from a request body as the data path would, for a dry run.
func Inspect(body []byte, req *pick.Request) error {
	var f facts
	if err := scan(body, &f); err != nil {
		return refusalFor(err, "")
	}
	w := new(walker)
	w.run(body, &f)
	fill(req, body, &f, w)
	return nil
}

func fill(req *pick.Request, body []byte, f *facts, w *walker) {
	req.Model = text(body, f.model)
	req.Keys = w.keys
	req.Conversation = w.name
	req.PromptBytes = w.total
	req.PromptTokens = (w.counted + 3) / 4
	req.MaxTokens = f.maxTokens
	req.Needs = needs(body, f, w.images)
}

// gone says whether the client has left.
func gone(ctx context.Context) bool { return ctx.Err() != nil }
