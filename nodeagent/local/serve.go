package local

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// How often the state is told: at most every tellEvery, while it changes; it
// is looked at every lookEvery, for what changes without a signal; and a line
// that says nothing else comes after aliveEvery.
const (
	tellEvery  = 100 * time.Millisecond
	lookEvery  = time.Second
	aliveEvery = 5 * time.Second
	lineWithin = 10 * time.Second // for one line to be taken
)

// HandlerOptions are what a Handler serves.
type HandlerOptions struct {
	Data *InProcess
	// Problems are texts for people about the data role; nil is none.
	Problems func() []string
	Log      *slog.Logger
}

// Handler serves the data role to the control role, as in PROTOCOL.md. Who may
// open its socket may change what is held.
type Handler struct {
	opts    HandlerOptions
	mux     *http.ServeMux
	calls   chan struct{} // one per call
	streams chan struct{} // one per stream
	over    chan struct{} // closed by End
	end     sync.Once
}

// NewHandler makes the handler; it starts nothing.
func NewHandler(opts HandlerOptions) *Handler {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Problems == nil {
		opts.Problems = func() []string { return nil }
	}
	h := &Handler{
		opts: opts, mux: http.NewServeMux(), calls: make(chan struct{}, maxCalls), streams: make(chan struct{}, maxStreams), over: make(chan struct{}),
	}
	data := opts.Data
	weights, space := data.Cache(), data.KV()
	h.mux.HandleFunc("GET "+pathState, h.state)
	post(h, pathLend, maxLendBody, func(ctx context.Context, c lendCall) (lendAnswer, error) {
		if err := checkHolders(c.Holders); err != nil {
			return lendAnswer{}, err
		}
		missing, err := data.Lend(ctx, c.Holders)
		return lendAnswer{missing}, err
	})
	post(h, pathPods, maxPodsBody, func(ctx context.Context, c podsCall) (nothing, error) {
		return nothing{}, data.SetPods(ctx, c.Pods)
	})
	post(h, pathHold, maxCallBody, func(ctx context.Context, c holdCall) (stock.Views, error) {
		return weights.Hold(ctx, c.Digest, c.Claim)
	})
	post(h, pathPull, maxCallBody, func(ctx context.Context, c pullCall) (stock.Progress, error) {
		if c.Ref.IsZero() {
			return stock.Progress{}, fmt.Errorf("pull: %w: no ref", artifact.ErrInvalid)
		}
		return weights.Pull(ctx, c.Ref, c.Claim)
	})
	post(h, pathRelease, maxCallBody, func(ctx context.Context, c claimCall) (nothing, error) {
		return nothing{}, weights.Release(ctx, c.Claim)
	})
	post(h, pathHolds, maxCallBody, func(ctx context.Context, _ nothing) (claimsAnswer, error) {
		claims, err := weights.Holds(ctx)
		return claimsAnswer{claims}, err
	})
	post(h, pathReserve, maxCallBody, func(ctx context.Context, r stock.Reservation) (dirAnswer, error) {
		dir, err := space.Reserve(ctx, r)
		return dirAnswer{dir}, err
	})
	post(h, pathKVRelease, maxCallBody, func(ctx context.Context, c claimCall) (nothing, error) {
		return nothing{}, space.Release(ctx, c.Claim)
	})
	post(h, pathReservations, maxCallBody, func(ctx context.Context, _ nothing) (reservationsAnswer, error) {
		list, err := space.Reservations(ctx)
		return reservationsAnswer{list}, err
	})
	h.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		fail(w, &failure{Code: "invalid", Message: "no such call"}, http.StatusNotFound)
	})
	return h
}

// Prefix is that of every path of a Handler.
const Prefix = pathPrefix

// End ends the streams of state, so that their server can stop.
func (h *Handler) End() { h.end.Do(func() { close(h.over) }) }

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(VersionHeader, Version)
	if got := r.Header.Get(VersionHeader); got != Version {
		fail(w, &failure{
			Code: "invalid", Message: fmt.Sprintf("the caller speaks version %.20q of this protocol, and this is version %s: both roles are to be of one release", got, Version),
		}, http.StatusBadRequest)
		return
	}
	h.mux.ServeHTTP(w, r)
}

func checkHolders(holders map[string]artifact.Digest) error {
	if len(holders) > maxHolders {
		return fmt.Errorf("lend: %w: %d holders, want at most %d", artifact.ErrInvalid, len(holders), maxHolders)
	}
	for holder := range holders {
		if holder == "" || len(holder) > maxHolder {
			return fmt.Errorf("lend: %w: a holder's name has %d bytes, want 1 to %d", artifact.ErrInvalid, len(holder), maxHolder)
		}
	}
	return nil
}

// post serves one call: a JSON object in, one out.
func post[In, Out any](h *Handler, path string, limit int64, do func(ctx context.Context, in In) (Out, error)) {
	h.mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
		select {
		case h.calls <- struct{}{}:
			defer func() { <-h.calls }()
		default:
			fail(w, &failure{Code: "unavailable", Message: fmt.Sprintf("%d calls are running", maxCalls)}, http.StatusServiceUnavailable)
			return
		}
		var in In
		if err := decodeOne(http.MaxBytesReader(w, r.Body, limit), &in); err != nil {
			fail(w, &failure{Code: "invalid", Message: "malformed call: " + err.Error()}, http.StatusBadRequest)
			return
		}
		out, err := do(r.Context(), in)
		if err != nil {
			f, status := failureOf(err)
			h.opts.Log.Debug("call of the control role failed", slog.String("call", path), slog.Any("error", err))
			fail(w, f, status)
			return
		}
		write(w, http.StatusOK, out)
	})
}

// decodeOne reads exactly one JSON object without unknown fields.
func decodeOne(r io.Reader, into any) error {
	decoder := json.NewDecoder(r)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one object")
	}
	return nil
}

func fail(w http.ResponseWriter, f *failure, status int) { write(w, status, failureAnswer{f}) }

func write(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		status, data = http.StatusInternalServerError, []byte(`{"error":{"code":"internal","message":"cannot encode the answer"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// A caller that went away cannot be told.
	_, _ = w.Write(append(data, '\n'))
}

// state streams the state: whole, whenever it differs from the line before.
func (h *Handler) state(w http.ResponseWriter, r *http.Request) {
	select {
	case h.streams <- struct{}{}:
		defer func() { <-h.streams }()
	default:
		fail(w, &failure{Code: "unavailable", Message: fmt.Sprintf("%d streams are open", maxStreams)}, http.StatusServiceUnavailable)
		return
	}
	store, endStore := h.opts.Data.Subscribe()
	defer endStore()
	offer, endOffer := h.opts.Data.Cache().Subscribe()
	defer endOffer()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	pause := time.NewTimer(0)
	defer pause.Stop()
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/x-ndjson")
	tell := func(data []byte) bool {
		_ = control.SetWriteDeadline(time.Now().Add(lineWithin)) // not every writer has one
		_, err := w.Write(append(data, '\n'))
		return err == nil && control.Flush() == nil
	}
	var last []byte
	var at time.Time
	for {
		select {
		case <-r.Context().Done():
			return
		case <-h.over:
			return
		case <-pause.C:
		}
		begun := time.Now()
		data, err := h.line()
		if err != nil {
			h.opts.Log.Error("state not told to the control role", slog.Any("error", err))
			return
		}
		switch {
		case !bytes.Equal(data, last):
			if !tell(data) {
				return
			}
			last, at = data, time.Now()
		case time.Since(at) >= aliveEvery:
			if !tell([]byte("{}")) {
				return
			}
			at = time.Now()
		}
		// A store so large that telling it takes long is told more rarely.
		pause.Reset(max(tellEvery, 10*time.Since(begun)))
		select {
		case <-r.Context().Done():
			return
		case <-h.over:
			return
		case <-store:
		case <-offer:
		case <-look.C:
		}
	}
}

func (h *Handler) line() ([]byte, error) {
	state, _ := h.opts.Data.Snapshot()
	l := line{
		KVFill: state.KV, Epoch: state.Epoch, Models: make([]model, 0, len(state.Models)), Space: state.Space, PullsEnded: state.PullsEnded,
		Network: state.Network, ScaleOuts: state.ScaleOuts,
	}
	for _, s := range state.Models {
		l.Models = append(l.Models, modelOf(s))
	}
	l.Problems = slices.Clone(h.opts.Problems())
	slices.Sort(l.Problems)
	if offer, ok := h.opts.Data.Cache().Weights(); ok {
		l.Weights = &offer
	}
	l.KV, _ = h.opts.Data.KV().Space()
	return encode(l)
}

func encode(l line) ([]byte, error) { return json.Marshal(l) }
