package report

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
)

// State is what a reader knows of one node. Apply is its only writer; it is
// not safe for concurrent use. The zero value knows nothing.
type State struct {
	node      string
	epoch     uint64
	seq       uint64
	millis    int64
	artifacts map[string]*Artifact
	endpoints map[string]*Endpoint
	devices   map[string]*Device
	scaleouts map[string]*ScaleOut
	space     *Space
	kv        *KV
}

// Apply takes the next message of a stream. It keeps the message's objects.
// On an error (ErrVersion, ErrInvalid, ErrGap) the state is as it was, and
// after ErrGap a stream without a resume point heals it.
func (s *State) Apply(r *Report) error {
	if err := check(r); err != nil {
		return err
	}
	if !r.Snapshot {
		return s.applyDelta(r)
	}
	s.node, s.epoch, s.seq, s.millis = r.Node, r.Epoch, r.Seq, r.UnixMillis
	s.artifacts = keyed(r.Artifacts, artifactKey)
	s.endpoints = keyed(r.Endpoints, endpointKey)
	s.devices = keyed(r.Devices, deviceKey)
	s.scaleouts = keyed(r.Scaleouts, scaleOutKey)
	s.space, s.kv = r.WeightsSpace, r.Kv
	return nil
}

func (s *State) applyDelta(r *Report) error {
	want := s.seq + 1
	if changesNothing(r) {
		want = s.seq
	}
	if s.epoch == 0 || r.Epoch != s.epoch || r.Seq != want || r.Node != s.node {
		return fmt.Errorf("apply report: %w: have epoch %d sequence %d, got epoch %d sequence %d", ErrGap, s.epoch, s.seq, r.Epoch, r.Seq)
	}
	if room(s.artifacts, r.Artifacts, r.GoneArtifacts, artifactKey) > MaxArtifacts ||
		room(s.endpoints, r.Endpoints, r.GoneEndpoints, endpointKey) > MaxEndpoints ||
		room(s.devices, r.Devices, r.GoneDevices, deviceKey) > MaxDevices ||
		room(s.scaleouts, r.Scaleouts, r.GoneScaleouts, scaleOutKey) > MaxScaleOuts {
		return fmt.Errorf("apply report: %w: more objects than a node may have", ErrInvalid)
	}
	commitAll(s.artifacts, r.Artifacts, r.GoneArtifacts, artifactKey)
	commitAll(s.endpoints, r.Endpoints, r.GoneEndpoints, endpointKey)
	commitAll(s.devices, r.Devices, r.GoneDevices, deviceKey)
	commitAll(s.scaleouts, r.Scaleouts, r.GoneScaleouts, scaleOutKey)
	if r.WeightsSpace != nil {
		s.space = r.WeightsSpace
	}
	if r.Kv != nil {
		s.kv = r.Kv
	}
	s.seq, s.millis = r.Seq, r.UnixMillis
	return nil
}

// Node is the node's name, empty before the first snapshot.
func (s *State) Node() string { return s.node }

// Epoch is the epoch of the state, 0 before the first snapshot.
func (s *State) Epoch() uint64 { return s.epoch }

// Seq is the sequence of the state, 0 before the first snapshot.
func (s *State) Seq() uint64 { return s.seq }

// At is when the node wrote the last message, by the node's clock.
func (s *State) At() time.Time { return time.UnixMilli(s.millis) }

// Resume is the point from which a new stream may go on.
func (s *State) Resume() Resume { return Resume{Epoch: s.epoch, Seq: s.seq} }

// Artifacts lists the artifacts by ref. The messages are read-only.
func (s *State) Artifacts() []*Artifact { return sorted(s.artifacts) }

// Endpoints lists the endpoints by name. The messages are read-only.
func (s *State) Endpoints() []*Endpoint { return sorted(s.endpoints) }

// Devices lists the devices by id. The messages are read-only.
func (s *State) Devices() []*Device { return sorted(s.devices) }

// Artifact gives one artifact, nil where the node has none of that ref.
func (s *State) Artifact(ref string) *Artifact { return s.artifacts[ref] }

// Device gives one device, nil where the node has none of that id.
func (s *State) Device(id string) *Device { return s.devices[id] }

// Space is the space of the weights store, nil while unknown.
func (s *State) Space() *Space { return s.space }

// KV is the fill of the KV store and what it counted, nil where the node has none
// or does not tell.
func (s *State) KV() *KV { return s.kv }

// Resume is where a stream may go on: what State.Resume gave, or zero for a snapshot.
type Resume struct {
	Epoch uint64
	Seq   uint64
	// Router is the caller's name, for the node's log.
	Router string
}

// Watch opens one stream and calls fn with each message until the stream
// ends, ctx is done, fn fails or nothing came for SilenceLimit (ErrSilent). It
// always returns an error; io.EOF is wrapped where the node ended the stream
// in order. It does not reconnect. The caller applies messages to a State
// inside fn and returns Apply's error.
func Watch(ctx context.Context, conn grpc.ClientConnInterface, resume Resume, fn func(*Report) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(SilenceLimit, func() { cancel(ErrSilent) })
	defer silence.Stop()
	stream, err := NewNodeReportClient(conn).Watch(ctx, &WatchRequest{
		Version: Version, Epoch: resume.Epoch, Seq: resume.Seq, Router: resume.Router,
	})
	if err != nil {
		return fmt.Errorf("watch report: %w", causeOf(ctx, err))
	}
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("watch report: %w", io.EOF)
		}
		if err != nil {
			return fmt.Errorf("watch report: %w", causeOf(ctx, err))
		}
		silence.Stop() // what fn takes is not the node's silence
		if err := fn(r); err != nil {
			return err
		}
		silence.Reset(SilenceLimit)
	}
}

// causeOf prefers the reason for which the context ended over gRPC's wording of it.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

func keyed[T any](objects []T, key func(T) string) map[string]T {
	m := make(map[string]T, len(objects))
	for _, o := range objects {
		m[key(o)] = o
	}
	return m
}

// room is the number of objects once a delta is applied.
func room[T any](present map[string]T, changed []T, gone []string, key func(T) string) int {
	after := len(present)
	removed := make(map[string]bool, len(gone))
	for _, k := range gone {
		if _, found := present[k]; found && !removed[k] {
			removed[k] = true
			after--
		}
	}
	for _, o := range changed {
		if _, found := present[key(o)]; !found || removed[key(o)] {
			after++
		}
	}
	return after
}

// cutText shortens a text to MaxTextBytes of valid UTF-8.
func cutText(s string) string {
	if len(s) > MaxTextBytes {
		s = s[:MaxTextBytes]
	}
	return strings.ToValidUTF8(s, "?")
}
