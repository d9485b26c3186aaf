package weightcache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

var (
	errStalled  = errors.New("no byte came within the stall timeout")
	errTrickles = errors.New("the source sends too slowly")
)

const (
	// minSourceRate is the least rate of one GET, in bytes per second of
	// waiting for the source, over a stall timeout of it. What the Limiter or
	// the drive takes is not the source's time.
	minSourceRate = 1 << 10
	// readAtLeast is how much a stream gathers before it writes.
	readAtLeast = 64 << 10
	// maxRetryAfter bounds how long a source may ask us to wait.
	maxRetryAfter = 5 * time.Minute
)

// final reports whether asking the source again cannot help.
func final(err error) bool {
	for _, sentinel := range []error{
		source.ErrNotFound, source.ErrUnauthorized, source.ErrForbidden, source.ErrChanged,
		source.ErrProtocol, ErrNoSpace, ErrMismatch, errWrite,
	} {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	return false
}

// errWrite marks a failure of our own drive.
var errWrite = errors.New("cannot write")

// pause is how long to wait before try n (from 1): exponential with jitter of
// a half, and never less than the source asked for.
func (p *Puller) pause(n int, err error) time.Duration {
	d := p.retryMax
	if n < 20 {
		d = min(d, p.retry<<(n-1))
	}
	d = d/2 + rand.N(d/2+1)
	var e *source.Error
	if errors.As(err, &e) && e.RetryAfter > 0 {
		d = max(d, min(e.RetryAfter, maxRetryAfter))
	}
	return d
}

// sleep waits or gives the context's cause.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fetch brings the rest of one claimed segment, trying again from the last
// byte received. Tries are counted afresh after progress: any byte, but of a
// source that trickles or falls silent what minSourceRate wants of a stall
// timeout.
func (st *streams) fetch(ctx context.Context, j *job, f artifact.File) error {
	p, l, segment := st.p, j.landing, j.segment
	if p.throttles.left(st.src.Name()) > 0 {
		return nil // whoever can bring it from elsewhere may
	}
	for try := 1; ; try++ {
		at := l.at(segment)
		if at == l.length(segment) {
			return nil
		}
		err := st.stream(ctx, j, f, at)
		if errors.Is(err, errTurn) && ctx.Err() == nil {
			return nil // the rest is somebody's later
		}
		if err == nil {
			if st.p.crowded() {
				return nil
			}
			try = 0
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failure := l.failure(); failure != nil {
			return failure
		}
		// The ref resolved, so the credential was good: it is being replaced, and
		// the source reads it anew for each request.
		if final(err) && !errors.Is(err, source.ErrUnauthorized) {
			if errors.Is(err, source.ErrChanged) {
				return fmt.Errorf("fetch file %s: %w (the pinned commit is gone from the source: refresh the ref)", f.Path, err)
			}
			return fmt.Errorf("fetch file %s: %w", f.Path, err)
		}
		least := int64(1)
		if errors.Is(err, errTrickles) || errors.Is(err, errStalled) {
			least = max(least, int64(minSourceRate*p.stall.Seconds()))
		}
		if l.at(segment)-at >= least {
			try = 1
		}
		if try >= p.attempts {
			return fmt.Errorf("fetch file %s: gave up after %d tries: %w", f.Path, try, err)
		}
		p.stats.retries.Add(1)
		st.pl.flight.retries.Add(1)
		if err := j.permit.sleep(ctx, p.pause(try, err)); err != nil {
			return err
		}
	}
}

// at is how much of a segment is written.
func (l *landing) at(segment int) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written[segment]
}

// stream makes one ranged GET and lands what it yields.
func (st *streams) stream(ctx context.Context, j *job, f artifact.File, at int64) error {
	l, segment := j.landing, j.segment
	n := l.length(segment) - at
	off := int64(segment)*l.segment + at
	in := intake{permit: j.permit, pay: st.p.limiter.WaitN, take: func(piece []byte) error {
		st.counter.Add(int64(len(piece)))
		st.pl.flight.bytes.Add(int64(len(piece)))
		if err := l.write(segment, piece); err != nil {
			return fmt.Errorf("%w: %w", errWrite, err)
		}
		return nil
	}}
	readable := l.size > minSegment+sipBytes || len(l.written) > 1 // else nothing of a sip could be given
	if at == 0 && n > sipBytes && readable && st.p.crowded() {
		n = sipBytes
		in.pay = func(_ context.Context, n int) error {
			st.p.limiter.Charge(n) // the next reader is not to wait for it
			return nil
		}
	}
	// Who has nothing yet is not sent to the end of the queue again before
	// something came: answers that take longer than a turn would never come.
	in.yield = func() bool { return (l.at(segment) > at || !st.p.awaited(l, segment)) && st.p.crowded() }
	return st.p.receive(ctx, st.src, st.pl.m.Listing(), f, off, n, in)
}

// intake is what becomes of the bytes of a range.
type intake struct {
	permit *permit                                // given away while the source is not to be asked; nil: none
	take   func(piece []byte) error               // piece stays valid during the call only
	pay    func(ctx context.Context, n int) error // called once n bytes were taken
	yield  func() bool                            // whether to stop early with errTurn; nil means never
}

// pace judges one body by what came during a stall timeout of waiting for it.
type pace struct {
	stall  time.Duration
	waited time.Duration
	bytes  int64
}

// add counts a read of n bytes that took so long; an error wraps errTrickles.
func (c *pace) add(n int, took time.Duration) error {
	c.waited += took
	c.bytes += int64(n)
	if c.waited < c.stall {
		return nil
	}
	waited, bytes := c.waited, c.bytes
	c.waited, c.bytes = 0, 0
	if float64(bytes) < minSourceRate*waited.Seconds() {
		return fmt.Errorf("%w: %d bytes in %s, want %d a second", errTrickles, bytes, waited.Round(time.Millisecond), minSourceRate)
	}
	return nil
}

// receive reads bytes [off, off+n) of a file under limiter, stall timeout and
// minSourceRate and hands them on in pieces. What came before an error is handed
// on as well.
func (p *Puller) receive(ctx context.Context, src source.Source, listing *artifact.Listing, f artifact.File, off, n int64, in intake) (err error) {
	if err := p.throttles.waitAside(ctx, src.Name(), in.permit); err != nil {
		return err
	}
	defer func() { p.throttles.note(err) }()
	whole := ctx // ends with the pull, perhaps for the stall of another stream
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(p.stall, func() { cancel(errStalled) })
	defer watchdog.Stop()
	defer func() {
		switch {
		case whole.Err() != nil:
		case errors.Is(err, errTrickles):
			p.stats.stalls.Add(1)
		case err != nil && errors.Is(context.Cause(ctx), errStalled):
			p.stats.stalls.Add(1)
			err = fmt.Errorf("%w (%s)", errStalled, p.stall)
		}
	}()
	if in.yield != nil {
		go watchTurn(ctx, cancel, in.yield)
	}
	p.stats.requests.Add(1)
	body, err := src.Open(ctx, listing, f, off, n)
	if err != nil {
		return err
	}
	// A body that does not watch ctx is woken by its Close.
	release := context.AfterFunc(ctx, func() { _ = body.Close() })
	defer func() {
		if release() {
			_ = body.Close()
		}
	}()
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	pace := pace{stall: p.stall}
	least := 1 // the first bytes are handed on at once: somebody may wait for them
	for n > 0 {
		want := piece[:min(n, int64(p.pieceFor()))]
		got := 0
		var readErr error
		for got < len(want) && got < least && readErr == nil {
			watchdog.Reset(p.stall)
			var k int
			began := time.Now()
			k, readErr = body.Read(want[got:])
			got += k
			if slow := pace.add(k, time.Since(began)); readErr == nil {
				readErr = slow
			}
		}
		watchdog.Stop()
		if got > 0 {
			least = readAtLeast
			n -= int64(got)
			p.stats.bytes.Add(int64(got))
			if err := in.take(want[:got]); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if got > 0 {
			if err := in.pay(ctx, got); err != nil {
				return err
			}
		}
		if n == 0 {
			return nil
		}
		if errors.Is(readErr, io.EOF) {
			return fmt.Errorf("body is %d bytes short: %w", n, io.ErrUnexpectedEOF)
		}
		if readErr != nil {
			return readErr
		}
	}
	return nil
}
