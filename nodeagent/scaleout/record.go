// Package scaleout owns the records of scale-outs: what one pull of an artifact
// moved over this node's network, who else moved what meanwhile, and how the
// requests being served fared. The agent's root tells it when pulls begin and
// end and publishes its list; it takes its numbers from nodeagent/netattr. It
// never delays a pull by more than one sample, of two seconds at most, at either
// end, and decides nothing.
package scaleout

import "time"

// States of a Record.
const (
	StateRunning = "running"
	StateReady   = "ready"  // the artifact is whole
	StateFailed  = "failed" // Error says why
)

// Kinds of sources.
const (
	KindOrigin = "origin" // where artifacts come from
	KindPeer   = "peer"   // another node
)

// Record is a scale-out on one node, and its form in JSON. Bytes are those
// between Start and End, or until now.
type Record struct {
	ID     string    `json:"id"` // unique on its node
	Node   string    `json:"node"`
	State  string    `json:"state"`
	Error  string    `json:"error,omitempty"`
	Ref    string    `json:"ref"`
	Digest string    `json:"digest"`
	Reason string    `json:"reason"` // who asked first: configured, pull, mirror, claim ..., repair
	Start  time.Time `json:"start"`
	End    time.Time `json:"end,omitzero"`

	SizeBytes    int64 `json:"sizeBytes"`    // of the artifact
	MissingBytes int64 `json:"missingBytes"` // of it at Start

	// Sources are what the pull got from where, in payload of files, by the
	// puller's own count.
	Sources []Source `json:"sources"`
	// Connections are the bytes on the pull's own connections as the kernel counted
	// them: with the heads of HTTP, and with TLS as it is on the wire.
	Connections Bytes `json:"connections"`
	// Shares are everybody's bytes, the most first; those whose cgroup went before
	// anybody looked have the unit "(gone)"; past 32 rows the rest is one
	// for each class and locality, with the unit "(more)".
	Shares []Share `json:"shares"`
	// Devices are what the node's network devices counted, Unattributed what of it
	// has no owner.
	Devices      Bytes `json:"devices"`
	Unattributed Bytes `json:"unattributed"`
	// Visible is how much the node saw: full, partial, devices or none, and
	// Unseen what it did not.
	Visible string `json:"visible"`
	Unseen  string `json:"unseen,omitempty"`

	// PacedSeconds is how long the pull was held back for others, by the reason.
	// Nothing paces yet: it is empty.
	PacedSeconds map[string]float64 `json:"pacedSeconds,omitempty"`
	// Before and During are the round trips of connections that serve requests,
	// in the 30 s before Start and since.
	Before Latency `json:"before"`
	During Latency `json:"during"`
	// Overlap are the scale-outs of this node that ran at some time of this one:
	// what others than the pull moved is then in each of them. At most 64.
	Overlap []string `json:"overlap,omitempty"`
	// Series is the course of it, at most 240 points.
	Series []Point `json:"series,omitempty"`
}

// Source is what came from one source.
type Source struct {
	Name  string `json:"name"`
	Kind  string `json:"kind"`
	Bytes int64  `json:"bytes"`
}

// Bytes are payload, each byte once, and repeats; of devices all that passed.
type Bytes struct {
	Received      uint64 `json:"received"`
	Transmitted   uint64 `json:"transmitted"`
	Retransmitted uint64 `json:"retransmitted,omitempty"`
}

// Share is what one owner moved of one class and locality.
type Share struct {
	Pod       string `json:"pod,omitempty"` // namespace/name, or the UID where the name is not known
	Container string `json:"container,omitempty"`
	Unit      string `json:"unit,omitempty"` // of what is no pod
	Class     string `json:"class"`
	Locality  string `json:"locality"`
	Bytes
}

// Latency is how connections that serve requests fared, by their smoothed round
// trips in seconds. Samples is how many round trips were looked at; where it is 0
// the rest means nothing.
type Latency struct {
	Samples uint64  `json:"samples"`
	P50     float64 `json:"p50"`
	P90     float64 `json:"p90"`
	P99     float64 `json:"p99"`
}

// Point is a moment of a scale-out: bytes since Start by class, of all
// localities, and the round trips of the interval before.
type Point struct {
	Seconds     float64           `json:"seconds"` // since Start
	Received    map[string]uint64 `json:"received"`
	Transmitted map[string]uint64 `json:"transmitted"`
	// UnattributedReceived is device bytes without an owner.
	UnattributedReceived uint64  `json:"unattributedReceived"`
	P90                  float64 `json:"p90,omitempty"` // seconds; 0 where nothing was served
}

// Duration is how long it took, or has taken at now.
func (r *Record) Duration(now time.Time) time.Duration {
	if r.End.IsZero() {
		return now.Sub(r.Start)
	}
	return r.End.Sub(r.Start)
}

// Fetched is the payload of files that the pull received, in bytes.
func (r *Record) Fetched() int64 {
	var n int64
	for _, s := range r.Sources {
		n += s.Bytes
	}
	return n
}
