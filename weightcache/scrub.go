package weightcache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	defaultScrubEvery = 7 * 24 * time.Hour
	defaultScrubRate  = 64 << 20
	// repairPause is how long Run waits before it tries a failed repair again.
	repairPause = time.Minute
)

// scrubOptions are how often and how fast stored files are read again.
type scrubOptions struct {
	every time.Duration
	rate  units.Rate
}

func (o *scrubOptions) setDefaults() {
	if o.every == 0 {
		o.every = defaultScrubEvery
	}
	if o.rate <= 0 {
		o.rate = defaultScrubRate
	}
}

// Run keeps pulls that readers began going, reads every stored file again
// every ScrubEvery, fetches damaged files anew, and drops what refs meant before
// once nothing holds it. It returns when ctx ends and gives up the pulls that
// only it holds; Wait says when those have ended.
func (p *Puller) Run(ctx context.Context) error {
	p.mu.Lock()
	if p.running {
		p.mu.Unlock()
		return errors.New("run puller: already running")
	}
	p.running = true
	p.mu.Unlock()
	var loops sync.WaitGroup
	loops.Go(func() {
		if p.store.watchLost(ctx) != nil {
			p.store.notify() // every status has changed
		}
	})
	loops.Go(func() { p.scrubLoop(ctx) })
	loops.Go(func() { p.sweepLoop(ctx) })
	p.repairLoop(ctx)
	loops.Wait()
	p.mu.Lock()
	p.running = false
	var kept []*pull
	for _, pl := range p.pulls {
		if pl.kept {
			pl.kept = false
			kept = append(kept, pl)
		}
	}
	p.mu.Unlock()
	for _, pl := range kept {
		p.leave(pl)
	}
	return nil
}

// sweepLoop drops superseded artifacts when their last lease or pull ends, or
// the time for which one was kept.
func (p *Puller) sweepLoop(ctx context.Context) {
	changed, unsubscribe := p.store.Subscribe()
	defer unsubscribe()
	for {
		p.store.sweepSuperseded()
		var over <-chan time.Time
		var timer *time.Timer
		if at, found := p.store.nextKept(); found {
			timer = time.NewTimer(max(at.Sub(p.store.now()), time.Millisecond))
			over = timer.C
		}
		select {
		case <-changed:
		case <-over:
		case <-ctx.Done():
		}
		if timer != nil {
			timer.Stop()
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// repairLoop fetches damaged files again, one artifact at a time.
func (p *Puller) repairLoop(ctx context.Context) {
	for ctx.Err() == nil {
		again := false
		for _, m := range p.store.damaged() {
			if _, err := p.Ensure(ctx, m.Ref, EnsureOptions{Reason: ReasonRepair}); err != nil && ctx.Err() == nil {
				p.log.Warn("cannot mend artifact yet", slog.String("artifact", m.Digest.String()), slog.Any("error", err))
				again = true
			}
		}
		var timer <-chan time.Time
		if again {
			timer = time.After(repairPause)
		}
		select {
		case <-p.repairs:
		case <-timer:
		case <-ctx.Done():
		}
	}
}

// damaged lists the current manifests that were complete and lost a file.
func (s *Store) damaged() []*artifact.Manifest {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*artifact.Manifest
	for _, m := range s.refs {
		if slices.ContainsFunc(m.Files, func(f artifact.File) bool { return s.bad[f.SHA256] }) {
			list = append(list, m)
		}
	}
	return list
}

// scrubLoop reads the stored files in turn, spread by the rate; every file is
// read once every period.
func (p *Puller) scrubLoop(ctx context.Context) {
	if p.scrub.every < 0 {
		return
	}
	for ctx.Err() == nil {
		sha, due, found := p.store.nextScrub(p.scrub.every)
		wait := p.scrub.every
		if found {
			wait = due.Sub(p.now())
		}
		if wait > 0 {
			// New files appear meanwhile; the wait is cut so that they count.
			if sleep(ctx, min(wait, time.Hour)) != nil {
				return
			}
			continue
		}
		// Also where the check fails: the next file has its turn first.
		p.store.noteCheck(sha, p.now())
		if _, err := p.checkFile(ctx, sha, NewLimiter(p.scrub.rate), idly); err != nil && ctx.Err() == nil {
			p.log.Warn("cannot scrub file", slog.String("file", sha.String()), slog.Any("error", err))
		}
	}
}

// nextScrub finds the file whose last check is oldest.
func (s *Store) nextScrub(every time.Duration) (sha artifact.Digest, due time.Time, found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for file := range s.checks {
		if _, there := s.blobs[file]; !there {
			delete(s.checks, file)
		}
	}
	for file := range s.blobs {
		last, seen := s.checks[file]
		if !seen {
			last = now // it landed just now
			s.checks[file] = last
		}
		if last.After(now) {
			last = now // the clock was set back
			s.checks[file] = last
		}
		at := last.Add(every)
		if !found || cmp.Or(at.Compare(due), slices.Compare(file[:], sha[:])) < 0 {
			sha, due, found = file, at, true
		}
	}
	return sha, due, found
}

// noteCheck notes when a file was checked, in memory.
func (s *Store) noteCheck(sha artifact.Digest, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks[sha] = at
}

// keepCheck notes on the drive that a file was found right, as its mtime, so
// that processes which restart often do not put its next check off for ever.
func (s *Store) keepCheck(sha artifact.Digest, at time.Time) error {
	s.noteCheck(sha, at)
	if err := s.fs.Chtimes(s.blobPath(sha), at, at); err != nil && !notExist(err) {
		return fmt.Errorf("note check of file %s: %w", sha.Short(), err)
	}
	return nil
}

// checkFile reads a stored file and takes it out of the store where its bytes
// are not its digest's. The reading is done by run: at once, or idly.
func (p *Puller) checkFile(ctx context.Context, sha artifact.Digest, limiter *Limiter, run func(read func())) (good bool, err error) {
	good, err = p.store.hashesTo(ctx, sha, limiter, run)
	if errors.Is(err, ErrNotReady) && p.store.isBad(sha) {
		p.repair() // it was missing from the drive
	}
	if err == nil && good {
		err = p.store.keepCheck(sha, p.now())
	}
	if err != nil || good {
		return good, err
	}
	return false, p.takeOut(sha)
}

// takeOut takes a damaged file out of the store and has it fetched again.
func (p *Puller) takeOut(sha artifact.Digest) error {
	p.stats.damaged.Add(1)
	p.log.Error("stored file is damaged, it is taken out and fetched again", slog.String("file", sha.String()))
	err := p.store.discard(sha)
	p.repair()
	return err
}

// repair wakes Run's repairs.
func (p *Puller) repair() {
	select {
	case p.repairs <- struct{}{}:
	default:
	}
}

func (s *Store) isBad(sha artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bad[sha]
}

// hashesTo reads a stored file and compares its digest.
func (s *Store) hashesTo(ctx context.Context, sha artifact.Digest, limiter *Limiter, run func(read func())) (good bool, err error) {
	f, err := s.openBlob(sha)
	if errors.Is(err, syscall.EIO) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	noReuse(f)
	var sum artifact.Digest
	var chunks []artifact.Digest
	run(func() { sum, chunks, err = hash(ctx, f, limiter) })
	switch {
	case errors.Is(err, syscall.EIO):
		return false, nil // the drive cannot give the bytes: as good as wrong
	case err != nil || sum != sha:
		return false, err
	}
	return true, s.mendChunks(sha, chunks)
}

// hash reads a file to its end.
func hash(ctx context.Context, f io.Reader, limiter *Limiter) (sum artifact.Digest, chunks []artifact.Digest, err error) {
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	h := artifact.NewChunker()
	for {
		if ctx.Err() != nil {
			return sum, nil, context.Cause(ctx)
		}
		n, err := f.Read(piece[:])
		_, _ = h.Write(piece[:n])
		if errors.Is(err, io.EOF) {
			sum, chunks = h.Sum()
			return sum, chunks, nil
		}
		if err != nil {
			return sum, nil, err
		}
		if err := limiter.WaitN(ctx, n); err != nil {
			return sum, nil, err
		}
	}
}

// Verify reads every committed file of an artifact now. A damaged file takes
// the artifact out of Ready at once; Run, or the next Ensure, fetches only
// that file again. A missing file counts as bad.
func (p *Puller) Verify(ctx context.Context, ref artifact.Ref) (VerifyResult, error) {
	m, found := p.store.pinned(ref)
	if !found {
		return VerifyResult{}, fmt.Errorf("verify %s: %w", ref, ErrUnknown)
	}
	end, err := p.store.hold(ctx, m)
	if err != nil {
		return VerifyResult{}, fmt.Errorf("verify %s: %w", ref, err)
	}
	defer end()
	var result VerifyResult
	verdicts := map[artifact.Digest]bool{}
	limiter := NewLimiter(0)
	for _, f := range m.Files {
		good, seen := verdicts[f.SHA256]
		if !seen {
			good, err = p.checkFile(ctx, f.SHA256, limiter, atOnce)
			if err != nil && !errors.Is(err, ErrNotReady) {
				return result, fmt.Errorf("verify %s: file %s: %w", ref, f.Path, classified(err))
			}
			verdicts[f.SHA256] = good
			result.Bytes += units.Bytes(f.Size)
		}
		result.Files++
		if !good {
			result.Bad = append(result.Bad, f.Path)
		}
	}
	return result, nil
}

// Values of ioprio_set(2).
const (
	ioprioWhoProcess = 1 // with id 0: the calling thread
	ioprioIdle       = 3 << 13
)

// idly reads on a thread whose I/O lets everyone else's go first; where the
// kernel refuses, the rate alone keeps the scrub gentle. Only reads belong there:
// a lock held by a thread that waits for everyone makes everyone wait. For the
// same reason the thread keeps its share of the processors: the runtime stops all
// threads now and then, and none runs before the last has stopped.
func idly(read func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread keeps its priority and ends with the goroutine
		_, _, _ = syscall.Syscall(syscall.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioIdle)
		read()
	}()
	<-done
}

// atOnce reads as the caller.
func atOnce(read func()) { read() }

// noReuse asks the kernel not to keep pages for this reader's sake.
func noReuse(f durable.File) {
	file, ok := f.(*durable.OSFile)
	if !ok {
		return
	}
	if conn, err := file.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), 0, 0, unix.FADV_NOREUSE) })
	}
}
