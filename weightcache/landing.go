package weightcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	partSuffix = ".part"
	bitsSuffix = ".bits"
	// sealBatch is how many whole segments are flushed together: that much a
	// power cut may cost, and a killed process nothing of it.
	sealBatch = 8
	// pieceSize is what a stream reads, writes and hashes at a time: it stays
	// in a core's cache between the three.
	pieceSize = 256 << 10
	// flushEvery is how many bytes of a segment are written before their
	// write-back is started.
	flushEvery = 4 << 20
)

// pieces pools the buffers of streams and hashers.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

// landing is one file on its way into the store. Streams write segments at
// their offset, a trailing hasher follows the contiguous front, and a bitmap
// on the drive says what need not be fetched again. A file so small that no
// reader gets any of it before its digest is proven has none.
type landing struct {
	s       *Store
	sha     artifact.Digest
	size    int64
	segment int64
	part    durable.File
	bits    durable.File // nil for a file of one segment

	mu      sync.Mutex
	changed signal
	front   signal  // fires when the hasher has something to do
	written []int64 // contiguous bytes of each segment that readers may have
	claimed []bool
	bitmap  []byte // bits that are on the drive; the sealer's alone while sealing
	next    int    // no segment below it is free
	active  int    // segments being fetched
	pending []int  // whole segments whose bit is not on the drive
	sealing bool
	resumed bool // an earlier landing wrote some of it
	named   bool // the names of part and bitmap are on the drive
	hashing bool
	chunker *artifact.Chunker
	hashed  int64 // equals chunker.Size() while nobody hashes
	done    bool
	ended   bool  // it stopped and its file was not committed from it
	err     error // why it will never be committed
}

func (s *Store) partPath(sha artifact.Digest) string {
	return s.path(landingDir, sha.String()+partSuffix)
}

func (s *Store) bitsPath(sha artifact.Digest) string {
	return s.path(landingDir, sha.String()+bitsSuffix)
}

// land begins or resumes a file. Bytes it allocates come out of the
// reservation. One landing per digest may be open at a time; the puller's
// file flights see to that.
func (s *Store) land(ctx context.Context, f artifact.File, segment int64, room *reservation) (*landing, error) {
	if err := s.waitRemoved(ctx, f.SHA256, true); err != nil {
		return nil, err
	}
	s.mu.Lock()
	_, resumable := s.partial[f.SHA256]
	s.landing[f.SHA256] = true
	delete(s.removing, f.SHA256)
	s.freed.fire()
	s.mu.Unlock()
	l := &landing{s: s, sha: f.SHA256, size: f.Size, segment: segment, chunker: artifact.NewChunker()}
	if resumable {
		l.resumed = true
		err := l.resume()
		if err == nil {
			return l, nil
		}
		s.log.Warn("cannot resume file, starting it anew", slog.String("file", f.SHA256.String()), slog.Any("error", err))
		if err := l.discard(); err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.landing[f.SHA256] = true
		s.mu.Unlock()
		l = &landing{s: s, sha: f.SHA256, size: f.Size, segment: segment, chunker: artifact.NewChunker()}
	}
	if err := l.begin(room); err != nil {
		return nil, fmt.Errorf("land file %s: %w", f.SHA256.Short(), s.gone(classified(errors.Join(err, l.discard()))))
	}
	return l, nil
}

func (l *landing) setUp() {
	n := int((l.size + l.segment - 1) / l.segment)
	l.written = make([]int64, n)
	l.claimed = make([]bool, n)
	if l.bitmap == nil {
		l.bitmap = make([]byte, (n+7)/8)
	}
}

func (l *landing) begin(room *reservation) error {
	l.setUp()
	s := l.s
	part, err := s.fs.OpenFile(s.partPath(l.sha), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	l.part = part
	s.mu.Lock()
	s.partial[l.sha] = l.size
	if room != nil {
		room.takeLocked(l.size)
	}
	s.mu.Unlock()
	if err := part.Allocate(l.size); err != nil {
		return err
	}
	if l.size <= minSegment {
		return nil
	}
	// Neither file need be durable before the first bit is.
	if l.bits, err = s.fs.OpenFile(s.bitsPath(l.sha), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600); err != nil {
		return err
	}
	_, err = l.bits.WriteAt(l.encodeBits(), 0)
	return err
}

// resume opens what an earlier process left; the hasher reads back what is
// there. What an earlier boot wrote without a bit may never have reached the
// drive and is fetched again.
func (l *landing) resume() error {
	s := l.s
	data, err := durable.ReadFile(s.fs, s.bitsPath(l.sha), maxBitsBytes)
	if err != nil {
		return err
	}
	b, err := decodeBits(data, l.sha, l.size)
	if err != nil {
		return err
	}
	l.segment, l.bitmap = b.segment, b.bitmap
	l.setUp()
	// A commit that was interrupted may have made it read-only.
	if err := s.fs.Chmod(s.partPath(l.sha), 0o600); err != nil {
		return err
	}
	if l.part, err = s.fs.OpenFile(s.partPath(l.sha), os.O_RDWR, 0); err != nil {
		return err
	}
	info, err := l.part.Stat()
	if err != nil {
		return err
	}
	if info.Size() != l.size {
		return fmt.Errorf("resume file: %w: %d bytes allocated, want %d", artifact.ErrInvalid, info.Size(), l.size)
	}
	sameBoot := s.sameBoot(b)
	for i := range l.written {
		switch {
		case l.bitmap[i/8]&(1<<(i%8)) != 0:
		case sameBoot && b.written[i] == l.length(i):
			l.pending = append(l.pending, i)
		case sameBoot:
			// Readers may have had it, so it must not come anew.
			l.written[i] = b.written[i]
			continue
		default:
			continue
		}
		l.claimed[i], l.written[i] = true, l.length(i)
	}
	if !sameBoot || b.old {
		if err := durable.WriteFile(s.fs, s.bitsPath(l.sha), l.encodeBits(), 0o600); err != nil {
			return err
		}
	}
	l.bits, err = s.fs.OpenFile(s.bitsPath(l.sha), os.O_RDWR, 0)
	return err
}

// length is the number of bytes of segment i.
func (l *landing) length(i int) int64 {
	return min(l.segment, l.size-int64(i)*l.segment)
}

// load is the number of segments being fetched, and whether one is free.
func (l *landing) load() (active int, free bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ; l.next < len(l.claimed) && l.claimed[l.next]; l.next++ {
	}
	return l.active, l.next < len(l.claimed) && !l.done && l.err == nil
}

// giveBack ends a claim. A segment that is not whole becomes free again and
// keeps what was written.
func (l *landing) giveBack(i int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.active--
	if l.written[i] < l.length(i) {
		l.claimed[i] = false
		l.next = min(l.next, i)
	}
	l.changed.fire()
	l.front.fire()
}

// write puts the next bytes of a claimed segment on the drive and hashes them
// in passing where they are the next of the file.
func (l *landing) write(i int, p []byte) error {
	l.mu.Lock()
	at := l.written[i]
	err := l.err
	l.mu.Unlock()
	if err != nil {
		return err
	}
	off := int64(i)*l.segment + at
	if at+int64(len(p)) > l.length(i) {
		return fmt.Errorf("write file %s: %w: segment %d is too long", l.sha.Short(), ErrMismatch, i)
	}
	if _, err := l.part.WriteAt(p, off); err != nil {
		err = fmt.Errorf("write file %s: %w", l.sha.Short(), classified(err))
		if lost(err) {
			l.fail(err)
		}
		return err
	}
	end := at + int64(len(p))
	if f, ok := l.part.(durable.Flusher); ok && end/flushEvery != at/flushEvery {
		from := end / flushEvery * flushEvery
		if err := f.Flush(int64(i)*l.segment+from-flushEvery, flushEvery); err != nil {
			return fmt.Errorf("write file %s: %w", l.sha.Short(), err)
		}
	}
	if err := l.writeCount(i, end); err != nil {
		return err
	}
	l.mu.Lock()
	l.written[i] = end
	inOrder := !l.hashing && l.hashed == off
	l.hashing = l.hashing || inOrder
	l.changed.fire()
	if !inOrder {
		l.front.fire()
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	_, _ = l.chunker.Write(p)
	l.mu.Lock()
	l.hashed += int64(len(p))
	l.hashing = false
	l.front.fire()
	l.mu.Unlock()
	return nil
}

// seal takes note of a whole segment and flushes a batch of them when one is
// due. Other streams go on meanwhile; the bits they add join the next flush.
func (l *landing) seal(i int) error {
	if l.bits == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, i)
	if l.sealing || len(l.pending) < sealBatch || l.done || l.err != nil {
		return nil
	}
	l.sealing = true
	batch := l.pending
	l.pending = nil
	l.mu.Unlock()
	err := l.flush(batch)
	l.mu.Lock()
	l.sealing = false
	if err != nil && l.err == nil {
		l.err = err
	}
	l.changed.fire()
	l.front.fire()
	return err
}

// flush makes whole segments durable and then their bits.
func (l *landing) flush(batch []int) error {
	if err := l.part.Datasync(); err != nil {
		return fmt.Errorf("sync file %s: %w: %w", l.sha.Short(), errSync, classified(err))
	}
	for _, i := range batch {
		l.bitmap[i/8] |= 1 << (i % 8)
		if _, err := l.bits.WriteAt(l.bitmap[i/8:i/8+1], int64(bitsHeader+i/8)); err != nil {
			return fmt.Errorf("write bitmap of file %s: %w", l.sha.Short(), classified(err))
		}
	}
	if err := l.bits.Datasync(); err != nil {
		return fmt.Errorf("sync bitmap of file %s: %w: %w", l.sha.Short(), errSync, err)
	}
	if l.named {
		return nil
	}
	if err := l.s.fs.SyncDir(l.s.path(landingDir)); err != nil {
		return fmt.Errorf("sync bitmap of file %s: %w", l.sha.Short(), err)
	}
	l.named = true
	return nil
}

// errSync marks a sync that failed. The kernel may have dropped the bytes and
// call the next sync good, so what was to be kept is never believed again.
var errSync = errors.New("cannot sync")

// lost reports whether the bytes of a landing cannot be trusted or had back
// after an error, so that it starts anew in another file.
func lost(err error) bool {
	return errors.Is(err, ErrMismatch) || errors.Is(err, errSync) || errors.Is(err, syscall.EIO)
}

// settle ends a landing that err ended: what is whole stays for a resume where
// it can be trusted.
func (l *landing) settle(err error) error {
	if l.bits != nil && !lost(err) {
		pauseErr := l.pause()
		err = errors.Join(err, pauseErr)
		if !lost(pauseErr) && !l.s.has(l.sha) { // else nobody resumes it
			return err
		}
	}
	return errors.Join(err, l.discard())
}

// pause makes what is whole durable and closes the files for a resume.
func (l *landing) pause() error {
	var err error
	if len(l.pending) > 0 && l.failure() == nil {
		err = l.flush(l.pending)
	}
	return errors.Join(err, l.close())
}

// present is the number of bytes written.
func (l *landing) present() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var n int64
	for _, w := range l.written {
		n += w
	}
	return n
}

// run is the trailing hasher: it hashes what streams could not hash in
// passing, and when the last byte is hashed it commits the file or finds the
// mismatch. It returns nil once the file is committed.
func (l *landing) run(ctx context.Context) error {
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	l.mu.Lock()
	for {
		if l.err != nil {
			err := l.err
			l.mu.Unlock()
			return err
		}
		n := l.readyLocked()
		if !l.hashing && l.hashed == l.size {
			l.mu.Unlock()
			return l.finish(ctx)
		}
		if ctx.Err() != nil {
			l.mu.Unlock()
			return context.Cause(ctx)
		}
		if l.hashing || n == 0 {
			wait := l.front.wait()
			l.mu.Unlock()
			select {
			case <-wait:
			case <-ctx.Done():
			}
			l.mu.Lock()
			continue
		}
		l.hashing = true
		off := l.hashed
		l.mu.Unlock()
		n = min(n, pieceSize)
		_, err := l.part.ReadAt(piece[:n], off)
		if err == nil {
			_, _ = l.chunker.Write(piece[:n])
		}
		l.mu.Lock()
		l.hashing = false
		if err != nil && l.err == nil {
			l.err = fmt.Errorf("read back file %s: %w", l.sha.Short(), err)
		} else {
			l.hashed += n
		}
	}
}

// readyLocked is how many bytes follow the hashed ones without a gap, up to
// the end of their segment.
func (l *landing) readyLocked() int64 {
	if l.hashed >= l.size {
		return 0
	}
	i := int(l.hashed / l.segment)
	return int64(i)*l.segment + l.written[i] - l.hashed
}

// finish compares the digest and publishes the file: 0444, fsync, rename,
// fsync of the directory. Where a resolve stored the same bytes meanwhile, that
// file stays: views have links to it.
func (l *landing) finish(ctx context.Context) error {
	s := l.s
	sum, chunks := l.chunker.Sum()
	if sum != l.sha {
		err := fmt.Errorf("land file %s: %w: the bytes have digest %s", l.sha.Short(), ErrMismatch, sum.Short())
		l.fail(err)
		return err
	}
	blob := s.blobPath(l.sha)
	if err := s.waitRemoved(ctx, l.sha, true); err != nil {
		return err
	}
	err := func() error {
		if s.has(l.sha) {
			return s.removeIfThere(s.partPath(l.sha))
		}
		if err := s.writeChunks(l.sha, chunks); err != nil {
			return err
		}
		if err := l.part.Chmod(0o444); err != nil {
			return err
		}
		if err := l.part.Sync(); err != nil {
			return fmt.Errorf("%w: %w", errSync, err)
		}
		if err := durable.MkdirAllSynced(s.fs, filepath.Dir(blob), 0o700); err != nil {
			return err
		}
		if err := s.fs.Rename(s.partPath(l.sha), blob); err != nil {
			return err
		}
		// Should the old name come back after a crash, the next open removes it.
		s.syncNames(filepath.Dir(blob))
		return nil
	}()
	s.mu.Lock()
	delete(s.removing, l.sha)
	if err == nil {
		delete(s.partial, l.sha)
		delete(s.bad, l.sha)
		s.blobs[l.sha] = l.size
	}
	s.freed.fire()
	s.mu.Unlock()
	if err != nil {
		err = fmt.Errorf("commit file %s: %w", l.sha.Short(), classified(err))
		l.fail(err)
		return err
	}
	l.mu.Lock()
	l.done = true
	l.changed.fire()
	l.mu.Unlock()
	l.idle()
	if err := errors.Join(l.close(), s.removeIfThere(s.bitsPath(l.sha))); err != nil {
		s.log.Warn("cannot clear up after landing", slog.String("file", l.sha.String()), slog.Any("error", err))
	}
	s.notify()
	return nil
}

// fail ends the landing for streams and readers.
func (l *landing) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	l.changed.fire()
	l.front.fire()
}

// end tells readers that nothing more comes of this landing.
func (l *landing) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.changed.fire()
}

// idle waits until no stream uses the open files.
func (l *landing) idle() {
	l.mu.Lock()
	for l.active > 0 || l.sealing {
		wait := l.changed.wait()
		l.mu.Unlock()
		// Streams see done or err at their next piece, so this ends.
		<-wait
		l.mu.Lock()
	}
	l.mu.Unlock()
}

// close closes the open files; the part and its bitmap stay for a resume.
func (l *landing) close() error {
	l.s.mu.Lock()
	delete(l.s.landing, l.sha)
	l.s.mu.Unlock()
	var err error
	if l.part != nil {
		err = l.part.Close()
		l.part = nil
	}
	if l.bits != nil {
		err = errors.Join(err, l.bits.Close())
		l.bits = nil
	}
	return err
}

// discard closes the landing and forgets its bytes.
func (l *landing) discard() error {
	s := l.s
	if l.resumed || l.present() > 0 {
		s.doubt(l.sha)
	}
	err := errors.Join(l.close(), s.removeIfThere(s.bitsPath(l.sha)), s.removeIfThere(s.partPath(l.sha)))
	s.mu.Lock()
	delete(s.partial, l.sha)
	s.freed.fire()
	s.mu.Unlock()
	return err
}
