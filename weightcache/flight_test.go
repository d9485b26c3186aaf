package weightcache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// pooledSource is a memSource that notes which flight each range is for, and
// which flights it was told to end.
type pooledSource struct {
	*memSource
	log *flightLog
}

func (s pooledSource) Open(ctx context.Context, l *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	id, _ := source.FlightOf(ctx)
	s.log.mu.Lock()
	s.log.asked[id] = append(s.log.asked[id], f.Path)
	s.log.mu.Unlock()
	return s.memSource.Open(ctx, l, f, off, n)
}

func (s pooledSource) EndFlight(id uint32) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.dropped = append(s.log.dropped, id)
}

// flightLog is what a Puller tells of its flights.
type flightLog struct {
	puller *Puller
	onto   func(Flight) // what else is done as one begins

	mu      sync.Mutex
	began   []Flight
	ends    map[uint32][]FlightEnd
	asked   map[uint32][]string // paths by flight
	dropped []uint32            // by the source
}

// flightRig has a flight log over further sources besides its own.
func flightRig(t *testing.T, src *memSource, also []Rule, change ...func(*Options, *PullerOptions)) (*rig, *flightLog) {
	t.Helper()
	log := &flightLog{ends: map[uint32][]FlightEnd{}, asked: map[uint32][]string{}}
	r := newRig(t, src, append([]func(*Options, *PullerOptions){func(_ *Options, p *PullerOptions) {
		p.Sources = []Rule{{Source: pooledSource{src, log}, Refs: []string{"acme/*"}}}
		for _, rule := range also {
			p.Sources = append(p.Sources, Rule{Source: pooledSource{rule.Source.(*memSource), log}, Refs: rule.Refs})
		}
		p.Began = log.begin
	}}, change...)...)
	log.puller = r.puller
	return r, log
}

func (l *flightLog) begin(f Flight) func(FlightEnd) {
	l.puller.List() // nothing that it needs is held
	l.mu.Lock()
	l.began = append(l.began, f)
	l.mu.Unlock()
	if l.onto != nil {
		l.onto(f)
	}
	return func(end FlightEnd) {
		l.puller.List()
		l.mu.Lock()
		defer l.mu.Unlock()
		if !slices.Contains(l.dropped, f.ID) {
			end.Err = errors.Join(end.Err, errors.New("it was told to end before its connections were dropped"))
		}
		l.ends[f.ID] = append(l.ends[f.ID], end)
	}
}

// all gives the flights so far, each with its one end, once no pull is in flight.
func (l *flightLog) all(t *testing.T) ([]Flight, []FlightEnd) {
	t.Helper()
	if err := l.puller.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var ends []FlightEnd
	for i, f := range l.began {
		if f.ID == 0 || i > 0 && f.ID <= l.began[i-1].ID {
			t.Errorf("flight %d has id %d", i, f.ID)
		}
		of := l.ends[f.ID]
		if len(of) != 1 {
			t.Fatalf("flight %d ended %d times", f.ID, len(of))
		}
		if of[0].At.Before(f.Began) {
			t.Errorf("flight %d ended at %v, before it began at %v", f.ID, of[0].At, f.Began)
		}
		ends = append(ends, of[0])
	}
	if n := len(l.asked[0]); n > 0 {
		t.Errorf("%d ranges were asked for without a flight", n)
	}
	return slices.Clone(l.began), ends
}

func TestAPullIsOneFlightHoweverManyWaitForIt(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 4*testSegment))
	r, log := flightRig(t, src, nil)
	joined := make(chan struct{})
	log.onto = func(Flight) { <-joined }
	var all sync.WaitGroup
	for _, reason := range []string{"first", "later", "later"} {
		m, err := r.puller.Manifest(t.Context(), testRef)
		if err != nil {
			t.Fatal(err)
		}
		before := r.puller.join(m, false, reason) // it is there before the next one
		all.Go(func() {
			if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Reason: reason}); err != nil {
				t.Error(err)
			}
			r.puller.leave(before)
		})
	}
	close(joined)
	all.Wait()
	m := r.ensure(t) // everything is there: no flight
	again := testRef
	again.Revision = "other"
	if _, err := r.puller.Ensure(t.Context(), again, EnsureOptions{}); err != nil {
		t.Error(err)
	}
	flights, ends := log.all(t)
	if len(flights) != 1 {
		t.Fatalf("%d flights, want 1", len(flights))
	}
	want := Flight{
		ID: flights[0].ID, Ref: testRef.String(), Digest: m.Digest.String(), Source: "mem", Size: m.Size(), Missing: m.Size(),
		Files: len(m.Files), Reason: "first", Began: flights[0].Began,
	}
	if flights[0] != want {
		t.Errorf("flight %+v, want %+v", flights[0], want)
	}
	if ends[0].Err != nil || ends[0].Bytes != m.Size() || ends[0].Retries != 0 {
		t.Errorf("it ended with %+v, want %d bytes", ends[0], m.Size())
	}
	if n := len(log.asked[want.ID]); n != len(src.opens) {
		t.Errorf("%d of %d ranges are the flight's", n, len(src.opens))
	}
}

func TestAFlightCountsWhatIsFetchedAgain(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	wrong, broken := true, true
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		switch {
		case f.Path == shard1 && off == testSegment && wrong:
			wrong = false
			body = bytes.Clone(body)
			body[7] ^= 1
		case f.Path == shard1 && off == 0 && broken:
			broken = false
			return bytes.NewReader(body[:100]), nil
		}
		return bytes.NewReader(body), nil
	}
	r, log := flightRig(t, src, nil)
	m := r.ensure(t)
	f, _ := m.File(shard1)
	_, ends := log.all(t)
	if len(ends) != 1 || ends[0].Err != nil || ends[0].Bytes != m.Size()+f.Size || ends[0].Bytes != src.servedBytes() || ends[0].Retries != 1 {
		t.Errorf("got %+v, want %d bytes and one retry", ends, m.Size()+f.Size)
	}
}

func TestAFlightThatFailsSaysWhy(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	cause := errors.New("no such bytes")
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		switch {
		case f.Path != shard1:
			return bytes.NewReader(body), nil
		case off == 0:
			return bytes.NewReader(body[:100]), nil
		}
		return nil, cause
	}
	r, log := flightRig(t, src, nil, func(_ *Options, p *PullerOptions) { p.Attempts = 2 })
	_, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
	if !errors.Is(err, cause) {
		t.Fatalf("Ensure: %v", err)
	}
	_, ends := log.all(t)
	stats := r.puller.Stats()
	if len(ends) != 1 || !errors.Is(ends[0].Err, cause) || errors.Is(ends[0].Err, ErrGivenUp) ||
		ends[0].Bytes != stats.OriginBytes || int64(ends[0].Retries) != stats.Retries {
		t.Errorf("got %+v, want the cause and what %+v tells", ends, stats)
	}
}

func TestAFlightGivenUpIsFollowedByOneForTheRest(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 10*testSegment))
	ctx, cancel := context.WithCancel(t.Context())
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 5*testSegment {
			cancel()
			return &closableReader{closed: make(chan struct{})}, nil
		}
		return bytes.NewReader(body), nil
	}
	r, log := flightRig(t, src, nil, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	if _, err := r.puller.Ensure(ctx, testRef, EnsureOptions{Reason: "one"}); !errors.Is(err, context.Canceled) {
		t.Fatalf("Ensure: %v, want context.Canceled", err)
	}
	if err := r.puller.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	src.set(func() { src.fault = nil })
	m, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Reason: "two"})
	if err != nil {
		t.Fatal(err)
	}
	f, _ := m.File(shard1)
	rest := f.Size - 5*testSegment
	flights, ends := log.all(t)
	if len(flights) != 2 || flights[0].Reason != "one" || flights[1].Reason != "two" {
		t.Fatalf("flights %+v", flights)
	}
	if !errors.Is(ends[0].Err, ErrGivenUp) || ends[0].Bytes != m.Size()-rest {
		t.Errorf("the first ended with %+v, want %d bytes", ends[0], m.Size()-rest)
	}
	if flights[1].Missing != rest || flights[1].Files != 1 || ends[1].Err != nil || ends[1].Bytes != rest {
		t.Errorf("the second is %+v and ended with %+v, want %d bytes of one file", flights[1], ends[1], rest)
	}
}

func TestFlightsThatShareAFileCountWhatEachStreams(t *testing.T) {
	t.Parallel()
	shared := tensorFile("shared", 4*testSegment, 1)
	src := newMemSource(map[string][]byte{"config.json": []byte("{}"), "model.safetensors": shared})
	second := newMemSource(map[string][]byte{"config.json": []byte("{}\n"), "model.safetensors": shared, "more.safetensors": tensorFile("more", testSegment, 2)})
	second.name = "second"
	both := make(chan struct{})
	src.fault = func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
		if f.Path == "model.safetensors" {
			return &gate{r: bytes.NewReader(body), open: both}, nil
		}
		return bytes.NewReader(body), nil
	}
	r, log := flightRig(t, src, []Rule{{Source: second, Refs: []string{"other/*"}}}, func(_ *Options, p *PullerOptions) { p.Streams = 2 })
	started := make(chan struct{})
	log.onto = func(f Flight) {
		if f.Source == "mem" {
			close(started)
			return
		}
		close(both)
	}
	other := artifact.Ref{Scheme: artifact.SchemeHub, Name: "other/large", Revision: "main"}
	var all sync.WaitGroup
	all.Go(func() { r.ensure(t) })
	<-started
	m, err := r.puller.Ensure(t.Context(), other, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all.Wait()
	flights, ends := log.all(t)
	if len(flights) != 2 || flights[0].Source != "mem" || flights[1].Source != "second" || flights[1].Size != m.Size() || flights[1].Files != 3 {
		t.Fatalf("flights %+v", flights)
	}
	if got, want := ends[0].Bytes+ends[1].Bytes, int64(len("{}"))+m.Size(); got != want {
		t.Errorf("%d bytes in all, want each once: %d", got, want)
	}
	for i, s := range []*memSource{src, second} {
		if ends[i].Err != nil || ends[i].Bytes != s.servedBytes() {
			t.Errorf("flight %d ended with %+v, its source gave %d bytes", i, ends[i], s.servedBytes())
		}
	}
}

func TestAFlightHasTheReasonOfWhoeverBeganIt(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r, log := flightRig(t, src, nil)
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{Reason: ReasonMirror})
	if err != nil {
		t.Fatal(err)
	}
	r.ensure(t)
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	f, _ := m.File(shard1)
	if err := r.store.discard(f.SHA256); err != nil {
		t.Fatal(err)
	}
	mended, stop := context.WithCancel(t.Context())
	log.onto = func(Flight) { stop() } // Run ends, and with it what only it wants
	if err := r.puller.Run(mended); err != nil {
		t.Error(err)
	}
	log.onto = nil
	r.ensure(t)
	flights, _ := log.all(t)
	var reasons []string
	for _, f := range flights {
		reasons = append(reasons, f.Reason)
	}
	if want := []string{ReasonMirror, ReasonRepair}; !slices.Equal(reasons[:2], want) || len(reasons) > 2 && reasons[2] != ReasonUnknown {
		t.Errorf("reasons %q, want %q and at most an unknown one", reasons, want)
	}
}

func TestAPullWithoutRoomIsNoFlight(t *testing.T) {
	t.Parallel()
	r, log := flightRig(t, newMemSource(model(1, 2*testSegment)), nil, func(o *Options, _ *PullerOptions) { o.Budget = 1 })
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, ErrNoSpace) {
		t.Errorf("Ensure: %v, want ErrNoSpace", err)
	}
	if flights, _ := log.all(t); len(flights) != 0 {
		t.Errorf("flights %+v", flights)
	}
}

func TestIdsOfFlightsBeginWithTheTimeAndAreNeverZero(t *testing.T) {
	t.Parallel()
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, c := range map[string]struct {
		opts PullerOptions
		want []uint32
	}{
		"by the time": {PullerOptions{Now: func() time.Time { return began }}, []uint32{uint32(began.Unix()), uint32(began.Unix()) + 1}},
		"given":       {PullerOptions{FirstFlight: 7}, []uint32{7, 8, 9}},
		"at the end":  {PullerOptions{FirstFlight: math.MaxUint32}, []uint32{math.MaxUint32, 1, 2}},
	} {
		c.opts.Store = newRig(t, newMemSource(nil)).store
		p, err := NewPuller(c.opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range c.want {
			if got := p.nextFlight(); got != want {
				t.Errorf("%s: id %d, want %d", name, got, want)
			}
		}
	}
}
