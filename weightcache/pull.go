package weightcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// maxCounters bounds the artifacts whose fetched bytes are remembered; past it
// only those being pulled are.
const maxCounters = 10_000

var (
	// errAbandoned ends a pull whose last caller left.
	errAbandoned = fmt.Errorf("pull was %w by its last caller", ErrGivenUp)
	// errRemoved ends a pull whose artifact is being removed.
	errRemoved = fmt.Errorf("%w: artifact was removed", ErrGivenUp)
)

// pull is the one flight that fetches an artifact. Callers hold it; the last
// to leave ends it, and what has landed stays for the next one.
type pull struct {
	m      *artifact.Manifest
	cancel context.CancelCauseFunc
	done   chan struct{}
	err    error   // set before done closes
	reason string  // of whoever started it
	flight *flight // of runPull; nil while nothing was missing

	// Guarded by Puller.mu:
	refs  int
	kept  bool // Run holds one of refs
	files map[artifact.Digest]*fileFlight
	order []*fileFlight // not done yet, metadata first
	paths map[artifact.Digest]artifact.File
	wants map[artifact.Digest]map[*Reader]bool // readers of a file
}

// fileFlight is the one landing of a file, shared by every pull whose
// artifact has it. Guarded by Puller.mu.
type fileFlight struct {
	sha        artifact.Digest
	refs       int      // pulls that need it
	landing    *landing // nil before it begins, and between two tries
	beginning  bool
	done       bool
	err        error // final
	mismatches int
	cancel     context.CancelCauseFunc
}

// join enters the artifact's pull, starting it where there is none. keep asks
// Run to see it through whether or not the caller stays. reason says why it is
// started.
func (p *Puller) join(m *artifact.Manifest, keep bool, reason string) *pull {
	p.mu.Lock()
	defer p.mu.Unlock()
	pl := p.pulls[m.Digest]
	if pl == nil {
		ctx, cancel := context.WithCancelCause(context.Background())
		pl = &pull{
			m: m, cancel: cancel, done: make(chan struct{}), reason: reason,
			wants: map[artifact.Digest]map[*Reader]bool{}, paths: map[artifact.Digest]artifact.File{},
		}
		for _, f := range m.Files {
			pl.paths[f.SHA256] = f
		}
		p.pulls[m.Digest] = pl
		delete(p.failed, m.Digest)
		p.spawnLocked(func() { p.runPull(ctx, pl) })
	}
	pl.refs++
	if keep && p.running && !pl.kept {
		pl.kept = true
		pl.refs++
	}
	return pl
}

// leave ends one hold of a pull.
func (p *Puller) leave(pl *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pl.refs--
	if pl.refs > 0 {
		return
	}
	if p.pulls[pl.m.Digest] == pl {
		delete(p.pulls, pl.m.Digest)
	}
	pl.cancel(errAbandoned)
}

// stop ends the pull of an artifact, if there is one, for all its callers. While
// readers wait for it the error wraps ErrLeased and nothing is changed.
func (p *Puller) stop(ctx context.Context, digest artifact.Digest) error {
	p.mu.Lock()
	pl := p.pulls[digest]
	if pl != nil {
		readers := 0
		for _, of := range pl.wants {
			readers += len(of)
		}
		if readers > 0 {
			p.mu.Unlock()
			return fmt.Errorf("%w: %d readers wait for bytes of artifact %s", ErrLeased, readers, digest.Short())
		}
		delete(p.pulls, digest)
		pl.cancel(errRemoved)
	}
	p.mu.Unlock()
	if pl == nil {
		return nil
	}
	select {
	case <-pl.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// runPull runs a pull to its end and tells its callers.
func (p *Puller) runPull(ctx context.Context, pl *pull) {
	log := p.log.With(slog.String("artifact", pl.m.Digest.String()), slog.String("ref", pl.m.Ref.String()))
	log.Info("pull begins")
	err := classified(p.pullAll(ctx, pl))
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if pl.flight != nil {
		p.endFlight(pl.flight, err)
	}
	pl.err = err
	p.mu.Lock()
	if p.pulls[pl.m.Digest] == pl {
		delete(p.pulls, pl.m.Digest)
	}
	switch {
	case err == nil:
		log.Info("artifact is ready")
	case errors.Is(err, errAbandoned), errors.Is(err, errRemoved):
		log.Info("pull is given up", slog.Any("cause", err))
	default:
		p.failed[pl.m.Digest] = err
		log.Warn("pull failed", slog.Any("error", err))
	}
	p.wake.fire()
	p.mu.Unlock()
	pl.cancel(nil)
	close(pl.done)
	p.store.notify()
}

// pullAll fetches what is missing, checks the structure and marks the artifact
// ready.
func (p *Puller) pullAll(ctx context.Context, pl *pull) error {
	end, err := p.store.hold(ctx, pl.m)
	if err != nil {
		return err
	}
	defer end()
	src, err := p.sourceOf(pl.m)
	if err != nil {
		return err
	}
	missing, unallocated := p.store.missing(pl.m)
	if len(missing) > 0 {
		room, err := p.store.reserve(ctx, unallocated, pl.m.Ref.String())
		if err != nil {
			return err
		}
		defer room.release()
		f := p.beginFlight(pl, src, missing)
		p.mu.Lock()
		pl.flight = f
		p.mu.Unlock()
		if err := p.attach(ctx, pl, missing); err != nil {
			return err
		}
		err = p.fetchAll(source.WithFlight(ctx, pl.flight.id), pl, src, room)
		p.detach(pl)
		if err != nil {
			return err
		}
	}
	p.setVerifying(pl.m.Digest, true)
	defer p.setVerifying(pl.m.Digest, false)
	if err := p.store.checkStructure(pl.m); err != nil {
		return err
	}
	if err := p.store.refreshViews(pl.m.Digest); err != nil {
		return err
	}
	if err := p.store.markReady(pl.m.Digest); err != nil {
		return err
	}
	p.store.dropSuperseded(pl.m.Ref)
	return nil
}

func (p *Puller) setVerifying(digest artifact.Digest, on bool) {
	p.mu.Lock()
	if on {
		p.verifying[digest] = true
	} else {
		delete(p.verifying, digest)
	}
	p.mu.Unlock()
	p.store.notify()
}

// sourceOf finds the source a manifest came from, or another that its ref is
// allowed to come from.
func (p *Puller) sourceOf(m *artifact.Manifest) (source.Source, error) {
	sources, err := p.allowed(m.Ref)
	if err != nil {
		return nil, err
	}
	for _, src := range sources {
		if src.Name() == m.Source {
			return src, nil
		}
	}
	return sources[0], nil
}

// attach joins the flights of the missing files, metadata first. A flight
// that is just ending is waited for.
func (p *Puller) attach(ctx context.Context, pl *pull, missing []artifact.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	pl.files = make(map[artifact.Digest]*fileFlight, len(missing))
	for _, metadata := range []bool{true, false} {
		for _, f := range missing {
			if (f.Kind == artifact.Metadata) != metadata {
				continue
			}
			for ff := p.files[f.SHA256]; ff != nil && ff.refs == 0; ff = p.files[f.SHA256] {
				wait := p.wake.wait()
				p.mu.Unlock()
				select {
				case <-wait:
				case <-ctx.Done():
				}
				p.mu.Lock()
				if ctx.Err() != nil {
					p.detachLocked(pl)
					return context.Cause(ctx)
				}
			}
			ff := p.files[f.SHA256]
			if ff == nil {
				if p.store.has(f.SHA256) {
					continue
				}
				ff = &fileFlight{sha: f.SHA256}
				p.files[f.SHA256] = ff
			}
			ff.refs++
			pl.files[f.SHA256] = ff
			pl.order = append(pl.order, ff)
		}
	}
	p.wake.fire()
	return nil
}

// detach leaves the file flights; one that no pull needs ends, resumably.
func (p *Puller) detach(pl *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.detachLocked(pl)
}

func (p *Puller) detachLocked(pl *pull) {
	for sha, ff := range pl.files {
		ff.refs--
		if ff.refs > 0 {
			continue
		}
		if ff.landing == nil {
			delete(p.files, sha)
		} else {
			ff.cancel(errAbandoned)
		}
	}
	pl.files, pl.order = nil, nil
	p.wake.fire()
}

// fetchAll runs the streams until every file of the pull is committed.
func (p *Puller) fetchAll(ctx context.Context, pl *pull, src source.Source, room *reservation) error {
	p.mu.Lock()
	counter := p.bytes[pl.m.Digest]
	if counter == nil {
		if len(p.bytes) >= maxCounters {
			maps.DeleteFunc(p.bytes, func(d artifact.Digest, _ *atomic.Int64) bool { return p.pulls[d] == nil })
		}
		counter = new(atomic.Int64)
		p.bytes[pl.m.Digest] = counter
	}
	p.mu.Unlock()
	group, ctx := errgroup.WithContext(ctx)
	st := &streams{p: p, pl: pl, src: src, room: room, counter: counter}
	for range cap(p.tokens) {
		group.Go(func() error { return st.run(ctx) })
	}
	group.Go(func() error { return p.watchMetadata(ctx, pl) })
	if err := group.Wait(); err != nil {
		return err
	}
	if missing, _ := p.store.missing(pl.m); len(missing) > 0 {
		return fmt.Errorf("fetch file %s: %w: it was found damaged during the pull", missing[0].Path, ErrNotReady)
	}
	return nil
}

// watchMetadata waits for the metadata files and refuses an artifact whose
// index names shards that it lacks, before its weights are fetched.
func (p *Puller) watchMetadata(ctx context.Context, pl *pull) error {
	for {
		p.mu.Lock()
		wait := p.wake.wait()
		p.mu.Unlock()
		if p.store.hasKind(pl.m, artifact.Metadata) {
			p.store.notify()
			return p.store.checkIndexes(pl.m)
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// streams is what the streams of one pull share.
type streams struct {
	p       *Puller
	pl      *pull
	src     source.Source
	room    *reservation
	counter *atomic.Int64
}

// job is a segment to fetch; without a landing the file must begin first.
type job struct {
	ff      *fileFlight
	landing *landing
	segment int
	permit  *permit
}

// run fetches segments until none is left.
func (st *streams) run(ctx context.Context) error {
	for {
		j, err := st.next(ctx)
		if err != nil || j == nil {
			return err
		}
		err = st.do(ctx, j)
		j.permit.give()
		st.p.mu.Lock()
		st.p.wake.fire()
		st.p.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// next waits for a permit and a segment; nil means that every file is committed.
// The permit is held exactly when a job is given.
func (st *streams) next(ctx context.Context) (*job, error) {
	p := st.p
	for {
		held := &permit{p: p}
		if err := held.take(ctx); err != nil {
			return nil, err
		}
		pause := p.throttles.left(st.src.Name())
		p.mu.Lock()
		j, finished, err := st.pl.pickLocked(pause > 0)
		wait := p.wake.wait()
		p.mu.Unlock()
		if j != nil {
			j.permit = held
			return j, nil
		}
		held.give()
		if err != nil || finished {
			return nil, err
		}
		var over <-chan time.Time
		if pause > 0 {
			over = time.After(pause) // at most maxRetryAfter
		}
		select {
		case <-wait:
		case <-over:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// pickLocked chooses the next segment: of a file of which a reader has nothing
// yet, then of one that a reader waits for, then metadata, then the file with
// the fewest streams, begun before not begun. Spreading streams over files keeps each file's bytes in order, which
// lets them be hashed as they pass. While the pull's source asks for a pause
// nothing is chosen: another pull may bring the file from elsewhere.
func (pl *pull) pickLocked(paused bool) (j *job, finished bool, err error) {
	for len(pl.order) > 0 && pl.order[0].done {
		pl.order = pl.order[1:]
	}
	type rank struct{ thirsty, wanted, metadata, begun, active int }
	var best *fileFlight
	var bestRank rank
	better := func(a, b rank) bool {
		switch {
		case a.thirsty != b.thirsty:
			return a.thirsty > b.thirsty
		case a.wanted != b.wanted:
			return a.wanted > b.wanted
		case a.metadata != b.metadata:
			return a.metadata > b.metadata
		case a.active != b.active:
			return a.active < b.active
		}
		return a.begun > b.begun
	}
	finished = true
	for _, ff := range pl.order {
		if ff.err != nil {
			return nil, false, fmt.Errorf("fetch file %s: %w", pl.paths[ff.sha].Path, ff.err)
		}
		if ff.done {
			continue
		}
		finished = false
		if ff.beginning {
			continue
		}
		r := rank{}
		if len(pl.wants[ff.sha]) > 0 {
			r.wanted = 1
		}
		if pl.thirstyLocked(ff) {
			r.thirsty = 1
		}
		if pl.paths[ff.sha].Kind == artifact.Metadata {
			r.metadata = 1
		}
		if ff.landing != nil {
			active, free := ff.landing.load()
			if !free {
				continue
			}
			r.active, r.begun = active, 1
		}
		if best == nil || better(r, bestRank) {
			best, bestRank = ff, r
		}
		if len(pl.wants) == 0 && r.begun == 0 {
			break // later files are no better than one not begun
		}
	}
	if best == nil || paused {
		return nil, finished, nil
	}
	j = &job{ff: best, landing: best.landing}
	if j.landing == nil {
		best.beginning = true
		return j, false, nil
	}
	segment, _, ok := j.landing.claim(pl.offsetsLocked(best.sha))
	if !ok {
		return nil, false, nil
	}
	j.segment = segment
	return j, false, nil
}

// do begins a file where that is due and fetches one segment.
func (st *streams) do(ctx context.Context, j *job) error {
	f := st.pl.paths[j.ff.sha]
	if j.landing == nil {
		l, err := st.begin(ctx, j.ff, f)
		if err != nil {
			return fmt.Errorf("fetch file %s: %w", f.Path, err)
		}
		segment, _, ok := l.claim(st.p.offsets(st.pl, j.ff.sha))
		if !ok {
			return nil
		}
		j.landing, j.segment = l, segment
	}
	err := st.fetch(ctx, j, f)
	if err == nil && j.landing.at(j.segment) == j.landing.length(j.segment) {
		if err = j.landing.seal(j.segment); err != nil {
			err = fmt.Errorf("fetch file %s: %w", f.Path, err)
		}
	}
	j.landing.giveBack(j.segment)
	if err != nil && j.landing.failure() != nil && ctx.Err() == nil {
		return nil // the file's flight decides what becomes of it
	}
	return err
}

// begin opens the landing of a file and starts its hasher.
func (st *streams) begin(ctx context.Context, ff *fileFlight, f artifact.File) (*landing, error) {
	p := st.p
	l, err := p.store.land(ctx, f, p.segmentFor(f.Size), st.room)
	p.mu.Lock()
	defer p.mu.Unlock()
	ff.beginning = false
	p.wake.fire()
	if err != nil {
		return nil, err
	}
	ff.landing = l
	runCtx, cancel := context.WithCancelCause(context.Background())
	ff.cancel = cancel
	p.spawnLocked(func() {
		defer cancel(nil)
		p.runFile(runCtx, ff, l)
	})
	return l, nil
}

// runFile hashes and commits one file and settles its flight.
func (p *Puller) runFile(ctx context.Context, ff *fileFlight, l *landing) {
	err := l.run(ctx)
	if err != nil {
		cancelled := ctx.Err() != nil && l.failure() == nil
		l.idle()
		l.end()
		err = l.settle(err)
		if cancelled {
			err = context.Cause(ctx)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ff.landing = nil
	switch {
	case err == nil:
		ff.done = true
	case errors.Is(err, ErrMismatch):
		p.stats.mismatches.Add(1)
		p.log.Warn("file does not have its digest", slog.String("file", ff.sha.String()), slog.Any("error", err))
		ff.mismatches++
		if ff.mismatches > 1 {
			ff.err = err
		}
	case !errors.Is(err, errAbandoned):
		ff.err = err
	}
	if ff.refs == 0 {
		delete(p.files, ff.sha)
	}
	p.wake.fire()
}

// landingOf gives the landing of a file of a pull, nil where there is none now.
func (p *Puller) landingOf(pl *pull, sha artifact.Digest) *landing {
	if pl == nil {
		return nil
	}
	_, l := p.waitLanding(pl, sha)
	return l
}

// waitLanding also gives the channel that fires when that may have changed.
func (p *Puller) waitLanding(pl *pull, sha artifact.Digest) (<-chan struct{}, *landing) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait := p.wake.wait()
	if ff := pl.files[sha]; ff != nil {
		return wait, ff.landing
	}
	return wait, nil
}
