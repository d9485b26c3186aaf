package source_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// flightRig is a hub that sends every reader on to another host, and what its
// connections were dialled for and carried.
type flightRig struct {
	hub  *source.Hub
	data []byte

	// Set before the first request: what the other host does before it answers,
	// and what a dial waits for.
	hold func(r *http.Request)
	dial func(ctx context.Context)

	mu      sync.Mutex
	dialled map[ends]uint32          // flight; 0: none
	carried map[ends]map[string]bool // repositories
	closed  map[ends]chan struct{}
}

// ends name a connection by our address and the other: two to different servers
// may have the same of ours.
type ends struct{ ours, theirs string }

func newFlightRig(t *testing.T) *flightRig {
	t.Helper()
	r := &flightRig{
		data: bytes.Repeat([]byte("0123456789abcdef"), 4<<10), dialled: map[ends]uint32{},
		carried: map[ends]map[string]bool{}, closed: map[ends]chan struct{}{},
	}
	elsewhere := r.serve(t, func(w http.ResponseWriter, req *http.Request) {
		if r.hold != nil {
			r.hold(req)
		}
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(r.data))
	})
	here := r.serve(t, func(w http.ResponseWriter, req *http.Request) {
		http.Redirect(w, req, elsewhere+req.URL.Path, http.StatusFound)
	})
	var err error
	r.hub, err = source.NewHub(source.HubOptions{Name: "hub", URL: here, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if r.dial != nil {
			r.dial(ctx)
		}
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		id, _ := source.FlightOf(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.dialled[ends{conn.LocalAddr().String(), conn.RemoteAddr().String()}] = id
		return conn, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.hub.Close)
	return r
}

// serve notes which repositories each connection asks for, and when it is closed.
func (r *flightRig) serve(t *testing.T, answer http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		here, _ := req.Context().Value(http.LocalAddrContextKey).(net.Addr)
		r.mu.Lock()
		r.carried[ends{req.RemoteAddr, here.String()}][strings.Join(strings.Split(req.URL.Path, "/")[1:3], "/")] = true
		r.mu.Unlock()
		answer(w, req)
	}))
	s.Config.ConnState = func(conn net.Conn, state http.ConnState) {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch of := (ends{conn.RemoteAddr().String(), conn.LocalAddr().String()}); state {
		case http.StateNew:
			r.carried[of] = map[string]bool{}
		case http.StateClosed:
			close(r.closedLocked(of))
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

// closedLocked is closed once the other side has seen a connection end.
func (r *flightRig) closedLocked(of ends) chan struct{} {
	if r.closed[of] == nil {
		r.closed[of] = make(chan struct{})
	}
	return r.closed[of]
}

// open asks for all of a file of a repository.
func (r *flightRig) open(ctx context.Context, repo string) (io.ReadCloser, error) {
	commit := strings.Repeat("ab", 20)
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: repo, Revision: "main"}
	f := artifact.File{Path: "model.safetensors", Size: int64(len(r.data))}
	return r.hub.Open(ctx, &artifact.Listing{Ref: ref, Source: "hub", Commit: commit}, f, 0, f.Size)
}

// read asks for a file, reads it to its end and closes it.
func (r *flightRig) read(ctx context.Context, repo string) error {
	body, err := r.open(ctx, repo)
	if err != nil {
		return err
	}
	got, err := io.ReadAll(body)
	if err == nil && !bytes.Equal(got, r.data) {
		err = fmt.Errorf("%d other bytes came", len(got))
	}
	_ = body.Close()
	return err
}

// connections are how many were dialled for a flight so far.
func (r *flightRig) connections(flight uint32) (list []ends) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for of, id := range r.dialled {
		if id == flight {
			list = append(list, of)
		}
	}
	return list
}

// awaitClosed waits until the other side has seen every connection of a flight end.
func (r *flightRig) awaitClosed(flight uint32) {
	for _, of := range r.connections(flight) {
		r.mu.Lock()
		closed := r.closedLocked(of)
		r.mu.Unlock()
		<-closed
	}
}

func TestNoConnectionCarriesRequestsOfTwoFlights(t *testing.T) {
	t.Parallel()
	const streams, rounds = 6, 5
	r := newFlightRig(t)
	repos := map[uint32]string{0: "org/none", 7: "org/seven", 8: "org/eight"}
	var arrived sync.WaitGroup // all requests of the first round are there at once
	arrived.Add(len(repos) * streams)
	var first sync.Map
	r.hold = func(req *http.Request) {
		if _, known := first.LoadOrStore(req.RemoteAddr, true); !known {
			arrived.Done()
			arrived.Wait()
		}
	}
	var all sync.WaitGroup
	for id, repo := range repos {
		ctx := t.Context()
		if id != 0 {
			ctx = source.WithFlight(ctx, id)
		}
		for range streams {
			all.Go(func() {
				for range rounds {
					if err := r.read(ctx, repo); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	count := map[uint32]int{}
	for of, id := range r.dialled {
		count[id]++
		for repo := range r.carried[of] {
			if repo != repos[id] {
				t.Errorf("a connection dialled for flight %d carried a request for %s", id, repo)
			}
		}
	}
	for id := range repos {
		// The other host has one for each stream in every round, for they are kept;
		// of the hub's, one that comes free may be taken while another is dialled.
		if count[id] < streams || count[id] > (1+rounds)*streams {
			t.Errorf("flight %d had %d connections, want %d to %d", id, count[id], streams, (1+rounds)*streams)
		}
	}
}

func TestFlightsAfterOneAnotherUseDifferentConnections(t *testing.T) {
	t.Parallel()
	r := newFlightRig(t)
	for id := uint32(1); id <= 3; id++ {
		ctx := source.WithFlight(t.Context(), id)
		for range 3 {
			if err := r.read(ctx, "org/same"); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(r.connections(id)); n != 2 { // one to each host
			t.Errorf("flight %d dialled %d times, want 2", id, n)
		}
		r.hub.EndFlight(id)
		r.awaitClosed(id)
	}
	r.hub.EndFlight(99) // there was none
}

func TestARequestOutlivesItsFlightAndItsConnectionDoesNot(t *testing.T) {
	t.Parallel()
	r := newFlightRig(t)
	ctx := source.WithFlight(t.Context(), 5)
	body, err := r.open(ctx, "org/same")
	if err != nil {
		t.Fatal(err)
	}
	r.hub.EndFlight(5)
	got, err := io.ReadAll(body)
	if err != nil || !bytes.Equal(got, r.data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if err := body.Close(); err != nil {
		t.Error(err)
	}
	r.awaitClosed(5)
}

func TestAFlightThatEndsWhileItDialsLeavesNoConnection(t *testing.T) {
	t.Parallel()
	r := newFlightRig(t)
	r.dial = func(ctx context.Context) {
		if id, ok := source.FlightOf(ctx); ok {
			r.hub.EndFlight(id)
		}
	}
	if err := r.read(source.WithFlight(t.Context(), 5), "org/same"); err != nil {
		t.Fatal(err)
	}
	r.awaitClosed(5)
}

func TestFlightsPastTheBoundShareWhatIsNoFlights(t *testing.T) {
	t.Parallel()
	const bound = 64
	r := newFlightRig(t)
	for id := uint32(1); id <= bound+2; id++ {
		if err := r.read(source.WithFlight(t.Context(), id), "org/same"); err != nil {
			t.Fatal(err)
		}
	}
	for id := uint32(1); id <= bound; id++ {
		if len(r.connections(id)) != 2 {
			t.Errorf("flight %d has no connections of its own", id)
		}
	}
	if n := len(r.connections(bound+1)) + len(r.connections(bound+2)); n != 0 {
		t.Errorf("%d connections are marked for flights past the bound", n)
	}
	if n := len(r.connections(0)); n != 2 {
		t.Errorf("%d shared connections, want 2", n)
	}
	r.hub.EndFlight(bound + 1)
	r.hub.EndFlight(3)
	if err := r.read(source.WithFlight(t.Context(), bound+3), "org/same"); err != nil {
		t.Fatal(err)
	}
	if len(r.connections(bound+3)) != 2 {
		t.Error("the place of a flight that ended was not given to the next")
	}
	r.hub.Close()
	for id := range uint32(bound + 4) {
		r.awaitClosed(id)
	}
}

func TestWithoutAFlightThereIsNone(t *testing.T) {
	t.Parallel()
	if id, ok := source.FlightOf(t.Context()); ok || id != 0 {
		t.Errorf("got %d, %v", id, ok)
	}
	if id, ok := source.FlightOf(source.WithFlight(t.Context(), 0)); ok || id != 0 {
		t.Errorf("got %d, %v of flight 0", id, ok)
	}
	if id, ok := source.FlightOf(source.WithFlight(t.Context(), 1<<31)); !ok || id != 1<<31 {
		t.Errorf("got %d, %v", id, ok)
	}
}
