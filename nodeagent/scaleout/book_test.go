package scaleout

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// node is a Sampler whose samples the test makes.
type node struct {
	next    netattr.Snapshot
	last    atomic.Pointer[netattr.Snapshot]
	changed chan struct{}
	fast    int
	flights map[uint32]bool
	pass    func(seconds int) // lets time go by with a sample every second
}

func newNode() *node {
	n := &node{changed: make(chan struct{}, 1), flights: map[uint32]bool{}}
	n.next = netattr.Snapshot{
		Totals: map[netattr.Kind]traffic.Counts{}, Flights: map[uint32]traffic.Counts{}, Pods: map[string]netattr.Pod{},
		Sight: netattr.SightFull,
	}
	n.Sample()
	return n
}

func (n *node) Sample() *netattr.Snapshot {
	s := n.next
	s.At = time.Now()
	s.Totals, s.Flights = map[netattr.Kind]traffic.Counts{}, map[uint32]traffic.Counts{}
	maps.Copy(s.Totals, n.next.Totals)
	maps.Copy(s.Flights, n.next.Flights)
	s.Shares = append([]netattr.Share(nil), n.next.Shares...)
	n.last.Store(&s)
	select {
	case n.changed <- struct{}{}:
	default:
	}
	return &s
}

func (n *node) Snapshot() *netattr.Snapshot          { return n.last.Load() }
func (n *node) Subscribe() (<-chan struct{}, func()) { return n.changed, func() {} }
func (n *node) Fast() func()                         { n.fast++; return func() { n.fast-- } }
func (n *node) BeginFlight(id uint32)                { n.flights[id] = true }
func (n *node) EndFlight(id uint32)                  { delete(n.flights, id) }

// moves adds bytes that an owner received.
func (n *node) moves(owner netattr.Owner, class traffic.Class, received uint64) {
	kind := netattr.Kind{Class: class, Locality: traffic.OffNode}
	c := n.next.Totals[kind]
	c.Received += received
	n.next.Totals[kind] = c
	for i := range n.next.Shares {
		if s := &n.next.Shares[i]; s.Owner == owner && s.Kind == kind {
			s.Received += received
			return
		}
	}
	n.next.Shares = append(n.next.Shares, netattr.Share{Owner: owner, Kind: kind, Counts: traffic.Counts{Received: received}})
}

// serves makes the next samples have one round trip.
func (n *node) serves(rtt time.Duration) {
	n.next.Live = netattr.Live{Connections: 1}
	n.next.Live.RTT.Add(rtt)
}

// rig runs a Book in a bubble.
func rig(t *testing.T, test func(t *testing.T, n *node, b *Book, log *bytes.Buffer)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n, log := newNode(), &bytes.Buffer{}
		fetched := map[uint32]int64{7: 900}
		b := NewBook(Options{
			Node: "node-a", Sampler: n, Log: slog.New(slog.NewJSONHandler(log, nil)), Fetched: func(id uint32) int64 { return fetched[id] },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = b.Run(ctx) }()
		n.pass = func(seconds int) {
			for range seconds {
				time.Sleep(time.Second)
				n.Sample()
				synctest.Wait()
			}
		}
		test(t, n, b, log)
		cancel()
		<-done
	})
}

func flight(id uint32) Flight {
	return Flight{ID: id, Ref: "hub://org/m", Digest: "d", Source: "origin", Reason: "mirror", Size: 2000, Missing: 1000}
}

var (
	agent  = netattr.Owner{PodUID: "uid-agent", Container: "c1"}
	engine = netattr.Owner{PodUID: "uid-engine", Container: "c2"}
)

func TestARecordHoldsWhatPassedBetweenItsBeginAndItsEnd(t *testing.T) {
	rig(t, func(t *testing.T, n *node, b *Book, log *bytes.Buffer) {
		n.next.Pods["uid-engine"] = netattr.Pod{UID: "uid-engine", Namespace: "team", Name: "llama"}
		n.moves(engine, traffic.Serving, 5000)
		n.next.OnWire[traffic.Receive], n.next.Unattributed[traffic.Receive] = 7000, 100
		n.serves(time.Millisecond)
		n.pass(40)
		ended := b.Began(flight(7))
		if n.fast != 1 || !n.flights[7] {
			t.Errorf("fast %d, flights %v", n.fast, n.flights)
		}
		n.serves(4 * time.Millisecond)
		n.moves(agent, traffic.Weights, 1050)
		n.moves(engine, traffic.Serving, 300)
		n.next.Flights[7] = traffic.Counts{Received: 1050, Transmitted: 20}
		n.next.OnWire[traffic.Receive] += 1500
		n.next.Unattributed[traffic.Receive] += 60
		n.pass(10)
		running := b.List()[0]
		if running.State != StateRunning || running.Fetched() != 900 || !running.End.IsZero() {
			t.Errorf("while it runs the record is %+v", running)
		}
		ended(End{Bytes: 1000})
		if n.fast != 0 || len(n.flights) != 0 {
			t.Errorf("fast %d, flights %v", n.fast, n.flights)
		}
		r := b.List()[0]
		if r.State != StateReady || r.Duration(time.Now()) != 10*time.Second || r.Fetched() != 1000 || r.Sources[0] != (Source{"origin", KindOrigin, 1000}) {
			t.Errorf("record is %+v", r)
		}
		if r.Connections != (Bytes{Received: 1050, Transmitted: 20}) || r.Devices.Received != 1500 || r.Unattributed.Received != 60 {
			t.Errorf("connections %+v, devices %+v, unattributed %+v", r.Connections, r.Devices, r.Unattributed)
		}
		want := []Share{
			{Pod: "uid-agent", Container: "c1", Class: "weights", Locality: "off_node", Bytes: Bytes{Received: 1050}},
			{Pod: "team/llama", Container: "c2", Class: "serving", Locality: "off_node", Bytes: Bytes{Received: 300}},
		}
		if fmt.Sprint(r.Shares) != fmt.Sprint(want) {
			t.Errorf("shares are %+v", r.Shares)
		}
		if near := func(got float64, want time.Duration) bool {
			return got > want.Seconds()*0.9 && got < want.Seconds()*1.1
		}; !near(r.Before.P90, time.Millisecond) || !near(r.During.P90, 4*time.Millisecond) || r.Before.Samples < 29 || r.During.Samples < 9 {
			t.Errorf("before %+v, during %+v", r.Before, r.During)
		}
		if last := r.Series[len(r.Series)-1]; last.Received["weights"] != 1050 || last.Received["serving"] != 300 || last.UnattributedReceived != 60 || last.Seconds != 10 {
			t.Errorf("last point is %+v", last)
		}
		lines := strings.Count(log.String(), "\n")
		var line map[string]any
		if err := json.Unmarshal(log.Bytes(), &line); err != nil || lines != 1 || line["ref"] != "hub://org/m" || line["scaleout"] != r.ID {
			t.Errorf("%d lines of log: %s", lines, log)
		}
	})
}

func TestPullsAtTheSameTimeAreFlaggedAndDoNotSplitWhatOthersMoved(t *testing.T) {
	rig(t, func(t *testing.T, n *node, b *Book, _ *bytes.Buffer) {
		first := b.Began(flight(7))
		n.moves(engine, traffic.Serving, 100)
		n.pass(1)
		second := b.Began(flight(8))
		n.moves(engine, traffic.Serving, 10)
		n.next.Flights[7], n.next.Flights[8] = traffic.Counts{Received: 70}, traffic.Counts{Received: 80}
		n.pass(1)
		first(End{})
		third := b.Began(flight(9))
		n.pass(1)
		second(End{})
		third(End{})
		by := map[string]Record{}
		for _, r := range b.List() {
			by[r.ID] = r
		}
		for id, want := range map[string]struct {
			overlap string
			serving uint64
			own     uint64
		}{"7": {"[8]", 110, 70}, "8": {"[7 9]", 10, 80}, "9": {"[8]", 0, 0}} {
			r := by[id]
			var serving uint64
			for _, s := range r.Shares {
				serving += s.Received
			}
			if fmt.Sprint(r.Overlap) != want.overlap || serving != want.serving || r.Connections.Received != want.own {
				t.Errorf("%s: overlap %v, serving %d, own %d; want %+v", id, r.Overlap, serving, r.Connections.Received, want)
			}
		}
	})
}

func TestAPullThatFailsIsRecordedWithItsCause(t *testing.T) {
	rig(t, func(t *testing.T, _ *node, b *Book, log *bytes.Buffer) {
		f := flight(7)
		f.Peer = true
		b.Began(f)(End{Err: errors.New("source is gone"), Bytes: 12})
		r := b.List()[0]
		if r.State != StateFailed || r.Error != "source is gone" || r.Sources[0].Kind != KindPeer || r.Fetched() != 12 || !strings.Contains(log.String(), "source is gone") {
			t.Errorf("record is %+v, log %s", r, log)
		}
	})
}

func TestRecordsAreBounded(t *testing.T) {
	rig(t, func(t *testing.T, n *node, b *Book, _ *bytes.Buffer) {
		var ends []func(End)
		for i := range uint32(MaxRunning + 10) {
			ends = append(ends, b.Began(flight(100+i)))
		}
		if got := len(b.List()); got != MaxRunning {
			t.Errorf("%d records run, want %d", got, MaxRunning)
		}
		for _, end := range ends {
			end(End{})
		}
		if len(n.flights) != 0 || n.fast != 0 {
			t.Errorf("flights %v, fast %d", n.flights, n.fast)
		}
		for i := range uint32(MaxEnded) {
			b.Began(flight(1000 + i))(End{})
		}
		list := b.List()
		if len(list) != MaxEnded || list[0].ID != "tj" {
			t.Errorf("%d records, the latest %s", len(list), list[0].ID)
		}
		for i := range 100 {
			n.moves(netattr.Owner{PodUID: fmt.Sprint("uid-", i)}, traffic.Other, uint64(1000+i))
		}
		before := n.Sample()
		for i := range 100 {
			n.moves(netattr.Owner{PodUID: fmt.Sprint("uid-", i)}, traffic.Other, uint64(1+i))
		}
		shares := sharesBetween(before, n.Sample())
		var sum uint64
		for _, s := range shares {
			sum += s.Received
		}
		if len(shares) != maxShares+1 || sum != 5050 || shares[maxShares].Class != "other" {
			t.Errorf("%d shares of %d bytes, want %d of 5050", len(shares), sum, maxShares+1)
		}
	})
}

func TestALongScaleOutNamesSomeOfThoseThatCameAndWent(t *testing.T) {
	rig(t, func(t *testing.T, _ *node, b *Book, _ *bytes.Buffer) {
		ended := b.Began(flight(7))
		for i := range uint32(1000) {
			b.Began(flight(100 + i))(End{Err: errors.New("source is gone")})
		}
		ended(End{})
		if got := b.List()[0].Overlap; len(got) != maxOverlap || got[0] != "2s" {
			t.Errorf("%d are named, from %q", len(got), got[0])
		}
	})
}

func TestWhatOwnersThatWentHadMovedBeforeIsInNoRecord(t *testing.T) {
	rig(t, func(t *testing.T, n *node, b *Book, _ *bytes.Buffer) {
		gone, nobody := netattr.Owner{PodUID: "uid-gone"}, netattr.Owner{}
		n.moves(gone, traffic.Other, 1<<40)
		n.moves(nobody, traffic.Other, 50)
		ended := b.Began(flight(7))
		n.moves(gone, traffic.Other, 5)
		n.pass(1)
		// Its share goes to nobody's, as where there are too many.
		kind := netattr.Kind{Class: traffic.Other, Locality: traffic.OffNode}
		n.next.Shares = []netattr.Share{{Owner: nobody, Kind: kind, Counts: traffic.Counts{Received: 1<<40 + 55}}}
		n.moves(nobody, traffic.Other, 7)
		n.moves(agent, traffic.Weights, 900)
		n.pass(1)
		ended(End{})
		want := []Share{
			{Pod: "uid-agent", Container: "c1", Class: "weights", Locality: "off_node", Bytes: Bytes{Received: 900}},
			{Unit: goneUnit, Class: "other", Locality: "off_node", Bytes: Bytes{Received: 12}},
		}
		if diff := cmp.Diff(want, b.List()[0].Shares); diff != "" {
			t.Error(diff)
		}
	})
}

func TestALongScaleOutKeepsItsWholeCourse(t *testing.T) {
	rig(t, func(t *testing.T, n *node, b *Book, _ *bytes.Buffer) {
		ended := b.Began(flight(7))
		for range 1000 {
			n.moves(agent, traffic.Weights, 1)
			n.pass(1)
		}
		ended(End{})
		series := b.List()[0].Series
		if len(series) > maxPoints || len(series) < maxPoints/4 {
			t.Fatalf("%d points, want at most %d", len(series), maxPoints)
		}
		if first, last := series[0], series[len(series)-1]; first.Seconds > 10 || last.Seconds != 1000 || last.Received["weights"] != 1000 {
			t.Errorf("from %+v to %+v", first, last)
		}
		for i := 1; i < len(series); i++ {
			if step := series[i].Seconds - series[i-1].Seconds; step <= 0 || step > 20 {
				t.Fatalf("a step of %v s at %d", step, i)
			}
		}
	})
}
