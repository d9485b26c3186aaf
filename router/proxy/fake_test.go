package proxy

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// fakeBalancer hands out its targets in turn and keeps count of what is held.
type fakeBalancer struct {
	mu       sync.Mutex
	targets  []Target
	models   []string
	next     int
	held     int
	outcomes []Outcome
	first    int
	requests []pick.Request
	stored   map[string]string
}

func (b *fakeBalancer) Acquire(req *pick.Request, avoid func(string) bool) (Reservation, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.models, req.Model) && req.Pin == "" {
		return nil, ErrUnknownModel
	}
	kept := *req
	kept.Keys = slices.Clone(req.Keys)
	b.requests = append(b.requests, kept)
	for range b.targets {
		t := &b.targets[b.next%len(b.targets)]
		b.next++
		if avoid != nil && avoid(t.EndpointID) || req.Pin != "" && req.Pin != t.EndpointID {
			continue
		}
		b.held++
		return &fakeReservation{b: b, t: t}, nil
	}
	return nil, ErrNoEndpoint
}

func (b *fakeBalancer) Remember(id, endpoint string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stored == nil {
		b.stored = map[string]string{}
	}
	b.stored[id] = endpoint
}

func (b *fakeBalancer) Holder(id string) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, ok := b.stored[id]
	return e, ok
}

func (b *fakeBalancer) Models() []Model {
	var list []Model
	for _, m := range b.models {
		list = append(list, Model{Name: m})
	}
	return list
}

type fakeReservation struct {
	b    *fakeBalancer
	t    *Target
	once sync.Once
}

func (r *fakeReservation) Target() *Target { return r.t }

func (r *fakeReservation) FirstByte() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	r.b.first++
}

func (r *fakeReservation) Done(o Outcome) {
	r.once.Do(func() {
		r.b.mu.Lock()
		defer r.b.mu.Unlock()
		r.b.held--
		r.b.outcomes = append(r.b.outcomes, o)
	})
}

// rig is a proxy on a real socket in front of engines on real sockets.
type rig struct {
	*fakeBalancer
	url   string
	proxy *Proxy
	done  chan Exchange
}

func newRig(t *testing.T, options Options, engines ...http.HandlerFunc) *rig {
	t.Helper()
	r := &rig{fakeBalancer: &fakeBalancer{models: []string{"m"}}, done: make(chan Exchange, 100)}
	for _, engine := range engines {
		s := httptest.NewServer(engine)
		t.Cleanup(s.Close)
		r.targets = append(r.targets, Target{
			URL: s.URL, EndpointID: "e" + string(rune('0'+len(r.targets))), Pool: "p",
			LogicalModel: "m", ServedModel: "served", Reason: "prefix", Accelerator: "h100",
		})
	}
	options.Balancer = r.fakeBalancer
	options.Done = func(x *Exchange) { r.done <- *x }
	if options.Transport == nil {
		transport := wire.New(wire.Options{})
		t.Cleanup(transport.CloseIdleConnections)
		options.Transport = transport
	}
	r.proxy = New(options)
	s := httptest.NewUnstartedServer(r.proxy)
	s.Listener = r.proxy.Guard(s.Config, s.Listener)
	s.Start()
	t.Cleanup(s.Close)
	r.url = s.URL
	return r
}

// post sends a JSON body and gives status, headers and the whole answer.
func (r *rig) post(t *testing.T, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return do(t, req)
}

func do(t *testing.T, req *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", req.Method, req.URL, err)
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		got = append(got, ("<" + err.Error() + ">")...)
	}
	return resp, string(got)
}

// echo answers with the body it got.
func echo(w http.ResponseWriter, r *http.Request) {
	var b bytes.Buffer
	_, _ = b.ReadFrom(r.Body)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b.Bytes())
}

func TestProxySendsTheBodyOnUnchangedButForTheModel(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	body := `{"seed": 12345678901234567890123, "model" : "m" , "temperature":2.50,"messages":[{"role":"user","content":"h\u00e9"}]}` + "\n"
	resp, got := r.post(t, "/v1/chat/completions", body)
	if want := strings.Replace(body, `"m"`, `"served"`, 1); got != want || resp.StatusCode != 200 {
		t.Fatalf("engine got %q with %d, want %q", got, resp.StatusCode, want)
	}
	if x := <-r.done; x.Outcome != "ok" || x.Model != "m" || x.Accelerator != "h100" || r.held != 0 {
		t.Fatalf("exchange %+v, held %d", x, r.held)
	}
}
