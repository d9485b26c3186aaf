package report

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

var update = flag.Bool("update", false, "write the golden files of the present version")

func fullSnapshot() *Report {
	return &Report{
		Version: 1, Node: "node-a", Epoch: 1764400000000000001, Seq: 7, Snapshot: true, UnixMillis: 1764400001234,
		Artifacts: []*Artifact{{
			Ref: "hub://org/name@main", Digest: strings.Repeat("ab", 32), Commit: strings.Repeat("c", 40),
			State: ArtifactState_ARTIFACT_STATE_SUSPECT, SizeBytes: 1 << 40, PresentBytes: 12345, Detail: "model.safetensors: sha256 differs",
		}},
		Endpoints: []*Endpoint{{
			Name: "engine-0", Url: "http://127.0.0.1:8000", Engine: EngineKind_ENGINE_KIND_VLLM, Pool: "chat",
			ServedModels: []string{"m", "m-lora"}, Devices: []string{"gpu-0"}, Accelerator: "H200", Ref: "hub://org/name@main",
			Load: &Load{
				UnixMillis: 1764400001000, Running: 3, Waiting: 2, KvUsage: 0.25, KvCapacityTokens: 500000, BlockTokens: 16,
				PromptTokensTotal: 1000, CachedTokensTotal: 900, GeneratedTokensTotal: 100, MaxRunning: 256,
			},
			Reachable: true, Incarnation: 42, Draining: true,
		}},
		Devices: []*Device{{
			Id: "gpu-0", Product: "NVIDIA H200", Health: Health_HEALTH_UNHEALTHY,
			Conditions: []*Condition{{Key: "lost", Value: "xid-79", SinceUnixMillis: 1764400000999}},
		}},
		WeightsSpace: &Space{CapacityBytes: 100, UsedBytes: 60, FreeBytes: 40},
	}
}

func fullDelta() *Report {
	return &Report{
		Version: 1, Node: "node-a", Epoch: 1764400000000000001, Seq: 8, UnixMillis: 1764400002234,
		Devices:       []*Device{{Id: "gpu-1", Product: "NVIDIA H200", Health: Health_HEALTH_HEALTHY}},
		GoneArtifacts: []string{"hub://org/name@main"}, GoneEndpoints: []string{"engine-0"}, GoneDevices: []string{"gpu-0"},
	}
}

func TestTheBytesOfVersionOneStayAsStored(t *testing.T) {
	t.Parallel()
	for file, message := range map[string]*Report{"testdata/report_v1.bin": fullSnapshot(), "testdata/report_v1_delta.bin": fullDelta()} {
		got, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(file, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: bytes differ (-stored +written):\n%s", file, diff)
		}
	}
}

func TestAStoredReportOfVersionOneIsRead(t *testing.T) {
	t.Parallel()
	var s State
	for _, file := range []string{"testdata/report_v1.bin", "testdata/report_v1_delta.bin"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var r Report
		if err := proto.Unmarshal(data, &r); err != nil {
			t.Fatal(err)
		}
		if err := s.Apply(&r); err != nil {
			t.Fatalf("apply %s: %v", file, err)
		}
		if r.Snapshot && (s.Artifact("hub://org/name@main") == nil || s.Device("gpu-0").GetConditions()[0].GetValue() != "xid-79") {
			t.Errorf("%s: state lacks what the file says", file)
		}
	}
	if len(s.Artifacts())+len(s.Endpoints()) != 0 || s.Device("gpu-1") == nil || s.Seq() != 8 || s.Space().GetUsedBytes() != 60 {
		t.Errorf("state after the delta: seq %d, %d artifacts, %d endpoints", s.Seq(), len(s.Artifacts()), len(s.Endpoints()))
	}
}

func TestApplyRefusesWhatDoesNotFollowAndKeepsTheState(t *testing.T) {
	t.Parallel()
	change := func(base *Report, f func(*Report)) *Report { f(base); return base }
	cases := map[string]struct {
		message *Report
		want    error
	}{
		"a newer version":            {change(fullSnapshot(), func(r *Report) { r.Version = Version + 1 }), ErrVersion},
		"version 0":                  {change(fullSnapshot(), func(r *Report) { r.Version = 0 }), ErrInvalid},
		"epoch 0":                    {change(fullSnapshot(), func(r *Report) { r.Epoch = 0 }), ErrInvalid},
		"no node":                    {change(fullSnapshot(), func(r *Report) { r.Node = "" }), ErrInvalid},
		"a repeated artifact":        {change(fullSnapshot(), func(r *Report) { r.Artifacts = append(r.Artifacts, r.Artifacts[0]) }), ErrInvalid},
		"an endpoint without a name": {change(fullSnapshot(), func(r *Report) { r.Endpoints[0].Name = "" }), ErrInvalid},
		"a usage above 1":            {change(fullSnapshot(), func(r *Report) { r.Endpoints[0].Load.KvUsage = 1.5 }), ErrInvalid},
		"an endless text":            {change(fullSnapshot(), func(r *Report) { r.Artifacts[0].Detail = strings.Repeat("x", MaxTextBytes+1) }), ErrInvalid},
		"a snapshot with gone keys":  {change(fullSnapshot(), func(r *Report) { r.GoneDevices = []string{"x"} }), ErrInvalid},
		"a skipped sequence":         {change(fullDelta(), func(r *Report) { r.Seq = 9 }), ErrGap},
		"a repeated sequence":        {change(fullDelta(), func(r *Report) { r.Seq = 7 }), ErrGap},
		"another epoch":              {change(fullDelta(), func(r *Report) { r.Epoch++ }), ErrGap},
		"another node":               {change(fullDelta(), func(r *Report) { r.Node = "node-b" }), ErrGap},
		"an idle message ahead":      {&Report{Version: 1, Node: "node-a", Epoch: fullDelta().Epoch, Seq: 8}, ErrGap},
		"too many objects": {change(fullDelta(), func(r *Report) {
			for i := range MaxDevices {
				r.Devices = append(r.Devices, &Device{Id: fmt.Sprint("d", i)})
			}
		}), ErrInvalid},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s State
			if err := s.Apply(fullSnapshot()); err != nil {
				t.Fatal(err)
			}
			if err := s.Apply(c.message); !errors.Is(err, c.want) {
				t.Errorf("Apply gave %v, want %v", err, c.want)
			}
			if s.Seq() != 7 || len(s.Artifacts()) != 1 || len(s.Devices()) != 1 {
				t.Errorf("a refused message changed the state: seq %d", s.Seq())
			}
		})
	}
	var fresh State
	if err := fresh.Apply(fullDelta()); !errors.Is(err, ErrGap) {
		t.Errorf("a delta before any snapshot gave %v, want ErrGap", err)
	}
}

// serve runs a Publisher on a real socket.
func serve(t *testing.T, p *Publisher) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(ServerOptions()...)
	RegisterNodeReportServer(server, p)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), append(DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return conn
}

func newPublisher(t *testing.T, epoch uint64) *Publisher {
	t.Helper()
	p, err := NewPublisher(PublisherOptions{Node: "node-a", Epoch: epoch})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var errEnough = errors.New("seen enough")

func TestWatchGivesASnapshotThenConsecutiveDeltas(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 5)
	if err := p.SetDevices(fullSnapshot().Devices); err != nil {
		t.Fatal(err)
	}
	conn := serve(t, p)
	var s State
	step := 0
	err := Watch(t.Context(), conn, Resume{Router: "r"}, func(r *Report) error {
		if err := s.Apply(r); err != nil {
			return err
		}
		step++
		switch step {
		case 1:
			if !r.Snapshot || s.Seq() != 2 || len(s.Devices()) != 1 {
				t.Errorf("first message: snapshot %v, seq %d", r.Snapshot, s.Seq())
			}
			if err := errors.Join(p.SetEndpoints(fullSnapshot().Endpoints), p.SetArtifacts(fullSnapshot().Artifacts), p.SetDevices(nil)); err != nil {
				return err
			}
		case 4:
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("Watch gave %v", err)
	}
	if s.Seq() != 5 || len(s.Devices()) != 0 || len(s.Endpoints()) != 1 || len(s.Artifacts()) != 1 {
		t.Errorf("state: seq %d, %d devices", s.Seq(), len(s.Devices()))
	}
	if diff := cmp.Diff(fullSnapshot().Endpoints, s.Endpoints(), protocmp.Transform()); diff != "" {
		t.Errorf("endpoints differ (-want +got):\n%s", diff)
	}
}

func TestWatchResumesOnlyAtThePresentEpochAndSequence(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 5)
	if err := p.SetDevices(fullSnapshot().Devices); err != nil {
		t.Fatal(err)
	}
	conn := serve(t, p)
	for _, c := range []struct {
		resume   Resume
		snapshot bool
	}{
		{Resume{Epoch: 5, Seq: 2}, false},
		{Resume{Epoch: 5, Seq: 1}, true},
		{Resume{Epoch: 5, Seq: 3}, true},
		{Resume{Epoch: 4, Seq: 2}, true},
		{Resume{}, true},
	} {
		var first *Report
		err := Watch(t.Context(), conn, c.resume, func(r *Report) error { first = r; return errEnough })
		if !errors.Is(err, errEnough) {
			t.Fatalf("Watch gave %v", err)
		}
		if first.Snapshot != c.snapshot || first.Seq != 2 {
			t.Errorf("resume at %+v: snapshot %v seq %d", c.resume, first.Snapshot, first.Seq)
		}
	}
}

func TestARequestWithoutVersionIsRefused(t *testing.T) {
	t.Parallel()
	stream, err := NewNodeReportClient(serve(t, newPublisher(t, 1))).Watch(t.Context(), &WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("Recv gave %v", err)
	}
}

func TestEqualStateIsNoChange(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 1)
	for range 3 {
		if err := errors.Join(p.SetDevices(fullSnapshot().Devices), p.SetSpace(&Space{CapacityBytes: 1})); err != nil {
			t.Fatal(err)
		}
	}
	if p.Seq() != 3 {
		t.Errorf("sequence is %d, want 3", p.Seq())
	}
}

func TestStateThatDoesNotFitAMessageIsRefusedAndTheOldStays(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 1)
	many := func(n int) (list []*Artifact) {
		for i := range n {
			list = append(list, &Artifact{Ref: fmt.Sprint("hub://a/", i), Detail: strings.Repeat("x", MaxTextBytes)})
		}
		return list
	}
	if err := p.SetArtifacts(many(1000)); err != nil {
		t.Fatal(err)
	}
	if err := p.SetArtifacts(many(3000)); !errors.Is(err, ErrTooMany) {
		t.Errorf("3000 long artifacts gave %v", err)
	}
	if err := p.SetArtifacts(many(MaxArtifacts + 1)); !errors.Is(err, ErrInvalid) {
		t.Errorf("too many artifacts gave %v", err)
	}
	messages, _ := p.after(0)
	if p.Seq() != 2 || len(messages) != 1 || len(messages[0].Artifacts) != 1000 {
		t.Errorf("a refused change was kept: seq %d", p.Seq())
	}
	if err := p.SetArtifacts([]*Artifact{{Ref: "hub://a/b", Detail: strings.Repeat("é", MaxTextBytes)}}); err != nil {
		t.Errorf("a long detail is cut, not refused: %v", err)
	}
}

func TestAReaderPastTheRetainedDeltasGetsASnapshot(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 1)
	for i := range retainedDeltas + 10 {
		if err := p.SetSpace(&Space{CapacityBytes: int64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	if messages, _ := p.after(p.Seq() - retainedDeltas); len(messages) != retainedDeltas || messages[0].Snapshot {
		t.Errorf("a reader at the edge got %d messages", len(messages))
	}
	if messages, _ := p.after(p.Seq() - retainedDeltas - 1); len(messages) != 1 || !messages[0].Snapshot {
		t.Errorf("a reader past the edge got %d messages", len(messages))
	}
	if messages, _ := p.after(p.Seq() + 1); len(messages) != 1 || !messages[0].Snapshot {
		t.Errorf("a reader of the future got %d messages", len(messages))
	}
	big := newPublisher(t, 1)
	for i := range 10 {
		var list []*Artifact
		for j := range 300 {
			list = append(list, &Artifact{Ref: fmt.Sprint("hub://a/", j), Detail: strings.Repeat(fmt.Sprint(i), 1000)})
		}
		if err := big.SetArtifacts(list); err != nil {
			t.Fatal(err)
		}
	}
	if len(big.deltas) > 4 || big.bytes > retainedBytes {
		t.Errorf("%d deltas of %d bytes are retained", len(big.deltas), big.bytes)
	}
}

// memoryStream stands for the gRPC stream where time is the bubble's.
type memoryStream struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan *Report
}

func (m *memoryStream) Context() context.Context { return m.ctx }

func (m *memoryStream) Send(r *Report) error {
	select {
	case m.sent <- r:
		return nil
	case <-m.ctx.Done():
		return m.ctx.Err()
	}
}

func TestAnIdleStreamBeatsAndASlowReaderCatchesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher(t, 9)
		ctx, cancel := context.WithCancel(t.Context())
		stream := &memoryStream{ctx: ctx, sent: make(chan *Report)}
		done := make(chan error, 1)
		go func() { done <- p.Watch(&WatchRequest{Version: 1}, stream) }()
		var s State
		next := func() *Report {
			r := <-stream.sent
			if err := s.Apply(r); err != nil {
				t.Fatal(err)
			}
			return r
		}
		next()
		start := time.Now()
		if r := next(); r.Snapshot || !changesNothing(r) || r.Seq != 1 || time.Since(start) != IdlePeriod {
			t.Errorf("idle stream sent %v after %v", r, time.Since(start))
		}
		for i := range 10 * retainedDeltas {
			if err := p.SetSpace(&Space{CapacityBytes: int64(i + 1)}); err != nil {
				t.Fatal(err)
			}
		}
		messages := 0
		for s.Seq() != p.Seq() {
			next()
			messages++
		}
		if messages > retainedDeltas+2 || s.Space().GetCapacityBytes() != 10*retainedDeltas {
			t.Errorf("the slow reader took %d messages to reach %v", messages, s.Space())
		}
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("Watch ended with %v", err)
		}
	})
}

func TestStreamsPastTheLimitAreRefused(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 1)
	for range MaxStreams {
		if !p.enter() {
			t.Fatal("a stream within the limit was refused")
		}
	}
	err := p.Watch(&WatchRequest{Version: 1}, &memoryStream{ctx: t.Context()})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("Watch gave %v", err)
	}
	p.leave()
	if !p.enter() {
		t.Error("a stream is refused after another ended")
	}
}

// silentConn gives a stream on which nothing comes.
type silentConn struct{ grpc.ClientConnInterface }

type silentStream struct {
	grpc.ClientStream
	ctx context.Context
}

func (silentConn) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return silentStream{ctx: ctx}, nil
}
func (s silentStream) SendMsg(any) error { return nil }
func (s silentStream) CloseSend() error  { return nil }
func (s silentStream) RecvMsg(any) error { <-s.ctx.Done(); return s.ctx.Err() }

func TestWatchEndsOnSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		err := Watch(t.Context(), silentConn{}, Resume{}, func(*Report) error { return nil })
		if !errors.Is(err, ErrSilent) || time.Since(start) != SilenceLimit {
			t.Errorf("Watch gave %v after %v", err, time.Since(start))
		}
	})
}

// talkingConn gives a stream on which a message is always waiting.
type talkingConn struct{ silentConn }

type talkingStream struct{ silentStream }

func (talkingConn) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return talkingStream{silentStream{ctx: ctx}}, nil
}
func (s talkingStream) RecvMsg(any) error { return s.ctx.Err() }

func TestTheTimeThatAReaderTakesIsNotTheNodesSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		messages := 0
		err := Watch(t.Context(), talkingConn{}, Resume{}, func(*Report) error {
			if messages++; messages == 3 {
				return errEnough
			}
			<-time.After(2 * SilenceLimit)
			return nil
		})
		if !errors.Is(err, errEnough) {
			t.Errorf("Watch gave %v after %d messages", err, messages)
		}
	})
}

func FuzzReport(f *testing.F) {
	for _, seed := range []*Report{fullSnapshot(), fullDelta(), snapshotWithScaleOuts(), {Version: 1, Node: "node-a", Epoch: 1764400000000000001, Seq: 7}} {
		data, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r Report
		if proto.Unmarshal(data, &r) != nil {
			return
		}
		var s State
		if err := s.Apply(fullSnapshot()); err != nil {
			t.Fatal(err)
		}
		if err := s.Apply(&r); err != nil {
			if s.Seq() != 7 || len(s.Artifacts()) != 1 || len(s.Endpoints()) != 1 || len(s.Devices()) != 1 {
				t.Fatalf("a refused message changed the state: %v", err)
			}
			return
		}
		if len(s.Artifacts()) > MaxArtifacts || len(s.Endpoints()) > MaxEndpoints || len(s.Devices()) > MaxDevices ||
			len(s.ScaleOuts()) > MaxScaleOuts {
			t.Fatal("the state exceeds its limits")
		}
		again := &Report{
			Version: Version, Node: s.Node(), Epoch: s.Epoch(), Seq: s.Seq(), Snapshot: true, UnixMillis: s.At().UnixMilli(),
			Artifacts: s.Artifacts(), Endpoints: s.Endpoints(), Devices: s.Devices(), WeightsSpace: s.Space(),
			Kv: s.KV(), Scaleouts: s.ScaleOuts(),
		}
		wire, err := proto.Marshal(again)
		if err != nil {
			t.Fatalf("an accepted state does not encode: %v", err)
		}
		var back Report
		var copied State
		if err := errors.Join(proto.Unmarshal(wire, &back), copied.Apply(&back)); err != nil {
			t.Fatalf("an accepted state does not read back: %v", err)
		}
	})
}
