package local

import (
	"context"
	"fmt"
	"slices"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// MaxPods is how many pods one SetPods takes.
const MaxPods = 1024

// Limits of what is told of the network.
const (
	maxPodsBody      = 1 << 20
	maxPodUID        = 128 // bytes
	maxPodName       = 253 // bytes, of name and namespace each
	maxEndedScaled   = 16  // scale-outs that have ended
	maxScaleOutBytes = 256 << 10
	maxSensors       = 16
	maxReason        = 1 << 10 // bytes
)

// Network is how much the data role sees of who moves bytes over the node's
// network.
type Network struct {
	// Sight is none, devices, partial or full.
	Sight string `json:"sight"`
	// Reason says what is not seen, for people; empty where all is.
	Reason string `json:"reason,omitempty"`
	// Off are the sensors that are wanted and off.
	Off []Sensor `json:"off,omitempty"`
}

// Sensor is one that is wanted and off, and why.
type Sensor struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Equal reports whether two say the same.
func (n *Network) Equal(o *Network) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Sight == o.Sight && n.Reason == o.Reason && slices.Equal(n.Off, o.Off)
}

// NetworkOf is what a sample says of what is seen.
func NetworkOf(s *netattr.Snapshot) *Network {
	n := &Network{Sight: s.Sight.String(), Reason: clip(s.Reason, maxReason)}
	for _, sensor := range s.Sensors {
		if sensor.Wanted && !sensor.On && len(n.Off) < maxSensors {
			n.Off = append(n.Off, Sensor{Name: sensor.Name, Reason: clip(sensor.Reason, maxReason)})
		}
	}
	return n
}

// clip shortens a text to at most limit bytes.
func clip(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && text[limit]&0xc0 == 0x80 {
		limit--
	}
	return text[:limit]
}

// toldScaleOuts are the records that are told: those that run, then the latest
// that ended, without their series, as far as there is room.
func toldScaleOuts(list []scaleout.Record) []scaleout.Record {
	var told []scaleout.Record
	ended, room := 0, maxScaleOutBytes
	for _, r := range list {
		if r.State != scaleout.StateRunning {
			if ended++; ended > maxEndedScaled {
				break
			}
		}
		r.Series, r.Error, r.Unseen = nil, clip(r.Error, maxReason), clip(r.Unseen, maxReason)
		if room -= sizeOf(r); room < 0 {
			break
		}
		told = append(told, r)
	}
	return told
}

// sizeOf is about how many bytes a record takes in a line.
func sizeOf(r scaleout.Record) int {
	const fixed, row = 800, 160
	n := fixed + len(r.ID) + len(r.Node) + len(r.Error) + len(r.Ref) + len(r.Digest) + len(r.Reason) + len(r.Unseen)
	for _, s := range r.Sources {
		n += row + len(s.Name)
	}
	for _, s := range r.Shares {
		n += row + len(s.Pod) + len(s.Container) + len(s.Unit)
	}
	for _, id := range r.Overlap {
		n += len(id) + 3
	}
	return n
}

// checkPods refuses what is no list of pods.
func checkPods(pods []netattr.Pod) error {
	if len(pods) > MaxPods {
		return fmt.Errorf("set pods: %w: %d pods, want at most %d", artifact.ErrInvalid, len(pods), MaxPods)
	}
	for _, p := range pods {
		if p.UID == "" || len(p.UID) > maxPodUID || len(p.Namespace) > maxPodName || len(p.Name) > maxPodName {
			return fmt.Errorf("set pods: %w: a UID has %d bytes, want 1 to %d, a namespace %d and a name %d, want at most %d",
				artifact.ErrInvalid, len(p.UID), maxPodUID, len(p.Namespace), len(p.Name), maxPodName)
		}
	}
	return nil
}

// SetPods implements Data.
func (w *InProcess) SetPods(ctx context.Context, pods []netattr.Pod) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("set pods: %w", err)
	}
	if err := checkPods(pods); err != nil {
		return err
	}
	if w.pods != nil {
		w.pods(slices.Clone(pods))
	}
	return nil
}

// NetworkChanged says that Options.Network or Options.ScaleOuts give something
// else.
func (w *InProcess) NetworkChanged() { w.state.notify() }

// SetPods implements Data.
func (r *Remote) SetPods(ctx context.Context, pods []netattr.Pod) error {
	if err := checkPods(pods); err != nil {
		return err
	}
	_, err := call[nothing](ctx, r, pathPods, podsCall{pods})
	return err
}
