package weightcache

import (
	"context"
	"errors"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	// turnLength is how long a stream goes on with what it fetches while a
	// reader of something else has not one byte yet. Hub clients give up on 10 s
	// of silence: meanwhile each stream can have looked after eight readers.
	turnLength = time.Second
	// sipBytes is the range that is asked for first while more such readers wait
	// than there are streams. What has come of a file keeps its clients alive.
	sipBytes = 16 << 10
	// paceTime and leastPiece: a piece is what the rate allows in this time, but
	// not less, so that every stream moves several times a second.
	paceTime   = 250 * time.Millisecond
	leastPiece = 16 << 10
	// segmentTime is the most of the whole rate that one segment may take: what
	// a reader waits for in mid-file begins with its segment.
	segmentTime = 4 * time.Second
	// maxSegments bounds what is kept in memory for each file being fetched.
	maxSegments = 1 << 16
)

// errTurn ends a range early because it is another reader's turn. The segment
// keeps what came and is fetched on later.
var errTurn = errors.New("it is the turn of another reader")

// segmentFor is the length of the segments of a file that begins now.
func (p *Puller) segmentFor(size int64) int64 {
	segment := p.segment
	if rate := int64(p.limiter.Rate()); rate > 0 {
		for segment > minSegment && segment > rate*int64(segmentTime/time.Second) && size/(segment/2) < maxSegments {
			segment /= 2
		}
	}
	return max(segment, minSegment)
}

// pieceFor is how many bytes a stream gathers before it writes them and waits
// for its turn at the limiter.
func (p *Puller) pieceFor() int {
	rate := float64(p.limiter.Rate())
	if rate <= 0 || rate*paceTime.Seconds() >= pieceSize {
		return pieceSize
	}
	return max(leastPiece, int(rate*paceTime.Seconds()))
}

// want moves a file to the front of a pull for a reader, unwant takes that back.
func (p *Puller) want(pl *pull, r *Reader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sha := r.file.SHA256
	if pl.wants[sha] == nil {
		pl.wants[sha] = map[*Reader]bool{}
	}
	pl.wants[sha][r] = true
	p.wake.fire()
}

func (p *Puller) unwant(pl *pull, r *Reader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sha := r.file.SHA256
	delete(pl.wants[sha], r)
	if len(pl.wants[sha]) == 0 {
		delete(pl.wants, sha)
	}
}

// waits notes where a reader waits for bytes, got that it was given some.
func (p *Puller) waits(r *Reader, off int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.waitsAt != off {
		r.waitsAt = off
		p.wake.fire()
	}
}

func (p *Puller) got(r *Reader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.given, r.waitsAt = true, -1
}

// offsetsLocked are where readers wait in a file, those with nothing yet first.
func (pl *pull) offsetsLocked(sha artifact.Digest) []int64 {
	var first, rest []int64
	for r := range pl.wants[sha] {
		switch {
		case r.waitsAt < 0:
		case r.given:
			rest = append(rest, r.waitsAt)
		default:
			first = append(first, r.waitsAt)
		}
	}
	return append(first, rest...)
}

func (p *Puller) offsets(pl *pull, sha artifact.Digest) []int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return pl.offsetsLocked(sha)
}

// thirstyLocked reports whether a reader of a file was given nothing yet and
// waits for bytes that no stream is fetching.
func (pl *pull) thirstyLocked(ff *fileFlight) bool {
	if ff == nil || ff.done || ff.beginning || ff.err != nil {
		return false
	}
	for r := range pl.wants[ff.sha] {
		if !r.given && r.waitsAt >= 0 && (ff.landing == nil || ff.landing.lacks(r.waitsAt)) {
			return true
		}
	}
	return false
}

// crowded reports whether a reader with nothing yet waits for a stream and
// none is free.
func (p *Puller) crowded() bool {
	if len(p.tokens) < cap(p.tokens) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pl := range p.pulls {
		for sha := range pl.wants {
			if pl.thirstyLocked(pl.files[sha]) {
				return true
			}
		}
	}
	return false
}

// awaited reports whether a reader that was given nothing yet waits for a segment.
func (p *Puller) awaited(l *landing, segment int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pl := range p.pulls {
		for r := range pl.wants[l.sha] {
			if !r.given && r.waitsAt >= 0 && int(r.waitsAt/l.segment) == segment {
				return true
			}
		}
	}
	return false
}

// permit is the right to ask a source, one of as many as there are streams. A
// nil one has nothing to give.
type permit struct {
	p    *Puller
	held bool
}

func (t *permit) take(ctx context.Context) error {
	select {
	case t.p.tokens <- struct{}{}:
		t.held = true
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// give lets another stream have it; more than once is harmless.
func (t *permit) give() {
	if t.held {
		t.held = false
		<-t.p.tokens
	}
}

// sleep waits while others have the permit: a source that fails or asks for a
// pause is not to hold up those who read from another.
func (t *permit) sleep(ctx context.Context, d time.Duration) error {
	if t == nil {
		return sleep(ctx, d)
	}
	t.give()
	if err := sleep(ctx, d); err != nil {
		return err
	}
	return t.take(ctx)
}

// watchTurn gives the range up, once a turn is over, where yield says so. It
// ends with ctx.
func watchTurn(ctx context.Context, giveUp context.CancelCauseFunc, yield func() bool) {
	ticker := time.NewTicker(turnLength)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if yield() {
				giveUp(errTurn)
				return
			}
		}
	}
}

// lacks reports whether bytes at off have not come and nobody fetches them.
func (l *landing) lacks(off int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := int(off / l.segment)
	return l.err == nil && !l.done && i < len(l.claimed) && !l.claimed[i] && l.readableLocked(off) <= 0
}

// claim takes a free segment for a stream, and where in it to go on: the first
// of those that hold the preferred offsets, else the lowest.
func (l *landing) claim(prefer []int64) (i int, from int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done || l.err != nil {
		return 0, 0, false
	}
	for _, off := range prefer {
		if i := int(off / l.segment); i < len(l.claimed) && !l.claimed[i] {
			l.claimed[i] = true
			l.active++
			return i, l.written[i], true
		}
	}
	for ; l.next < len(l.claimed); l.next++ {
		if !l.claimed[l.next] {
			l.claimed[l.next] = true
			l.active++
			return l.next, l.written[l.next], true
		}
	}
	return 0, 0, false
}
