// Package report owns the protocol in which a node tells routers its state:
// the messages, the Publisher that streams them (nodeagent calls it) and the
// State and Watch that read them (router/feed calls them). It never collects
// state itself, never decides what state means and never dials. The protocol
// is in PROTOCOL.md.
package report

import (
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
)

// Version is the version of the protocol this package writes and the highest
// it reads.
const Version = 1

// RunFound is the incarnation of an engine that ran already when its agent
// first read it and that does not tell its start: it may be any run, as long as
// its counters do not fall.
const RunFound = 1

// Limits of PROTOCOL.md.
const (
	MaxMessageBytes = 4 << 20
	MaxRequestBytes = 4 << 10
	MaxArtifacts    = 4096
	MaxEndpoints    = 256
	MaxDevices      = 256
	MaxScaleOuts    = 128
	MaxTextBytes    = 2048
	MaxRepeated     = 64
	MaxStreams      = 64

	retainedDeltas = 64
	retainedBytes  = 1 << 20
)

// Times of PROTOCOL.md: a stream without changes carries an idle message each
// IdlePeriod, and a reader that gets none for SilenceLimit gives it up.
const (
	IdlePeriod   = 2 * time.Second
	SilenceLimit = 10 * time.Second
)

// Errors that readers and writers branch on.
var (
	ErrVersion = errors.New("unknown report version") // the message is newer than Version
	ErrGap     = errors.New("gap in report")          // epoch or sequence does not follow: ask for a snapshot
	ErrInvalid = errors.New("malformed report")       // a rule of PROTOCOL.md is broken
	ErrTooMany = errors.New("report limit reached")   // the change would exceed a limit of PROTOCOL.md
	ErrSilent  = errors.New("report stream silent")   // no message for SilenceLimit
)

// ServerOptions are the gRPC options under which a Publisher is served:
// keepalive and the bound on requests. Credentials are the caller's.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxRequestBytes),
		grpc.MaxConcurrentStreams(MaxStreams),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
}

// DialOptions are the gRPC options under which a report is watched: keepalive
// and the bound on messages. Credentials are the caller's.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes + 1<<10)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	}
}

// changesNothing reports whether a message is an idle one.
func changesNothing(r *Report) bool {
	return !r.Snapshot && r.WeightsSpace == nil && r.Kv == nil &&
		len(r.Artifacts)+len(r.Endpoints)+len(r.Devices)+len(r.Scaleouts) == 0 &&
		goneKeys(r) == 0
}

func goneKeys(r *Report) int {
	return len(r.GoneArtifacts) + len(r.GoneEndpoints) + len(r.GoneDevices) + len(r.GoneScaleouts)
}

// check tells whether a message obeys the rules of PROTOCOL.md that need no
// state. Its errors wrap ErrVersion or ErrInvalid.
func check(r *Report) error {
	switch {
	case r.GetVersion() > Version:
		return fmt.Errorf("read report: %w: version %d, this program reads up to %d", ErrVersion, r.GetVersion(), Version)
	case r.GetVersion() == 0:
		return fmt.Errorf("read report: %w: version is 0", ErrInvalid)
	case r.Epoch == 0 || r.Seq == 0:
		return fmt.Errorf("read report: %w: epoch %d, sequence %d", ErrInvalid, r.Epoch, r.Seq)
	case r.Node == "" || !textsFit(r.Node):
		return fmt.Errorf("read report: %w: node name of %d bytes", ErrInvalid, len(r.Node))
	case r.Snapshot && goneKeys(r) > 0:
		return fmt.Errorf("read report: %w: a snapshot with gone keys", ErrInvalid)
	}
	if err := checkAll(r.Artifacts, MaxArtifacts, artifactKey, checkArtifact); err != nil {
		return err
	}
	if err := checkAll(r.Endpoints, MaxEndpoints, endpointKey, checkEndpoint); err != nil {
		return err
	}
	if err := checkAll(r.Devices, MaxDevices, deviceKey, checkDevice); err != nil {
		return err
	}
	if err := checkAll(r.Scaleouts, MaxScaleOuts, scaleOutKey, checkScaleOut); err != nil {
		return err
	}
	if s := r.WeightsSpace; s != nil && (s.CapacityBytes < 0 || s.UsedBytes < 0 || s.FreeBytes < 0) {
		return fmt.Errorf("read report: %w: negative space", ErrInvalid)
	}
	if !checkKV(r.Kv) {
		return fmt.Errorf("read report: %w: a negative number of KV", ErrInvalid)
	}
	if len(r.GoneArtifacts) > MaxArtifacts || len(r.GoneEndpoints) > MaxEndpoints || len(r.GoneDevices) > MaxDevices ||
		len(r.GoneScaleouts) > MaxScaleOuts {
		return fmt.Errorf("read report: %w: too many gone keys", ErrInvalid)
	}
	return nil
}

func artifactKey(a *Artifact) string { return a.GetRef() }
func endpointKey(e *Endpoint) string { return e.GetName() }
func deviceKey(d *Device) string     { return d.GetId() }

func checkAll[T proto.Message](objects []T, limit int, key func(T) string, one func(T) bool) error {
	if len(objects) > limit {
		return fmt.Errorf("read report: %w: %d objects where %d are allowed", ErrInvalid, len(objects), limit)
	}
	seen := make(map[string]bool, len(objects))
	for _, o := range objects {
		k := key(o)
		if k == "" || !textsFit(k) || seen[k] || !one(o) {
			return fmt.Errorf("read report: %w: bad or repeated object %.64q", ErrInvalid, k)
		}
		seen[k] = true
	}
	return nil
}

func checkArtifact(a *Artifact) bool {
	return textsFit(a.Digest, a.Commit, a.Detail) && a.SizeBytes >= 0 && a.PresentBytes >= 0
}

func checkEndpoint(e *Endpoint) bool {
	usage := e.GetLoad().GetKvUsage()
	return textsFit(e.Url, e.Pool, e.Accelerator, e.Ref, e.Pod) && usage >= 0 && usage <= 1 &&
		len(e.ServedModels) <= MaxRepeated && len(e.Devices) <= MaxRepeated &&
		textsFit(e.ServedModels...) && textsFit(e.Devices...)
}

func checkDevice(d *Device) bool {
	if len(d.Conditions) > MaxRepeated || !textsFit(d.Product) {
		return false
	}
	for _, c := range d.Conditions {
		if c.GetKey() == "" || !textsFit(c.GetKey(), c.GetValue()) {
			return false
		}
	}
	return true
}

func checkKV(k *KV) bool {
	for _, t := range []*KVTier{k.GetRam(), k.GetNvme()} {
		if min(t.GetUsedBytes(), t.GetBudgetBytes(), t.GetBlocks(), t.GetHits(), t.GetSavedTokens(), t.GetDamaged()) < 0 {
			return false
		}
	}
	return min(k.GetBlocks(), k.GetMisses(), k.GetDropped()) >= 0
}

func textsFit(texts ...string) bool {
	for _, t := range texts {
		if len(t) > MaxTextBytes || !utf8.ValidString(t) {
			return false
		}
	}
	return true
}
