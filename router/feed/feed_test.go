package feed

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/report"
)

// patience bounds waits that a working feed ends at once.
const patience = 30 * time.Second

// seen is one call of a Sink.
type seen struct {
	node       string
	epoch, seq uint64
	endpoints  int
	forgotten  bool
}

type recorder chan seen

func (r recorder) Apply(s *report.State, _ time.Time) {
	r <- seen{node: s.Node(), epoch: s.Epoch(), seq: s.Seq(), endpoints: len(s.Endpoints())}
}

func (r recorder) Forget(node string) { r <- seen{node: node, forgotten: true} }

// until waits for a call that the condition accepts.
func (r recorder) until(t *testing.T, what string, accept func(seen) bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		select {
		case s := <-r:
			if accept(s) {
				return
			}
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// serve runs a report server on the address and gives the address it has.
func serve(t *testing.T, address string, server report.NodeReportServer, extra ...grpc.ServerOption) (string, func()) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(append(report.ServerOptions(), extra...)...)
	report.RegisterNodeReportServer(s, server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(listener)
	}()
	stop := func() {
		s.Stop()
		<-done
	}
	t.Cleanup(stop)
	return listener.Addr().String(), stop
}

func publisher(t *testing.T, node string, epoch uint64, endpoints ...string) *report.Publisher {
	t.Helper()
	p, err := report.NewPublisher(report.PublisherOptions{Node: node, Epoch: epoch})
	if err != nil {
		t.Fatal(err)
	}
	set(t, p, endpoints...)
	return p
}

func set(t *testing.T, p *report.Publisher, names ...string) {
	t.Helper()
	var endpoints []*report.Endpoint
	for _, name := range names {
		endpoints = append(endpoints, &report.Endpoint{Name: name, Url: "http://127.0.0.1:1"})
	}
	if err := p.SetEndpoints(endpoints); err != nil {
		t.Fatal(err)
	}
}

// run runs a feed until the test ends.
func run(t *testing.T, nodes ...Node) (*Feed, recorder) {
	t.Helper()
	sink := make(recorder, 1024)
	f, err := New(Options{Nodes: nodes, Sink: sink, Router: "test"})
	if err != nil {
		t.Fatal(err)
	}
	start(t, f)
	return f, sink
}

func start(t *testing.T, f *Feed) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestAStateArrivesAndFollowsTheNode(t *testing.T) {
	t.Parallel()
	p := publisher(t, "n1", 7, "a")
	address, _ := serve(t, "127.0.0.1:0", p)
	f, sink := run(t, Node{Address: address, Name: "n1"})
	sink.until(t, "the snapshot", func(s seen) bool { return s.node == "n1" && s.epoch == 7 && s.endpoints == 1 })
	set(t, p, "a", "b")
	sink.until(t, "the delta", func(s seen) bool { return s.endpoints == 2 && s.seq == p.Seq() })
	stats := f.Stats()
	if len(stats) != 1 || stats[0].Node != "n1" || stats[0].Epoch != 7 || stats[0].Snapshots != 1 || stats[0].AgeSeconds < 0 {
		t.Errorf("stats %+v", stats)
	}
}

func TestARestartedAgentIsFollowedAgain(t *testing.T) {
	t.Parallel()
	address, stop := serve(t, "127.0.0.1:0", publisher(t, "n1", 7, "a"))
	_, sink := run(t, Node{Address: address})
	sink.until(t, "the first agent", func(s seen) bool { return s.epoch == 7 })
	stop()
	serve(t, address, publisher(t, "n1", 8, "a", "b"))
	sink.until(t, "the second agent", func(s seen) bool { return s.epoch == 8 && s.endpoints == 2 })
}

// skipping serves streams of which the first skips a sequence number.
type skipping struct {
	report.UnimplementedNodeReportServer
	requests chan *report.WatchRequest
}

func (s skipping) Watch(req *report.WatchRequest, stream grpc.ServerStreamingServer[report.Report]) error {
	s.requests <- req
	message := func(seq uint64, snapshot bool) *report.Report {
		return &report.Report{
			Version: report.Version, Node: "n1", Epoch: 1, Seq: seq, Snapshot: snapshot,
			Endpoints: []*report.Endpoint{{Name: "a", Url: "http://127.0.0.1:1"}},
		}
	}
	if err := stream.Send(message(5, true)); err != nil {
		return err
	}
	if err := stream.Send(message(7, false)); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func TestAGapAsksForASnapshot(t *testing.T) {
	t.Parallel()
	server := skipping{requests: make(chan *report.WatchRequest, 64)}
	address, _ := serve(t, "127.0.0.1:0", server)
	f, _ := run(t, Node{Address: address})
	for range 2 {
		req := <-server.requests
		if req.GetEpoch() != 0 || req.GetSeq() != 0 || req.GetRouter() != "test" {
			t.Errorf("asked to resume from epoch %d sequence %d", req.GetEpoch(), req.GetSeq())
		}
	}
	if s := f.Stats()[0]; s.Gaps == 0 || s.Node != "n1" {
		t.Errorf("stats %+v", s)
	}
}

func TestANodeThatIsNoLongerConfiguredIsForgotten(t *testing.T) {
	t.Parallel()
	one, _ := serve(t, "127.0.0.1:0", publisher(t, "n1", 1, "a"))
	two, _ := serve(t, "127.0.0.1:0", publisher(t, "n2", 1, "a"))
	f, sink := run(t, Node{Address: one})
	sink.until(t, "the first node", func(s seen) bool { return s.node == "n1" })
	if err := f.SetNodes([]Node{{Address: two}}); err != nil {
		t.Fatal(err)
	}
	sink.until(t, "the end of the first", func(s seen) bool { return s.node == "n1" && s.forgotten })
	sink.until(t, "the second node", func(s seen) bool { return s.node == "n2" && !s.forgotten })
}

func TestTwoAddressesMayNotReportOneNode(t *testing.T) {
	t.Parallel()
	server := skipping{requests: make(chan *report.WatchRequest, 64)}
	one, _ := serve(t, "127.0.0.1:0", publisher(t, "n1", 1, "a"))
	two, _ := serve(t, "127.0.0.1:0", server)
	f, sink := run(t, Node{Address: one})
	sink.until(t, "the node", func(s seen) bool { return s.node == "n1" })
	if err := f.SetNodes([]Node{{Address: one}, {Address: two}}); err != nil {
		t.Fatal(err)
	}
	<-server.requests
	<-server.requests // the first stream was refused
	stats := f.Stats()
	if len(stats) != 2 || stats[0].Node != "n1" || stats[1].Node != "" || !strings.Contains(stats[1].LastError, ErrName.Error()) {
		t.Errorf("stats %+v", stats)
	}
}

func TestPlainTextIsForLoopback(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		address  string
		insecure bool
		fine     bool
	}{
		{"127.0.0.1:7411", false, true},
		{"[::1]:7411", false, true},
		{"10.1.2.3:7411", false, false},
		{"10.1.2.3:7411", true, true},
		{"localhost", true, false},
	} {
		_, err := New(Options{Nodes: []Node{{Address: c.address}}, Sink: make(recorder), Insecure: c.insecure})
		if (err == nil) != c.fine {
			t.Errorf("%s, insecure %v: %v", c.address, c.insecure, err)
		}
	}
}

func certificates(t *testing.T, ca *identity.CA, role identity.Role, name string) identity.Files {
	t.Helper()
	dir := t.TempDir()
	files := identity.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	pair, err := ca.Issue(role, name, identity.IssueOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := identity.WritePair(files.Cert, files.Key, pair); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files.CA, ca.Cert(), 0o600); err != nil {
		t.Fatal(err)
	}
	return files
}

func TestTheRouterWatchesAgentsAndNobodyElseOverTLS(t *testing.T) {
	t.Parallel()
	ca, err := identity.NewCA(identity.Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	client, err := identity.ClientTLS(certificates(t, ca, identity.RoleRouter, "r1"), identity.RoleAgent)
	if err != nil {
		t.Fatal(err)
	}
	var nodes []Node
	for i, role := range []identity.Role{identity.RoleAgent, identity.RoleRouter} {
		server, err := identity.ServerTLS(certificates(t, ca, role, "n1"), identity.RoleRouter)
		if err != nil {
			t.Fatal(err)
		}
		address, _ := serve(t, "127.0.0.1:0", publisher(t, fmt.Sprint("n", i), 1, "a"), grpc.Creds(credentials.NewTLS(server)))
		nodes = append(nodes, Node{Address: address})
	}
	sink := make(recorder, 1024)
	f, err := New(Options{Nodes: nodes, Sink: sink, TLS: client})
	if err != nil {
		t.Fatal(err)
	}
	start(t, f)
	sink.until(t, "the agent", func(s seen) bool { return s.node == "n0" })
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for f.Stats()[1].LastError == "" {
		<-tick.C
	}
	if s := f.Stats()[1]; s.Messages != 0 {
		t.Errorf("a node with a router's certificate was heard: %+v", s)
	}
}
