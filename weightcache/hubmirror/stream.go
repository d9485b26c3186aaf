package hubmirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"syscall"
	"time"
)

const (
	// trickleEvery is how often a body with nothing new to send gives one byte
	// of its reserve. Hub clients give up on 10 s of silence; 4 s leaves them
	// one lost turn.
	trickleEvery = 4 * time.Second
	// reserveBytes is what is held back of a file being filled: at one byte
	// every trickleEvery it lasts 4.5 hours, longer than any pull keeps trying.
	reserveBytes = 4 << 10
)

// errQuiet ends a read that brought nothing for as long as a body may be silent.
var errQuiet = errors.New("nothing new")

// body is one answer's bytes on their way to a client.
type body struct {
	m       *Mirror
	w       http.ResponseWriter
	control *http.ResponseController
	content Content
	left    span    // not sent yet
	held    []byte  // read and not sent, at the start of big or of own
	own     []byte  // 2 reserveBytes, for a body that waits
	big     *[]byte // bufferBytes of the pool while bytes flow, else nil
	filling bool    // the last read was of a file being filled
	place   *place  // nil while there is nothing to send
	free    bool    // the body needs no place
	last    time.Time
	touch   func() // told at each byte that the client is there
	// suspect, where the client has the file's beginning already, says that
	// those bytes turned out other than they are now; else it is nil.
	suspect func() bool
}

// stream sends part of a file: bytes still arriving from ReadAt, and by
// sendfile from the moment the file is committed. A body is never silent for
// long once its first byte can be had: what waits for its source, for a digest
// or for a place gives a byte of its reserve every trickleEvery.
func (m *Mirror) stream(ctx context.Context, w http.ResponseWriter, c Content, part span, touch func(), suspect func() bool) error {
	b := &body{
		m: m, w: w, control: http.NewResponseController(w), content: c, left: part,
		free: part.n <= SmallBody, last: time.Now(), touch: touch, suspect: suspect,
	}
	defer func() {
		b.place.end()
		b.rest()
		_ = b.control.SetWriteDeadline(time.Time{})
	}()
	if !b.free || c.File() == nil {
		// The headers go out before any wait: a client gives up on an answer
		// that does not begin within 10 s.
		if err := b.flush(); err != nil {
			return err
		}
	}
	m.stats.streams.Add(1)
	defer m.stats.streams.Add(-1)
	for b.left.n > 0 {
		if b.suspect != nil && b.suspect() {
			return fmt.Errorf("send the rest of a file: %w", ErrMismatch)
		}
		if err := b.step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// step sends the next piece there is, or a byte of the reserve.
func (b *body) step(ctx context.Context) error {
	// The first piece after the commit still comes by ReadAt, which knows
	// whether the bytes sent so far are those of the committed file.
	file := b.content.File()
	if file != nil && !b.filling {
		if err := b.admitted(ctx); err != nil || b.left.n == 0 {
			return err
		}
		return b.sendCommitted(file)
	}
	if err := b.read(ctx); errors.Is(err, errQuiet) {
		// Who has nothing to send leaves place and buffer to those who have.
		b.place.end()
		b.place = nil
		b.rest()
		return b.trickle()
	} else if err != nil {
		return err
	}
	b.filling = file == nil
	if b.sendable() == 0 {
		return b.trickle()
	}
	if err := b.admitted(ctx); err != nil || b.left.n == 0 {
		return err
	}
	return b.sendHeld(b.sendable())
}

// sendable is how many of the bytes held need not be kept for later.
func (b *body) sendable() int {
	if !b.filling || int64(len(b.held)) == b.left.n {
		return len(b.held)
	}
	return max(0, len(b.held)-reserveBytes)
}

// admitted waits for a place, while the body trickles.
func (b *body) admitted(ctx context.Context) error {
	if b.free {
		return nil
	}
	if b.place == nil {
		b.place = b.m.places.ask()
	}
	if b.place.has() {
		return nil
	}
	b.m.stats.waiting.Add(1)
	b.m.stats.streams.Add(-1)
	defer func() {
		b.m.stats.waiting.Add(-1)
		b.m.stats.streams.Add(1)
	}()
	for b.left.n > 0 {
		if len(b.held) == 0 {
			if err := b.read(ctx); err != nil && !errors.Is(err, errQuiet) {
				return err
			}
		}
		timer := time.NewTimer(max(0, b.quiet()))
		select {
		case <-b.place.granted:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		if err := b.trickle(); err != nil {
			return err
		}
	}
	return nil
}

// quiet is how long the body may still be silent.
func (b *body) quiet() time.Duration { return trickleEvery - time.Since(b.last) }

// read adds to what is held. Where the body may be silent no longer before
// anything comes it gives errQuiet.
func (b *body) read(ctx context.Context) error {
	into, err := b.space()
	if err != nil {
		return err
	}
	have := len(b.held)
	want := min(b.left.n, int64(len(into))) - int64(have)
	if want <= 0 {
		return nil
	}
	wait := b.quiet()
	if have == 0 {
		wait = trickleEvery // there is nothing to trickle yet
	}
	limited, cancel := context.WithTimeoutCause(ctx, max(0, wait), errQuiet)
	defer cancel()
	n, err := b.content.ReadAt(limited, into[have:int64(have)+want], b.left.from+int64(have))
	b.held = into[:have+n]
	switch {
	case n > 0 && (err == nil || int64(len(b.held)) == b.left.n):
		return nil
	case err == nil:
		return fmt.Errorf("read file: %w", io.ErrNoProgress)
	case errors.Is(err, io.EOF):
		return fmt.Errorf("read file: %w", io.ErrUnexpectedEOF)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, errQuiet):
		return errQuiet
	}
	return fmt.Errorf("read file: %w", err)
}

// space gives the buffer whose start holds what is held: a large one of the
// pool while bytes may flow, a small one while the body waits.
func (b *body) space() ([]byte, error) {
	if b.big == nil && (b.free || b.place.has()) {
		big, ok := b.m.buffers.Get().(*[]byte)
		if !ok {
			return nil, errors.New("take buffer: wrong type")
		}
		b.big = big
		b.held = (*big)[:copy(*big, b.held)]
	}
	if b.big != nil {
		return *b.big, nil
	}
	if b.own == nil {
		b.own = make([]byte, 2*reserveBytes)
	}
	return b.own, nil
}

// rest gives the large buffer back. At most the reserve is held then.
func (b *body) rest() {
	if b.big == nil {
		return
	}
	if b.own == nil {
		b.own = make([]byte, 2*reserveBytes)
	}
	b.held = b.own[:copy(b.own, b.held)]
	b.m.buffers.Put(b.big)
	b.big = nil
}

// trickle sends one byte of the reserve where the body was silent long enough.
func (b *body) trickle() error {
	if len(b.held) == 0 || b.quiet() > 0 {
		return nil
	}
	b.m.stats.trickled.Add(1)
	return b.sendHeld(1)
}

// sendHeld sends the first n bytes held.
func (b *body) sendHeld(n int) error {
	if err := b.allowWrite(); err != nil {
		return err
	}
	sent, err := b.w.Write(b.held[:n])
	b.held = b.held[:copy(b.held, b.held[sent:])]
	b.sent(int64(sent))
	if err != nil {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	return b.flush()
}

// sendCommitted sends one piece of a file on the drive. A LimitedReader over an
// *os.File is the form for which net/http uses sendfile.
func (b *body) sendCommitted(file *os.File) error {
	if len(b.held) > 0 {
		return b.sendHeld(len(b.held))
	}
	if _, err := file.Seek(b.left.from, io.SeekStart); err != nil {
		return fmt.Errorf("seek file: %w", err)
	}
	n := min(b.left.n, pieceBytes)
	if err := b.allowWrite(); err != nil {
		return err
	}
	sent, err := io.Copy(b.w, &io.LimitedReader{R: file, N: n})
	b.sent(sent)
	if errors.Is(err, syscall.EIO) {
		// ReadAt tells the store of damage, or has the bytes after all.
		b.filling = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	if sent < n {
		return fmt.Errorf("file ended %d bytes early", n-sent)
	}
	return nil
}

func (b *body) sent(n int64) {
	b.m.stats.bytes.Add(n)
	b.left.from, b.left.n = b.left.from+n, b.left.n-n
	if n > 0 {
		b.last = time.Now()
		b.touch()
	}
}

// allowWrite gives the client WriteTimeout for the next piece.
func (b *body) allowWrite() error {
	err := b.control.SetWriteDeadline(time.Now().Add(b.m.opts.WriteTimeout))
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	return nil
}

func (b *body) flush() error {
	if err := b.allowWrite(); err != nil {
		return err
	}
	if err := b.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	return nil
}
