package report

import (
	"math"
	"slices"

	"google.golang.org/protobuf/proto"
)

// SetScaleOuts replaces the scale-outs of the node, at most MaxScaleOuts, on the
// terms of SetArtifacts.
func (p *Publisher) SetScaleOuts(scaleouts []*ScaleOut) error {
	for i, s := range scaleouts {
		if !textsFit(s.GetDetail()) {
			cut := proto.CloneOf(s)
			cut.Detail = cutText(cut.Detail)
			scaleouts = slices.Clone(scaleouts)
			scaleouts[i] = cut
		}
	}
	return p.set(&Report{Scaleouts: scaleouts}, func(delta *Report) {
		setAll(p.scaleouts, scaleouts, scaleOutKey, &delta.Scaleouts, &delta.GoneScaleouts)
		p.tellOldReaders(delta, len(delta.Scaleouts)+len(delta.GoneScaleouts) > 0)
	})
}

// tellOldReaders gives a delta that has what the first release knew nothing of a
// space: such a reader takes a delta without anything else for an idle message,
// whose sequence would be a gap.
func (p *Publisher) tellOldReaders(delta *Report, unknown bool) {
	if !unknown {
		return
	}
	if delta.WeightsSpace = p.space; p.space == nil {
		delta.WeightsSpace = &Space{}
	}
}

// ScaleOuts lists the scale-outs by id. The messages are read-only.
func (s *State) ScaleOuts() []*ScaleOut { return sorted(s.scaleouts) }

func scaleOutKey(s *ScaleOut) string { return s.GetId() }

func checkScaleOut(s *ScaleOut) bool {
	if !textsFit(s.Ref, s.Digest, s.Reason, s.Source, s.Detail) || len(s.Overlap) > MaxRepeated || !textsFit(s.Overlap...) ||
		min(s.StartUnixMillis, s.EndUnixMillis, s.SizeBytes, s.MissingBytes, s.FetchedBytes) < 0 || !isAmount(s.PacedSeconds) ||
		len(s.Classes) > MaxRepeated {
		return false
	}
	for _, c := range s.Classes {
		if c.GetTrafficClass() == "" || !textsFit(c.GetTrafficClass(), c.GetLocality()) {
			return false
		}
	}
	for _, r := range []*RoundTrips{s.Before, s.During} {
		if !isAmount(r.GetP50()) || !isAmount(r.GetP90()) || !isAmount(r.GetP99()) {
			return false
		}
	}
	return true
}

// isAmount reports whether a number can be of something: neither negative nor
// without an end, nor none.
func isAmount(n float64) bool { return n >= 0 && !math.IsInf(n, 1) }
