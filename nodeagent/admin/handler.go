package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/health"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Limits of API.md.
const (
	maxBody     = 64 << 10
	maxChanging = 32 // changing calls at once
)

// Options are what the handlers read and change.
type Options struct {
	// Node gives what the agent says of itself.
	Node func() Node
	// Weights is the weight cache; nil where the data role runs apart.
	Weights Weights
	// Pass takes the calls about models and leases where Weights is nil.
	Pass http.Handler
	// Manifest gives the manifest of a ref that is known on this node; the
	// bool is false where it is not. It never asks a source.
	Manifest func(ref artifact.Ref) (*artifact.Manifest, bool)
	// KV is the KV store; nil where the data role runs apart: then Pass takes the
	// calls about it.
	KV KVStore
	// Network gives who moved bytes over the node's network, ScaleOuts the records
	// of pulls; nil where the data role runs apart: then Pass takes the calls.
	Network   func() Network
	ScaleOuts func() []scaleout.Record
	// Endpoints gives the local engines; nil where the control role runs apart.
	Endpoints func() []endpoints.State
	// Claims gives the claims that have something on this node, by namespace and
	// name; nil where no driver runs.
	Claims func() []Claim
	// Tracker keeps the devices; nil where the control role runs apart.
	Tracker *health.Tracker
	// AllowInject takes facts from the socket.
	AllowInject bool
	// Log receives changing calls; nil discards.
	Log *slog.Logger
}

// Weights is what the handlers ask of the weight cache.
type Weights interface {
	// Models is the state of every ref, by ref.
	Models() []weightcache.Status
	// Subscribe gives a channel that holds a signal after Models changed, and
	// the func that ends the subscription.
	Subscribe() (changed <-chan struct{}, cancel func())
	// Ensure waits until a ref is Ready and its views stand.
	Ensure(ctx context.Context, ref artifact.Ref, opts weightcache.EnsureOptions) (*artifact.Manifest, error)
	// Remove drops a ref; weightcache.ErrLeased where a lease forbids it.
	Remove(ctx context.Context, ref artifact.Ref) error
	// Verify reads every file of an artifact again.
	Verify(ctx context.Context, ref artifact.Ref) (weightcache.VerifyResult, error)
	// Leases lists who holds what, by digest and holder.
	Leases() []local.Lease
}

// api is the handlers over Options.
type api struct {
	opts  Options
	slots chan struct{} // one per changing call
}

// NewReadOnly gives the handler of the admin listener: GET only.
func NewReadOnly(opts Options) http.Handler {
	a := newAPI(opts)
	mux := http.NewServeMux()
	a.reads(mux)
	mux.HandleFunc("/v1/", func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			fail(w, &Error{
				Code: CodeReadOnly, Status: http.StatusForbidden, Message: "this listener takes no changing call",
				Hint: "use the agent's unix socket on its node",
			})
			return
		}
		unknownCall(w, r)
	})
	return mux
}

// NewSocket gives the handler of the unix socket: all calls.
func NewSocket(opts Options) http.Handler {
	a := newAPI(opts)
	mux := http.NewServeMux()
	a.reads(mux)
	mux.Handle("POST /v1/models/pull", a.ofWeights(a.changing(a.pull)))
	mux.Handle("POST /v1/models/rm", a.ofWeights(a.changing(a.remove)))
	mux.Handle("POST /v1/models/verify", a.ofWeights(a.changing(a.verify)))
	mux.Handle("POST /v1/kv/pin", a.ofKV(a.changing(a.kvPin)))
	mux.Handle("POST /v1/kv/drop", a.ofKV(a.changing(a.kvDrop)))
	mux.HandleFunc("POST /v1/inject", a.changing(a.inject))
	mux.HandleFunc("/", unknownCall)
	return mux
}

func newAPI(opts Options) *api {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	return &api{opts: opts, slots: make(chan struct{}, maxChanging)}
}

func (a *api) reads(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/node", func(w http.ResponseWriter, _ *http.Request) { answer(w, a.opts.Node()) })
	mux.Handle("GET /v1/models", a.ofWeights(func(w http.ResponseWriter, _ *http.Request) { answer(w, modelList{Models: a.models()}) }))
	mux.Handle("GET /v1/models/show", a.ofWeights(a.show))
	mux.HandleFunc("GET /v1/endpoints", func(w http.ResponseWriter, _ *http.Request) {
		list := []Endpoint{}
		if a.opts.Endpoints != nil {
			list = endpointsOf(a.opts.Endpoints())
		}
		answer(w, endpointList{Endpoints: list})
	})
	mux.HandleFunc("GET /v1/devices", func(w http.ResponseWriter, _ *http.Request) { answer(w, deviceList{Devices: a.devices()}) })
	mux.HandleFunc("GET /v1/claims", func(w http.ResponseWriter, _ *http.Request) { answer(w, claimList{Claims: a.claims()}) })
	mux.Handle("GET /v1/kv", a.ofKV(a.kv))
	mux.Handle("GET /v1/network", a.ofNetwork(a.network))
	mux.Handle("GET /v1/scaleouts", a.ofNetwork(a.scaleOuts))
	mux.Handle("GET /v1/leases", a.ofWeights(func(w http.ResponseWriter, _ *http.Request) { answer(w, leaseList{Leases: a.leases()}) }))
}

// ofWeights is a call about weights: this process answers it where it has them.
func (a *api) ofWeights(call http.HandlerFunc) http.Handler {
	if a.opts.Weights == nil {
		return a.opts.Pass
	}
	return call
}

func unknownCall(w http.ResponseWriter, r *http.Request) {
	known := map[string]string{
		"/v1/node": "GET", "/v1/models": "GET", "/v1/models/show": "GET", "/v1/endpoints": "GET", "/v1/devices": "GET", "/v1/claims": "GET", "/v1/leases": "GET", "/v1/kv": "GET", "/v1/network": "GET", "/v1/scaleouts": "GET",
		"/v1/models/pull": "POST", "/v1/models/rm": "POST", "/v1/models/verify": "POST", "/v1/inject": "POST", "/v1/kv/pin": "POST", "/v1/kv/drop": "POST",
	}
	if method, found := known[r.URL.Path]; found && method != r.Method {
		w.Header().Set("Allow", method)
		fail(w, &Error{Code: CodeBadMethod, Status: http.StatusMethodNotAllowed, Message: fmt.Sprintf("%s wants %s", r.URL.Path, method)})
		return
	}
	fail(w, &Error{Code: CodeNotFound, Status: http.StatusNotFound, Message: "no such call"})
}

// changing bounds the changing calls at once and logs each.
func (a *api) changing(do http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case a.slots <- struct{}{}:
			defer func() { <-a.slots }()
		default:
			fail(w, &Error{
				Code: CodeBusy, Status: http.StatusServiceUnavailable,
				Message: fmt.Sprintf("%d changing calls are running", maxChanging), Hint: "try again when one ended",
			})
			return
		}
		a.opts.Log.Info("changing call", slog.String("call", r.URL.Path))
		do(w, r)
	}
}

func (a *api) models() []Model {
	statuses := a.opts.Weights.Models()
	list := make([]Model, 0, len(statuses))
	for _, s := range statuses {
		list = append(list, modelOf(s))
	}
	return list
}

func (a *api) model(ref artifact.Ref) (Model, bool) {
	for _, s := range a.opts.Weights.Models() {
		if s.Ref == ref {
			return modelOf(s), true
		}
	}
	return Model{Ref: ref.String(), State: string(weightcache.Absent)}, false
}

func (a *api) show(w http.ResponseWriter, r *http.Request) {
	ref, err := artifact.ParseRef(r.URL.Query().Get("ref"))
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	model, found := a.model(ref)
	if !found {
		fail(w, errorOf(fmt.Errorf("show %s: %w", ref, weightcache.ErrUnknown)))
		return
	}
	if m, known := a.opts.Manifest(ref); known {
		for _, f := range m.Files {
			model.FileList = append(model.FileList, File{Path: f.Path, Size: f.Size, SHA256: f.SHA256.String(), Kind: f.Kind})
		}
	}
	answer(w, model)
}

func (a *api) devices() []Device {
	if a.opts.Tracker == nil {
		return []Device{}
	}
	counts := a.opts.Tracker.Counts()
	held := holders(a.claims())
	list := []Device{}
	for _, s := range a.opts.Tracker.Snapshot() {
		list = append(list, Device{
			ID: string(s.Device.ID), Product: s.Device.Product, Facts: s.Device.Facts, Claims: held[string(s.Device.ID)], Health: s.Health.String(),
			Conditions: s.Conditions, XIDs: counts[s.Device.ID],
		})
	}
	return list
}

func (a *api) leases() []Lease {
	refs := map[artifact.Digest]string{}
	for _, s := range a.opts.Weights.Models() {
		refs[s.Digest] = s.Ref.String()
	}
	list := []Lease{}
	for _, l := range a.opts.Weights.Leases() {
		if n := len(list); n > 0 && list[n-1].Digest == l.Digest.String() {
			list[n-1].Holders = append(list[n-1].Holders, l.Holder)
			continue
		}
		list = append(list, Lease{Digest: l.Digest.String(), Ref: refs[l.Digest], Holders: []string{l.Holder}})
	}
	return list
}

func (a *api) remove(w http.ResponseWriter, r *http.Request) {
	ref, err := readRef(r)
	if err == nil {
		err = a.opts.Weights.Remove(r.Context(), ref)
	}
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	answer(w, struct{}{})
}

func (a *api) verify(w http.ResponseWriter, r *http.Request) {
	ref, err := readRef(r)
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	result, err := a.opts.Weights.Verify(r.Context(), ref)
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	answer(w, VerifyResult{Files: result.Files, Bytes: int64(result.Bytes), Bad: result.Bad})
}

func (a *api) inject(w http.ResponseWriter, r *http.Request) {
	if !a.opts.AllowInject || a.opts.Tracker == nil {
		fail(w, &Error{
			Code: CodeInjectDisabled, Status: http.StatusForbidden, Message: "this agent takes no injected facts",
			Hint: "set health.allowInject: true in the agent's configuration, on test nodes only",
		})
		return
	}
	var request InjectRequest
	if err := readBody(r, &request); err != nil {
		fail(w, errorOf(err))
		return
	}
	fact := device.Fact{Device: device.ID(request.Device), Kind: device.FactXID, Code: request.XID, Source: "inject"}
	if request.Clear {
		fact.Kind, fact.Code = device.FactCleared, 0
	}
	if request.Device == "" || request.Clear == (request.XID != 0) || request.XID < 0 || request.XID > 65535 {
		fail(w, errorOf(fmt.Errorf("%w: want a device and either an xid from 1 to 65535 or clear", errBody)))
		return
	}
	if err := a.opts.Tracker.Apply(r.Context(), fact); err != nil {
		fail(w, errorOf(err))
		return
	}
	list := a.devices()
	answer(w, list[slices.IndexFunc(list, func(d Device) bool { return d.ID == request.Device })])
}

// errBody says that a request's body is malformed.
var errBody = errors.New("malformed request")

func readBody(r *http.Request, into any) error {
	decoder := json.NewDecoder(io.LimitReader(r.Body, maxBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fmt.Errorf("%w: %w", errBody, err)
	}
	if decoder.More() {
		return fmt.Errorf("%w: more than one object", errBody)
	}
	return nil
}

func readRef(r *http.Request) (artifact.Ref, error) {
	var request RefRequest
	if err := readBody(r, &request); err != nil {
		return artifact.Ref{}, err
	}
	return artifact.ParseRef(request.Ref)
}

func answer(w http.ResponseWriter, v any) { write(w, http.StatusOK, v) }

func fail(w http.ResponseWriter, e *Error) { write(w, e.Status, errorAnswer{Error: e}) }

func write(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		status, data = http.StatusInternalServerError, []byte(`{"error":{"code":"internal","message":"cannot encode the answer"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Hearth-API", Version)
	w.WriteHeader(status)
	// A caller that went away cannot be told.
	_, _ = w.Write(append(data, '\n'))
}

// errorOf maps an error of the rooms to one of the API.
func errorOf(err error) *Error {
	e := &Error{Code: CodeInternal, Status: http.StatusInternalServerError, Message: err.Error()}
	for _, known := range []struct {
		is     error
		code   string
		status int
		hint   string
	}{
		{source.ErrProtocol, CodeSourceFailed, http.StatusBadGateway, ""}, // a source's invalid answer is not the caller's fault
		{artifact.ErrInvalid, CodeBadRequest, http.StatusBadRequest, ""},
		{errBody, CodeBadRequest, http.StatusBadRequest, ""},
		{weightcache.ErrNotAllowed, CodeNotAllowed, http.StatusForbidden, "add a pattern for it under sources[].refs in the agent's configuration"},
		{weightcache.ErrUnknown, CodeUnknownRef, http.StatusNotFound, "hearth models list shows what the node knows"},
		{health.ErrUnknownDevice, CodeUnknownDevice, http.StatusNotFound, "hearth nodes shows the devices"},
		{weightcache.ErrLeased, CodeLeased, http.StatusConflict, "end what uses it first"},
		{weightcache.ErrNoSpace, CodeNoSpace, http.StatusInsufficientStorage, "raise weights.budget or remove a model"},
		{weightcache.ErrBroken, CodeBroken, http.StatusUnprocessableEntity, ""},
		{weightcache.ErrMismatch, CodeBroken, http.StatusUnprocessableEntity, ""},
		{source.ErrNotFound, CodeUnknownRef, http.StatusNotFound, "check the name and the revision"},
		{source.ErrUnauthorized, CodeSourceFailed, http.StatusBadGateway, "check the source's tokenFile"},
		{source.ErrForbidden, CodeSourceFailed, http.StatusBadGateway, "the token may need access to a gated model"},
		{source.ErrThrottled, CodeSourceFailed, http.StatusBadGateway, ""},
		{source.ErrUnavailable, CodeSourceFailed, http.StatusBadGateway, "check that the source's url or root can be reached from the node"},
		{source.ErrChanged, CodeSourceFailed, http.StatusBadGateway, "pull again with --refresh"},
		{source.ErrNoRange, CodeSourceFailed, http.StatusBadGateway, ""},
		{context.Canceled, CodeBusy, http.StatusServiceUnavailable, "the agent is stopping or the caller left"},
	} {
		if errors.Is(err, known.is) {
			e.Code, e.Status, e.Hint = known.code, known.status, known.hint
			break
		}
	}
	return e
}

func modelOf(s weightcache.Status) Model {
	m := Model{
		Ref: s.Ref.String(), Commit: s.Commit, Source: s.Source, State: string(s.State), Size: s.Size, Present: s.Present,
		Files: s.Files, Detail: strings.ToValidUTF8(s.Detail, "?"), BytesFetched: s.BytesFetched, Views: s.Views,
		Leases: s.Leases, LastUsed: s.LastUsed, Access: string(s.Access),
	}
	if s.ViewsWithheld {
		access := string(s.Access)
		if s.Access == artifact.AccessUnknown {
			access = "not known"
		}
		m.NoViews = "access is " + access + ", and no grant with views: true covers the ref"
	}
	if !s.Digest.IsZero() {
		m.Digest = s.Digest.String()
	}
	return m
}

func endpointsOf(states []endpoints.State) []Endpoint {
	list := make([]Endpoint, 0, len(states))
	for _, s := range states {
		list = append(list, Endpoint{
			Name: s.Name, URL: s.URL, Engine: s.Engine, Pool: s.Pool, Accelerator: s.Accelerator, Devices: s.Devices, Ref: s.Ref,
			ServedModels: s.ServedModels, Reachable: s.Reachable, Incarnation: s.Incarnation, Detail: s.Detail,
			Load: Load{
				At: s.Load.At, Running: s.Load.Running, Waiting: s.Load.Waiting, KVUsage: s.Load.KVUsage,
				KVCapacityTokens: s.Load.KVCapacityTokens, BlockTokens: s.Load.BlockTokens, PromptTokens: s.Load.PromptTokens,
				CachedTokens: s.Load.CachedTokens, GeneratedTokens: s.Load.GeneratedTokens, MaxRunning: s.Load.MaxRunning,
			},
		})
	}
	slices.SortFunc(list, func(a, b Endpoint) int { return strings.Compare(a.Name, b.Name) })
	return list
}
