package weightcache

import (
	"context"
	"crypto/sha1" //nolint:gosec // git names its blobs so
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

const (
	// maxUndigested is the longest file, in bytes, that is fetched during
	// resolve because its source gives no SHA-256: 64 MiB.
	maxUndigested = 64 << 20
	// maxUndigestedTotal bounds all such files of one artifact: 1 GiB.
	maxUndigestedTotal = 1 << 30
	// resolveTries is how often a source is asked before the caller is told.
	resolveTries = 3
	// resolveLinger is how long a question to a source outlives the last reader
	// who waited for its answer. Hub clients leave after 10 s and ask again: each
	// of their tries would begin it anew.
	resolveLinger = 2 * time.Minute
	// maxLingering bounds such questions; past it one ends with its last reader.
	maxLingering = 64
)

// resolveKey: a refresh never shares an answer that may have come from before it.
type resolveKey struct {
	ref     artifact.Ref
	refresh bool
}

// resolve is the one flight that asks what a ref means.
type resolve struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
	m      *artifact.Manifest
	err    error

	// Guarded by Puller.mu:
	refs   int
	linger *time.Timer // set while it goes on for nobody
}

// resolve gives the pinned manifest, or asks the sources and pins the answer.
// With linger the question goes on for a while without its callers.
func (p *Puller) resolve(ctx context.Context, ref artifact.Ref, refresh, linger bool) (*artifact.Manifest, error) {
	sources, err := p.allowed(ref)
	if err != nil {
		return nil, err
	}
	if m, found := p.store.pinned(ref); found && !refresh {
		return m, nil
	}
	key := resolveKey{ref, refresh}
	p.mu.Lock()
	r := p.resolves[key]
	if r == nil {
		flight, cancel := context.WithCancelCause(context.Background())
		r = &resolve{cancel: cancel, done: make(chan struct{})}
		p.resolves[key] = r
		p.resolving[ref]++
		p.spawnLocked(func() { p.runResolve(flight, key, r, sources) })
	}
	r.refs++
	p.unlingerLocked(r)
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.refs--
		switch {
		case r.refs > 0:
		case linger && p.resolves[key] == r && p.lingering < maxLingering:
			p.lingering++
			r.linger = time.AfterFunc(resolveLinger, func() { p.abandon(key, r) })
		default:
			p.abandonLocked(key, r)
		}
	}()
	select {
	case <-r.done:
		return r.m, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("resolve %s: %w", ref, context.Cause(ctx))
	}
}

// unlingerLocked stops the clock of a question that somebody waits for again, or
// that has ended.
func (p *Puller) unlingerLocked(r *resolve) {
	if r.linger != nil {
		r.linger.Stop()
		r.linger = nil
		p.lingering--
	}
}

// abandon ends a question whose answer nobody came for.
func (p *Puller) abandon(key resolveKey, r *resolve) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.linger != nil { // else somebody came just now
		p.abandonLocked(key, r)
	}
}

func (p *Puller) abandonLocked(key resolveKey, r *resolve) {
	p.unlingerLocked(r)
	if p.resolves[key] == r {
		delete(p.resolves, key)
	}
	r.cancel(errAbandoned)
}

// abandonAll ends every question that goes on for nobody.
func (p *Puller) abandonAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, r := range p.resolves {
		if r.linger != nil {
			p.abandonLocked(key, r)
		}
	}
}

func (p *Puller) runResolve(ctx context.Context, key resolveKey, r *resolve, sources []source.Source) {
	p.store.notify()
	var m *artifact.Manifest
	var err error
	for _, src := range sources {
		var tryErr error
		if m, tryErr = p.resolveFrom(ctx, src, key.ref, key.refresh); tryErr == nil {
			err = nil
			break
		}
		err = errors.Join(err, tryErr)
		if ctx.Err() != nil {
			break
		}
	}
	if said, ok := errors.AsType[*source.Error](err); ok && said.Op == "resolve" {
		err = classified(err) // it names the ref
	} else if err != nil {
		err = fmt.Errorf("resolve %s: %w", key.ref, classified(err))
	}
	r.m, r.err = m, err
	p.mu.Lock()
	p.unlingerLocked(r)
	if p.resolves[key] == r {
		delete(p.resolves, key)
	}
	p.resolving[key.ref]--
	if p.resolving[key.ref] <= 0 {
		delete(p.resolving, key.ref)
	}
	switch {
	case err == nil:
		delete(p.refFailed, key.ref)
	case ctx.Err() == nil:
		// The bound keeps a client that asks for nonsense from filling memory.
		if len(p.refFailed) >= maxRefFailed {
			clear(p.refFailed)
		}
		p.refFailed[key.ref] = err
	}
	p.mu.Unlock()
	r.cancel(nil)
	close(r.done)
	p.store.notify()
}

// maxRefFailed bounds the refs that are remembered only for their failure.
const maxRefFailed = 1000

// resolveFrom asks one source, completes the listing and pins it; only a
// refresh moves a ref that was pinned meanwhile.
func (p *Puller) resolveFrom(ctx context.Context, src source.Source, ref artifact.Ref, refresh bool) (*artifact.Manifest, error) {
	var listing *artifact.Listing
	for try := 1; ; try++ {
		var err error
		if listing, err = p.ask(ctx, src, ref); err == nil {
			break
		}
		if final(err) || try >= resolveTries || ctx.Err() != nil {
			return nil, err
		}
		p.stats.retries.Add(1)
		if err := sleep(ctx, p.pause(try, err)); err != nil {
			return nil, err
		}
	}
	l := *listing
	l.Ref, l.Source = ref, src.Name()
	l.Files = slices.Clone(l.Files)
	slices.SortFunc(l.Files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
	if err := artifact.ValidCommit(l.Commit); err != nil {
		return nil, &source.Error{Source: src.Name(), Op: "resolve", What: ref.String(), Err: fmt.Errorf("%w: %w", source.ErrProtocol, err)}
	}
	if err := artifact.CheckFiles(l.Files, false); err != nil {
		return nil, &source.Error{Source: src.Name(), Op: "resolve", What: ref.String(), Err: fmt.Errorf("%w: %w", source.ErrProtocol, err)}
	}
	fetched, err := p.digestAll(ctx, src, &l)
	if err == nil {
		var m *artifact.Manifest
		if m, err = artifact.NewManifest(&l); err == nil {
			if m, err = p.store.pin(ctx, m, refresh); err == nil {
				p.log.Info("ref is resolved", slog.String("ref", ref.String()), slog.String("artifact", m.Digest.String()),
					slog.String("commit", m.Commit), slog.String("source", m.Source), slog.Int("files", len(m.Files)), slog.Int64("bytes", m.Size()))
				return m, nil
			}
		}
	}
	return nil, errors.Join(err, p.store.dropOrphans(fetched))
}

// ask makes one Resolve. The source bounds the time of its answers: only it
// knows whether it waits for an origin or reads a folder of terabytes.
func (p *Puller) ask(ctx context.Context, src source.Source, ref artifact.Ref) (*artifact.Listing, error) {
	if err := p.throttles.wait(ctx, src.Name()); err != nil {
		return nil, err
	}
	listing, err := src.Resolve(ctx, ref)
	p.throttles.note(err)
	if err == nil && listing == nil {
		err = &source.Error{Source: src.Name(), Op: "resolve", What: ref.String(), Err: source.ErrProtocol}
	}
	return listing, err
}

// digestAll fetches the files whose SHA-256 the source does not give, so that
// the manifest can name it. A file that an earlier manifest has under the same
// git id is not fetched again.
func (p *Puller) digestAll(ctx context.Context, src source.Source, l *artifact.Listing) (fetched []artifact.Digest, err error) {
	var total int64
	var todo []int
	var known map[gitID]artifact.Digest
	for i, f := range l.Files {
		if !f.SHA256.IsZero() {
			continue
		}
		if known == nil {
			known = p.store.gitIDs()
		}
		if sha, found := known[gitID{f.GitSHA1, f.Size}]; found {
			l.Files[i].SHA256 = sha
			continue
		}
		total += f.Size
		if f.Size > maxUndigested || total > maxUndigestedTotal {
			return nil, &source.Error{Source: src.Name(), Op: "resolve", What: l.Ref.String() + " file " + f.Path, Err: fmt.Errorf(
				"%w: %d bytes without a SHA-256, at most %d a file and %d in all are fetched to find it", source.ErrProtocol, f.Size, maxUndigested, maxUndigestedTotal)}
		}
		todo = append(todo, i)
	}
	if len(todo) == 0 {
		return nil, nil
	}
	room, err := p.store.reserve(ctx, total, l.Ref.String())
	if err != nil {
		return nil, err
	}
	defer room.release()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(cap(p.tokens))
	for _, i := range todo {
		group.Go(func() error {
			held := &permit{p: p}
			if err := held.take(ctx); err != nil {
				return err
			}
			defer held.give()
			sha, err := p.digestFile(ctx, held, src, l, l.Files[i])
			if err != nil {
				return fmt.Errorf("fetch file %s: %w", l.Files[i].Path, err)
			}
			l.Files[i].SHA256 = sha
			return nil
		})
	}
	err = group.Wait()
	for _, i := range todo {
		if sha := l.Files[i].SHA256; !sha.IsZero() {
			fetched = append(fetched, sha)
		}
	}
	return fetched, err
}

// digestFile lands one file under the digest it turns out to have, after its
// git id was found right.
func (p *Puller) digestFile(ctx context.Context, held *permit, src source.Source, l *artifact.Listing, f artifact.File) (artifact.Digest, error) {
	mismatches := 0
	for try := 1; ; try++ {
		sha, err := p.digestOnce(ctx, held, src, l, f)
		if err == nil {
			return sha, nil
		}
		if errors.Is(err, ErrMismatch) && mismatches == 0 {
			p.stats.mismatches.Add(1)
			mismatches++
			continue
		}
		if final(err) || try >= p.attempts || ctx.Err() != nil {
			return artifact.Digest{}, err
		}
		p.stats.retries.Add(1)
		if err := held.sleep(ctx, p.pause(try, err)); err != nil {
			return artifact.Digest{}, err
		}
	}
}

func (p *Puller) digestOnce(ctx context.Context, held *permit, src source.Source, l *artifact.Listing, f artifact.File) (sha artifact.Digest, err error) {
	s := p.store
	temp := durable.TempName(s.path(landingDir, "undigested"))
	file, err := s.fs.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return sha, fmt.Errorf("%w: %w", errWrite, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.removeIfThere(temp))
		}
	}()
	git := sha1.New() //nolint:gosec // git names its blobs so
	_, _ = fmt.Fprintf(git, "blob %d\x00", f.Size)
	content := artifact.NewChunker()
	if f.Size > 0 {
		err = p.receive(ctx, src, l, f, 0, f.Size, intake{permit: held, pay: p.limiter.WaitN, take: func(piece []byte) error {
			_, _ = git.Write(piece)
			_, _ = content.Write(piece)
			if _, err := file.Write(piece); err != nil {
				return fmt.Errorf("%w: %w", errWrite, err)
			}
			return nil
		}})
	}
	if got := hex.EncodeToString(git.Sum(nil)); err == nil && got != f.GitSHA1 {
		err = fmt.Errorf("%w: the bytes have git id %s, the source lists %s", ErrMismatch, got, f.GitSHA1)
	}
	if err == nil {
		err = file.Chmod(0o444)
	}
	if err == nil {
		if err = file.Sync(); err != nil {
			err = fmt.Errorf("%w: %w: %w", errWrite, errSync, err)
		}
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return sha, err
	}
	sha, chunks := content.Sum()
	return sha, s.adopt(ctx, temp, sha, f.Size, chunks)
}

// adopt publishes a file whose digest was just computed from its bytes. It
// waits for a removal of the same file, which would take the new one too.
func (s *Store) adopt(ctx context.Context, temp string, sha artifact.Digest, size int64, chunks []artifact.Digest) error {
	if err := s.waitRemoved(ctx, sha, true); err != nil {
		return err
	}
	defer func() {
		s.mu.Lock()
		delete(s.removing, sha)
		s.freed.fire()
		s.mu.Unlock()
	}()
	if s.has(sha) {
		// Another path brought the same bytes; views have links to that file.
		return s.fs.Remove(temp)
	}
	blob := s.blobPath(sha)
	if err := s.writeChunks(sha, chunks); err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	if err := durable.MkdirAllSynced(s.fs, filepath.Dir(blob), 0o700); err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	if err := s.fs.Rename(temp, blob); err != nil {
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	s.syncNames(filepath.Dir(blob))
	s.mu.Lock()
	s.blobs[sha] = size
	delete(s.bad, sha)
	_, paused := s.partial[sha]
	paused = paused && !s.landing[sha]
	s.mu.Unlock()
	if paused {
		// Nobody resumes what is here by another way.
		l := &landing{s: s, sha: sha, resumed: true}
		if err := l.discard(); err != nil {
			s.log.Warn("cannot remove unfinished file", slog.String("file", sha.String()), slog.Any("error", err))
		}
	}
	return nil
}

// dropOrphans removes files that a failed resolve fetched and no artifact has.
func (s *Store) dropOrphans(files []artifact.Digest) error {
	s.mu.Lock()
	used := map[artifact.Digest]bool{}
	for _, r := range s.artifacts {
		for _, f := range r.m.Files {
			used[f.SHA256] = true
		}
	}
	var drop []artifact.Digest
	for _, sha := range files {
		if !used[sha] && !s.removing[sha] {
			delete(s.blobs, sha)
			s.removing[sha] = true
			drop = append(drop, sha)
		}
	}
	s.mu.Unlock()
	var err error
	for _, sha := range drop {
		err = errors.Join(err, s.removeIfThere(s.blobPath(sha)))
	}
	s.mu.Lock()
	for _, sha := range drop {
		delete(s.removing, sha)
	}
	s.freed.fire()
	s.mu.Unlock()
	return err
}

// gitID is how git knows a file's bytes.
type gitID struct {
	sha1 string
	size int64
}

// gitIDs maps what known manifests say about git ids.
func (s *Store) gitIDs() map[gitID]artifact.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := map[gitID]artifact.Digest{}
	for _, r := range s.artifacts {
		for _, f := range r.m.Files {
			if f.GitSHA1 != "" && !f.LFS {
				ids[gitID{f.GitSHA1, f.Size}] = f.SHA256
			}
		}
	}
	return ids
}
