package weightcache

import (
	"cmp"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Reasons for which pulls are asked for. For a claim it is ReasonClaim and the
// claim's UID.
const (
	ReasonUnknown    = "unknown"
	ReasonConfigured = "configured" // a model of the configuration
	ReasonPull       = "pull"       // somebody asked the node
	ReasonMirror     = "mirror"     // a client of the mirror reads it
	ReasonRepair     = "repair"     // stored files were damaged
	ReasonClaim      = "claim "
)

// ErrGivenUp ends a pull that nobody waits for any more, or whose artifact is
// being removed.
var ErrGivenUp = errors.New("given up")

// Flight is a pull of an artifact that lacks files, as it begins.
type Flight struct {
	// ID is never 0, and another one for each flight of a node.
	ID     uint32
	Ref    string
	Digest string
	Source string
	// Size and Missing are bytes: of the whole artifact, and of those that had
	// not landed. Other flights may land some of them.
	Size, Missing int64
	Files         int    // files that are not in the store
	Reason        string // of whoever began it; others may have joined since
	Began         time.Time
}

// FlightEnd is how a flight ended.
type FlightEnd struct {
	// Err is nil where the artifact is Ready; it wraps ErrGivenUp where nobody
	// wanted it any more.
	Err error
	// Bytes are those received from the source for this flight, those fetched
	// again included. What another flight received of files they share is that
	// one's.
	Bytes   int64
	Retries int // ranges asked again after a failure
	At      time.Time
}

// flight is the part of a pull that asks its source.
type flight struct {
	id             uint32
	src            source.Source
	bytes, retries atomic.Int64
	ended          func(FlightEnd) // nil: nobody wants to know
}

// beginFlight tells that a pull is about to ask its source.
func (p *Puller) beginFlight(pl *pull, src source.Source, missing []artifact.File) *flight {
	f := &flight{id: p.nextFlight(), src: src}
	if p.began == nil {
		return f
	}
	f.ended = p.began(Flight{
		ID: f.id, Ref: pl.m.Ref.String(), Digest: pl.m.Digest.String(), Source: src.Name(), Size: pl.m.Size(),
		Missing: p.left(missing), Files: len(missing), Reason: cmp.Or(pl.reason, ReasonUnknown), Began: p.now(),
	})
	return f
}

// endFlight closes the flight's connections, and tells how it ended.
func (p *Puller) endFlight(f *flight, err error) {
	if pooled, ok := f.src.(interface{ EndFlight(id uint32) }); ok {
		pooled.EndFlight(f.id)
	}
	if f.ended != nil {
		f.ended(FlightEnd{Err: err, Bytes: f.bytes.Load(), Retries: int(f.retries.Load()), At: p.now()})
	}
}

// nextFlight is the next id. They begin with the time of the process's start in
// seconds: a node that begins less than one flight a second in the mean gives
// none twice, whatever its restarts.
func (p *Puller) nextFlight() uint32 {
	for {
		if id := p.lastFlight.Add(1); id != 0 {
			return id
		}
	}
}

// left is how many bytes of missing files have not landed, as far as can be
// told before their landings begin.
func (p *Puller) left(missing []artifact.File) int64 {
	landings := map[artifact.Digest]*landing{}
	p.mu.Lock()
	for _, f := range missing {
		if ff := p.files[f.SHA256]; ff != nil && ff.landing != nil {
			landings[f.SHA256] = ff.landing
		}
	}
	p.mu.Unlock()
	var left int64
	for _, f := range missing {
		there := int64(0)
		if l := landings[f.SHA256]; l != nil {
			there = l.present()
		} else if kept, err := p.store.resumable(f); err == nil {
			there = kept
		}
		left += f.Size - there
	}
	return left
}

// resumable is how many bytes of an unfinished file a landing would go on from.
func (s *Store) resumable(f artifact.File) (n int64, err error) {
	s.mu.Lock()
	_, begun := s.partial[f.SHA256]
	s.mu.Unlock()
	if !begun || f.Size <= minSegment {
		return 0, nil
	}
	data, err := durable.ReadFile(s.fs, s.bitsPath(f.SHA256), maxBitsBytes)
	if err != nil {
		return 0, fmt.Errorf("read bitmap of file %s: %w", f.SHA256.Short(), err)
	}
	b, err := decodeBits(data, f.SHA256, f.Size)
	if err != nil {
		return 0, err
	}
	for i, written := range b.written {
		switch {
		case b.bitmap[i/8]&(1<<(i%8)) != 0:
			n += min(b.segment, f.Size-int64(i)*b.segment)
		case s.sameBoot(b):
			n += written
		}
	}
	return n, nil
}

// FlightBytes is what a flight that has not ended has received from its source;
// 0 for any other.
func (p *Puller) FlightBytes(id uint32) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pl := range p.pulls {
		if pl.flight != nil && pl.flight.id == id {
			return pl.flight.bytes.Load()
		}
	}
	return 0
}
