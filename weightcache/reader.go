package weightcache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Reader reads one file of an artifact, also while it is still landing. It is
// safe for concurrent use; Close ends it.
type Reader struct {
	p    *Puller
	file artifact.File
	path string
	pull *pull // held while the file was not committed at Open, else nil

	// Guarded by p.mu:
	waitsAt int64 // the offset it waits at, -1 where it waits for nothing
	given   bool  // it was given a byte

	mu      sync.Mutex
	blob    durable.File // the committed file
	damage  int          // how often it had been found damaged when blob was opened
	landing *landing     // the landing whose bytes were given out
	part    durable.File // its file
	closed  bool

	served atomic.Bool // it gave bytes out
}

// Size is the file's length in bytes.
func (r *Reader) Size() int64 { return r.file.Size }

// File is the committed and verified file, to be read at any offset (sendfile)
// until Close. It is nil while the file is landing, and for good where bytes
// given out before are not those of the committed file or where that was found
// damaged since: ReadAt then says so.
func (r *Reader) File() *os.File {
	if bound := r.bound(); bound != nil && !bound.committed() {
		return nil
	}
	blob, err := r.committed()
	if err != nil || blob == nil {
		return nil
	}
	if f, ok := blob.(*durable.OSFile); ok {
		return f.File
	}
	return nil
}

// ReadAt reads at least one byte at off, and as many more as are there, up to
// len(p); it waits for bytes that have not arrived. At the end of the file it
// gives io.EOF. Bytes of the last segment, of a file of one segment its last
// 64 KiB, are given only once the whole file's digest is right; where it is not, and bytes were given before, every later
// call gives an error that wraps ErrMismatch, and so it does once the committed
// file it reads was found damaged. All bytes a Reader gives are of one landing;
// where that ends without a commit, the pull's error is passed on.
func (r *Reader) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read file %s: %w: offset %d", r.path, artifact.ErrInvalid, off)
	}
	if off >= r.file.Size {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	p = p[:min(int64(len(p)), r.file.Size-off)]
	for waited := false; ; waited = true {
		n, err := r.tryRead(p, off)
		if n > 0 && r.pull != nil && (waited || !r.served.Swap(true)) {
			r.p.got(r)
		}
		if n > 0 || err != nil {
			return n, err
		}
		if r.pull != nil {
			r.p.waits(r, off)
		}
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		scheduled, written, err := r.waiting(off)
		if err != nil {
			return 0, err
		}
		if scheduled == nil {
			continue
		}
		select {
		case <-scheduled:
		case <-written:
		case <-r.pull.done:
			// The pull ended, well or not: look once more, then say why.
			if n, err := r.tryRead(p, off); n > 0 || err != nil {
				return n, err
			}
			if r.pull.err != nil {
				return 0, fmt.Errorf("read file %s: %w", r.path, r.pull.err)
			}
			return 0, fmt.Errorf("read file %s: %w", r.path, ErrNotReady)
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// bound is the landing whose bytes were given out, nil where none were.
func (r *Reader) bound() *landing {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.landing
}

// tryRead reads what is there now; 0, nil means that it must wait.
func (r *Reader) tryRead(p []byte, off int64) (int, error) {
	bound := r.bound()
	if bound != nil {
		if err := bound.failure(); errors.Is(err, ErrMismatch) {
			return 0, fmt.Errorf("read file %s: %w", r.path, err)
		}
	}
	// What another landing committed need not be what this one gave out.
	if bound == nil || bound.committed() {
		blob, err := r.committed()
		if err != nil {
			return 0, err
		}
		if blob != nil {
			n, err := blob.ReadAt(p, off)
			if n > 0 {
				return n, nil
			}
			if errors.Is(err, syscall.EIO) {
				err = errors.Join(err, r.p.takeOut(r.file.SHA256))
			}
			return 0, fmt.Errorf("read file %s: %w", r.path, err)
		}
		if bound != nil {
			return 0, fmt.Errorf("read file %s: %w: it was taken out of the store", r.path, ErrNotReady)
		}
	}
	l := r.p.landingOf(r.pull, r.file.SHA256)
	if l == nil || bound != nil && l != bound {
		return 0, nil
	}
	n := min(l.readable(off), int64(len(p)))
	if n <= 0 {
		return 0, nil
	}
	part, err := r.bind(l)
	if err != nil || part == nil {
		return 0, err
	}
	read, err := part.ReadAt(p[:n], off)
	if read > 0 {
		return read, nil
	}
	return 0, fmt.Errorf("read file %s: %w", r.path, err)
}

// waiting gives the channels of which one fires when off may have become
// readable, or nils where the caller should look again at once.
func (r *Reader) waiting(off int64) (scheduled, written <-chan struct{}, err error) {
	r.mu.Lock()
	closed := r.closed
	bound := r.landing
	r.mu.Unlock()
	if closed {
		return nil, nil, fmt.Errorf("read file %s: %w", r.path, os.ErrClosed)
	}
	if r.pull == nil {
		return nil, nil, fmt.Errorf("read file %s: %w", r.path, ErrNotReady)
	}
	wait, l := r.p.waitLanding(r.pull, r.file.SHA256)
	switch {
	case bound != nil && bound.over():
		return wait, nil, nil // only the end of the pull says more
	case bound != nil:
		l = bound
	case l == nil:
		if r.p.store.has(r.file.SHA256) {
			return nil, nil, nil
		}
		return wait, nil, nil
	}
	written = l.waitReadable(off)
	if written == nil {
		return nil, nil, nil
	}
	return wait, written, nil
}

// committed opens the verified file once it is there.
func (r *Reader) committed() (durable.File, error) {
	r.mu.Lock()
	blob, closed := r.blob, r.closed
	r.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("read file %s: %w", r.path, os.ErrClosed)
	}
	damage := r.p.store.damageOf(r.file.SHA256)
	if blob != nil {
		if damage != r.damage {
			return nil, fmt.Errorf("read file %s: %w: it was found damaged while it was read", r.path, ErrMismatch)
		}
		return blob, nil
	}
	blob, err := r.p.store.openBlob(r.file.SHA256)
	if errors.Is(err, ErrNotReady) {
		return nil, nil //nolint:nilnil // no file yet is an answer here
	}
	if err != nil {
		return nil, fmt.Errorf("read file %s: %w", r.path, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.blob == nil {
		r.damage = damage
	}
	return r.keepLocked(&r.blob, blob)
}

// keepLocked stores a file that was opened outside the lock, unless another
// call did so first.
func (r *Reader) keepLocked(slot *durable.File, f durable.File) (durable.File, error) {
	switch {
	case r.closed:
		_ = f.Close()
		return nil, fmt.Errorf("read file %s: %w", r.path, os.ErrClosed)
	case *slot != nil:
		_ = f.Close()
	default:
		*slot = f
	}
	return *slot, nil
}

// bind opens the part of a landing; nil where it ended meanwhile.
func (r *Reader) bind(l *landing) (durable.File, error) {
	r.mu.Lock()
	part, bound := r.part, r.landing
	r.mu.Unlock()
	if part != nil {
		if bound != l {
			return nil, nil //nolint:nilnil // another call bound another landing
		}
		return part, nil
	}
	part, err := r.p.store.fs.OpenFile(r.p.store.partPath(l.sha), os.O_RDONLY, 0)
	if notExist(err) {
		return nil, nil //nolint:nilnil // the caller looks again
	}
	if err != nil {
		return nil, fmt.Errorf("read file %s: %w", r.path, err)
	}
	// A landing fails before its part is removed: one that has not failed
	// after the open owns the file that was opened.
	if l.failure() != nil {
		return nil, part.Close()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.part == nil {
		r.landing = l
	}
	if r.landing != l {
		return nil, part.Close()
	}
	return r.keepLocked(&r.part, part)
}

// Close ends the reader; a pull that only it held is given up, resumably.
func (r *Reader) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	blob, part := r.blob, r.part
	r.mu.Unlock()
	if r.pull != nil {
		r.p.unwant(r.pull, r)
		r.p.leave(r.pull)
	}
	var err error
	if blob != nil {
		err = blob.Close()
	}
	if part != nil {
		err = errors.Join(err, part.Close())
	}
	if err != nil {
		return fmt.Errorf("close file %s: %w", r.path, err)
	}
	return nil
}

// readable is how many bytes readers may have at off.
func (l *landing) readable(off int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readableLocked(off)
}

func (l *landing) readableLocked(off int64) int64 {
	i := int(off / l.segment)
	switch last := len(l.written) - 1; {
	case l.err != nil || i > last:
		return 0
	case i == last && last > 0:
		return 0 // it waits for the digest
	case i == last:
		return min(l.written[i], l.size-minSegment) - off
	}
	return int64(i)*l.segment + l.written[i] - off
}

// waitReadable fires at the next change, or is nil where off is readable now.
func (l *landing) waitReadable(off int64) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.readableLocked(off) > 0 || l.done {
		return nil
	}
	return l.changed.wait()
}

// committed reports whether the file was published from this landing.
func (l *landing) committed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done
}

// over reports whether this landing ended and its file was not published.
func (l *landing) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

func (l *landing) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
