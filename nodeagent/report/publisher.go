package report

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// PublisherOptions are what a Publisher needs to know.
type PublisherOptions struct {
	// Node is the node's name in every message.
	Node string
	// Epoch identifies this start of the agent: not 0, different each time.
	Epoch uint64
	// Log receives one line per stream; nil discards.
	Log *slog.Logger
	// Now is the clock of unix_millis; nil is time.Now.
	Now func() time.Time
}

// Publisher holds the node's present state and streams it to any number of
// readers, at most MaxStreams. It is safe for concurrent use, starts no
// goroutine and queues nothing per reader: each stream sends from one bounded
// run of retained deltas and falls back to a snapshot.
type Publisher struct {
	UnimplementedNodeReportServer

	opts PublisherOptions

	mu        sync.Mutex
	seq       uint64
	artifacts map[string]*Artifact
	endpoints map[string]*Endpoint
	devices   map[string]*Device
	scaleouts map[string]*ScaleOut
	space     *Space
	kv        *KV
	deltas    []*Report // consecutive, the last one has sequence seq
	bytes     int       // encoded size of deltas
	changed   chan struct{}
	streams   int
	lastSize  int // encoded size of a snapshot
}

var _ NodeReportServer = (*Publisher)(nil)

// NewPublisher makes a Publisher with empty state at sequence 1.
func NewPublisher(opts PublisherOptions) (*Publisher, error) {
	if opts.Node == "" || !textsFit(opts.Node) || opts.Epoch == 0 {
		return nil, fmt.Errorf("make publisher: %w: node %.64q, epoch %d", ErrInvalid, opts.Node, opts.Epoch)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Publisher{
		opts: opts, seq: 1,
		artifacts: map[string]*Artifact{}, endpoints: map[string]*Endpoint{}, devices: map[string]*Device{},
		scaleouts: map[string]*ScaleOut{},
		changed:   make(chan struct{}),
	}, nil
}

// Epoch is the epoch of this Publisher.
func (p *Publisher) Epoch() uint64 { return p.opts.Epoch }

// Seq is the sequence of the present state.
func (p *Publisher) Seq() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seq
}

// SetArtifacts replaces the artifacts of the node. The Publisher keeps the
// messages: the caller does not change them afterwards. Details past
// MaxTextBytes are cut. Errors wrap ErrTooMany or ErrInvalid and leave the
// state as it was; setting equal objects again is no change.
func (p *Publisher) SetArtifacts(artifacts []*Artifact) error {
	for i, a := range artifacts {
		if !textsFit(a.GetDetail()) {
			cut := proto.CloneOf(a)
			cut.Detail = cutText(cut.Detail)
			artifacts = slices.Clone(artifacts)
			artifacts[i] = cut
		}
	}
	return p.set(&Report{Artifacts: artifacts}, func(delta *Report) {
		setAll(p.artifacts, artifacts, artifactKey, &delta.Artifacts, &delta.GoneArtifacts)
	})
}

// SetEndpoints replaces the endpoints of the node, on the terms of SetArtifacts.
func (p *Publisher) SetEndpoints(endpoints []*Endpoint) error {
	return p.set(&Report{Endpoints: endpoints}, func(delta *Report) {
		setAll(p.endpoints, endpoints, endpointKey, &delta.Endpoints, &delta.GoneEndpoints)
	})
}

// SetDevices replaces the devices of the node, on the terms of SetArtifacts.
func (p *Publisher) SetDevices(devices []*Device) error {
	return p.set(&Report{Devices: devices}, func(delta *Report) { setAll(p.devices, devices, deviceKey, &delta.Devices, &delta.GoneDevices) })
}

// SetSpace replaces the space of the weights store, on the terms of SetArtifacts.
func (p *Publisher) SetSpace(space *Space) error {
	return p.set(&Report{WeightsSpace: space}, func(delta *Report) {
		if space != nil && !proto.Equal(p.space, space) {
			delta.WeightsSpace = space
		}
	})
}

// SetKV replaces what is told of the KV store, on the terms of SetArtifacts; nil
// is no change. What was told once stays until the next one.
func (p *Publisher) SetKV(kv *KV) error {
	return p.set(&Report{Kv: kv}, func(delta *Report) {
		if kv == nil || proto.Equal(p.kv, kv) {
			return
		}
		delta.Kv = kv
		p.tellOldReaders(delta, true)
	})
}

// set checks the new objects (alone in a message), lets diff fill a delta,
// and commits it if it changes something and the state still fits a snapshot.
func (p *Publisher) set(objects *Report, diff func(*Report)) error {
	probe := p.header(1)
	probe.Artifacts, probe.Endpoints, probe.Devices, probe.WeightsSpace = objects.Artifacts, objects.Endpoints, objects.Devices, objects.WeightsSpace
	probe.Kv, probe.Scaleouts = objects.Kv, objects.Scaleouts
	if err := check(probe); err != nil {
		return fmt.Errorf("publish state: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delta := p.header(p.seq + 1)
	diff(delta)
	if changesNothing(delta) {
		return nil
	}
	size := proto.Size(delta)
	if size > MaxMessageBytes || p.lastSize+size > MaxMessageBytes && p.sizeWithLocked(objects) > MaxMessageBytes {
		return fmt.Errorf("publish state: %w: snapshot past %d bytes", ErrTooMany, MaxMessageBytes)
	}
	p.commitLocked(delta)
	p.lastSize = proto.Size(p.snapshotLocked())
	p.seq = delta.Seq
	p.deltas = append(p.deltas, delta)
	p.bytes += size
	for len(p.deltas) > 0 && (len(p.deltas) > retainedDeltas || p.bytes > retainedBytes) {
		p.bytes -= proto.Size(p.deltas[0])
		p.deltas = slices.Delete(p.deltas, 0, 1)
	}
	close(p.changed)
	p.changed = make(chan struct{})
	return nil
}

// sizeWithLocked is the size of a snapshot once objects replaced their kind.
func (p *Publisher) sizeWithLocked(objects *Report) int {
	next := p.snapshotLocked()
	if objects.Artifacts != nil {
		next.Artifacts = objects.Artifacts
	}
	if objects.Endpoints != nil {
		next.Endpoints = objects.Endpoints
	}
	if objects.Devices != nil {
		next.Devices = objects.Devices
	}
	if objects.Scaleouts != nil {
		next.Scaleouts = objects.Scaleouts
	}
	if objects.Kv != nil {
		next.Kv = objects.Kv
	}
	return proto.Size(next)
}

func (p *Publisher) commitLocked(delta *Report) {
	commitAll(p.artifacts, delta.Artifacts, delta.GoneArtifacts, artifactKey)
	commitAll(p.endpoints, delta.Endpoints, delta.GoneEndpoints, endpointKey)
	commitAll(p.devices, delta.Devices, delta.GoneDevices, deviceKey)
	commitAll(p.scaleouts, delta.Scaleouts, delta.GoneScaleouts, scaleOutKey)
	if delta.WeightsSpace != nil {
		p.space = delta.WeightsSpace
	}
	if delta.Kv != nil {
		p.kv = delta.Kv
	}
}

func (p *Publisher) header(seq uint64) *Report {
	return &Report{Version: Version, Node: p.opts.Node, Epoch: p.opts.Epoch, Seq: seq, UnixMillis: p.opts.Now().UnixMilli()}
}

func (p *Publisher) snapshotLocked() *Report {
	r := p.header(p.seq)
	r.Snapshot = true
	r.Artifacts = sorted(p.artifacts)
	r.Endpoints = sorted(p.endpoints)
	r.Devices = sorted(p.devices)
	r.Scaleouts = sorted(p.scaleouts)
	r.WeightsSpace, r.Kv = p.space, p.kv
	return r
}

// after gives the messages that bring a reader from seq to the present (none
// where it is there), and the channel that closes with the next change.
func (p *Publisher) after(seq uint64) ([]*Report, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if seq == p.seq {
		return nil, p.changed
	}
	behind := p.seq - seq // wraps for a sequence of the future, which is past the retained run too
	if seq == 0 || behind > uint64(len(p.deltas)) {
		return []*Report{p.snapshotLocked()}, p.changed
	}
	return slices.Clone(p.deltas[uint64(len(p.deltas))-behind:]), p.changed
}

// Watch implements NodeReportServer: it streams until the reader or the
// server ends the call.
func (p *Publisher) Watch(request *WatchRequest, stream NodeReport_WatchServer) error {
	if request.GetVersion() == 0 {
		return status.Error(codes.InvalidArgument, "watch report: version is 0")
	}
	if !p.enter() {
		return status.Errorf(codes.ResourceExhausted, "watch report: %d streams are open", MaxStreams)
	}
	defer p.leave()
	p.opts.Log.Info("report stream opened", slog.String("router", cutText(request.GetRouter())))
	ctx := stream.Context()
	idle := time.NewTicker(IdlePeriod)
	defer idle.Stop()

	var seq uint64
	if request.GetEpoch() == p.opts.Epoch && request.GetSeq() == p.Seq() {
		seq = request.GetSeq()
		if err := stream.Send(p.header(seq)); err != nil {
			return fmt.Errorf("send report: %w", err)
		}
	}
	for {
		messages, changed := p.after(seq)
		for _, m := range messages {
			if err := stream.Send(m); err != nil {
				return fmt.Errorf("send report: %w", err)
			}
			seq = m.Seq
			idle.Reset(IdlePeriod)
		}
		if len(messages) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-changed:
		case <-idle.C:
			if err := stream.Send(p.header(seq)); err != nil {
				return fmt.Errorf("send report: %w", err)
			}
		}
	}
}

func (p *Publisher) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.streams >= MaxStreams {
		return false
	}
	p.streams++
	return true
}

func (p *Publisher) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.streams--
}

// setAll fills a delta's changed objects and gone keys from the present
// objects and those that replace them.
func setAll[T proto.Message](present map[string]T, next []T, key func(T) string, changed *[]T, gone *[]string) {
	keep := make(map[string]bool, len(next))
	for _, o := range next {
		keep[key(o)] = true
		if old, found := present[key(o)]; !found || !proto.Equal(old, o) {
			*changed = append(*changed, o)
		}
	}
	for k := range present {
		if !keep[k] {
			*gone = append(*gone, k)
		}
	}
	slices.Sort(*gone)
}

func commitAll[T any](present map[string]T, changed []T, gone []string, key func(T) string) {
	for _, k := range gone {
		delete(present, k)
	}
	for _, o := range changed {
		present[key(o)] = o
	}
}

// sorted gives the objects in the order of their keys.
func sorted[T any](objects map[string]T) []T {
	list := make([]T, 0, len(objects))
	for _, k := range slices.Sorted(maps.Keys(objects)) {
		list = append(list, objects[k])
	}
	return list
}
