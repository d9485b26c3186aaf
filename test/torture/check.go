package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Bounds of what a check allows.
const (
	// maxOpenFiles is the most descriptors of an agent at rest.
	maxOpenFiles = 100
	// startLimit bounds a start.
	startLimit = 2 * time.Minute
	// stuckLimit is how long nothing may come from an origin that behaves while
	// a pull waits. How fast it comes is the machine's matter.
	stuckLimit = 3 * time.Minute
	restLimit  = 2 * time.Minute
	// perFile is what a file may occupy on the drive besides its bytes.
	perFile = 8 << 10
)

// readTree compares every file of a view that is there now. Files may come and
// go; bytes may not be wrong.
func (t *torture) readTree(dir string, hubView bool, c *commit) error {
	for _, path := range c.paths() {
		at := filepath.Join(dir, path)
		if hubView {
			at = filepath.Join(dir, "models--"+strings.ReplaceAll(c.repo, "/", "--"), "snapshots", c.id, path)
		}
		if err := t.readFile(at, c.files[path]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("view of commit %s: %w", c.id, err)
		}
	}
	return nil
}

// readFile compares one file with what was published.
func (t *torture) readFile(at string, b *blob) error {
	f, err := os.Open(at)
	if err != nil {
		return fmt.Errorf("read view: %w", err)
	}
	defer func() { _ = f.Close() }()
	n, wrong, err := b.differs(f, 0)
	t.viewed(n)
	if err != nil {
		return fmt.Errorf("read %s: %w", at, err)
	}
	if wrong >= 0 || n != b.size {
		return fmt.Errorf("read %s: %d bytes of %d, the first wrong one at %d", at, n, b.size, wrong)
	}
	return nil
}

// afterStart checks an agent that just answered for the first time: what was
// acknowledged is there without a byte from the origin, and nothing is left
// over.
func (t *torture) afterStart(ctx context.Context) error {
	listed, err := t.agent.Client.Models(ctx)
	if err != nil {
		return fmt.Errorf("list after start: %w", err)
	}
	byRef, err := t.model.judge(listed)
	if err != nil {
		return fmt.Errorf("after start: %w", err)
	}
	if fetched := t.origin.Bytes() - t.bytesAtDeath; fetched != 0 {
		return fmt.Errorf("after start: %d bytes came from the origin and nobody asked for any", fetched)
	}
	for name, l := range byRef {
		if l.State != string(weightcache.Ready) {
			continue
		}
		c := t.origin.commit(l.Commit)
		for _, dir := range l.Views {
			if err := t.readTree(dir, strings.Contains(dir, "/hub/"), c); err != nil {
				return fmt.Errorf("after start: %s: %w", name, err)
			}
		}
	}
	// Its own temporary names are of views that it just publishes.
	return t.noLeftovers(fmt.Sprintf("-%d-", t.agent.PID()))
}

// noLeftovers finds temporary names, which an open clears and a quiet store
// does not have. Names that contain but are in use.
func (t *torture) noLeftovers(but string) error {
	for _, root := range []string{t.weights, t.views} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && durable.IsTemp(d.Name()) && (but == "" || !strings.Contains(d.Name(), but)) {
				return fmt.Errorf("%s is left over", path)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("look for temporary files: %w", err)
		}
	}
	return nil
}

// resume pulls what a kill interrupted and holds the bytes that come against
// those that were there. The origin is clear and nobody else pulls.
func (t *torture) resume(ctx context.Context) error {
	for _, r := range t.model.all() {
		r.mu.Lock()
		seen, present, standing := r.seen, r.present, r.standing
		r.mu.Unlock()
		if standing != open || seen == "" {
			continue
		}
		m, err := t.agent.Client.Model(ctx, r.full())
		if err != nil || m.Commit != seen {
			continue // it never came so far, or moved on
		}
		before := t.origin.Bytes()
		end := r.pin()
		m, err = t.agent.Client.Pull(ctx, admin.PullRequest{Ref: r.full()}, nil)
		end(err == nil)
		if err != nil {
			continue // its commit may be gone from the origin; settling decides
		}
		r.know(m.Commit, false)
		lost := t.origin.Bytes() - before - (m.Size - present)
		t.lost(lost)
		if limit := int64(victim.Streams) * int64(victim.SegmentSize); lost > limit {
			return fmt.Errorf("resume %s: of %d bytes %d were there before the kill, %d came again, at most %d may", r.name, m.Size, present, lost, limit)
		}
	}
	return nil
}

// settle gives every ref that is not removed a Ready artifact, then checks the
// whole store against what is listed.
func (t *torture) settle(ctx context.Context) error {
	ctx, end := t.unlessStuck(ctx)
	defer end()
	for _, r := range t.model.all() {
		standing, commit, _ := r.now()
		if standing == removed {
			continue
		}
		if r.fixed() != "" && standing == open {
			// Its commit may be gone from the origin.
			_, _, pins := r.change()
			if err := t.agent.Client.Remove(ctx, r.full()); err != nil {
				if said, ok := errors.AsType[*admin.Error](err); !ok || said.Code != admin.CodeUnknownRef {
					return fmt.Errorf("settle: remove %s: %w", r.name, err)
				}
			}
			r.gone(pins)
			continue
		}
		before := t.origin.Bytes()
		refresh := standing == open
		end := r.pin()
		m, err := t.agent.Client.Pull(ctx, admin.PullRequest{Ref: r.full(), Refresh: refresh}, nil)
		end(err == nil)
		if err != nil {
			return fmt.Errorf("settle: pull %s: %w", r.name, errors.Join(err, context.Cause(ctx)))
		}
		if fetched := t.origin.Bytes() - before; standing == ready && (fetched != 0 || m.Commit != commit) {
			return fmt.Errorf("settle: %s was Ready at %s; a pull fetched %d bytes and gave %s", r.name, commit, fetched, m.Commit)
		}
		r.know(m.Commit, refresh)
	}
	return t.checkStore(ctx)
}

// errStuck ends what waits for an agent that asks its origin for nothing.
var errStuck = fmt.Errorf("nothing came from the origin for %v", stuckLimit)

// unlessStuck is ctx until the origin was asked for nothing and sent nothing
// for stuckLimit.
func (t *torture) unlessStuck(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		moved, last := time.Now(), int64(-1)
		for {
			if now := t.origin.Bytes() + t.origin.Requests(); now != last {
				moved, last = time.Now(), now
			} else if time.Since(moved) > stuckLimit {
				cancel(errStuck)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// checkStore holds the drive against what is listed. It waits until views and
// sums have followed.
func (t *torture) checkStore(ctx context.Context) error {
	var last error
	resting, cancel := context.WithTimeout(ctx, restLimit)
	defer cancel()
	err := rig.Until(resting, "the store to come to rest", func(ctx context.Context) (bool, error) {
		listed, err := t.agent.Client.Models(ctx)
		if err != nil {
			return false, err
		}
		byRef, err := t.model.judge(listed)
		if err != nil {
			return false, err
		}
		if err := t.compareStore(ctx, byRef); err == nil || ctx.Err() == nil {
			last = err // else it may only say that the time is over
		}
		return last == nil, last
	}, t.agent.Process)
	if last != nil {
		return fmt.Errorf("the store does not come to rest within %v: %w", restLimit, last)
	}
	if err != nil {
		return err
	}
	n, err := t.agent.OpenFiles()
	if err == nil && n > maxOpenFiles {
		err = fmt.Errorf("at rest: %d open files, at most %d are right", n, maxOpenFiles)
	}
	return err
}

// compareStore is checkStore at one moment.
func (t *torture) compareStore(ctx context.Context, byRef map[string]admin.Model) error {
	blobs := map[artifact.Digest]*blob{}
	artifacts := map[string]*commit{}
	for name, l := range byRef {
		if l.Digest == "" {
			continue
		}
		if l.State != string(weightcache.Ready) || l.Present != l.Size {
			return fmt.Errorf("%s is %s with %d of %d bytes: %s", name, l.State, l.Present, l.Size, l.Detail)
		}
		if len(l.Views) != 2 {
			return fmt.Errorf("%s has the views %q", name, l.Views)
		}
		c := t.origin.commit(l.Commit)
		artifacts[l.Digest] = c
		for _, b := range c.files {
			blobs[b.sha] = b
		}
		for _, dir := range l.Views {
			if err := t.wholeView(dir, name, c); err != nil {
				return err
			}
		}
	}
	var want int64
	for sha, b := range blobs {
		want += b.size
		hex := sha.String()
		if err := t.readFile(filepath.Join(t.weights, "blobs/sha256", hex[:2], hex), b); err != nil {
			return err
		}
	}
	if err := t.noLeftovers(""); err != nil {
		return err
	}
	for dir, most := range map[string]int{
		"blobs/sha256": len(blobs), "chunks/sha256": len(blobs), "landing": 0, "ready": len(artifacts), "refs": len(byRef), "quarantine": 0,
	} {
		n, err := files(filepath.Join(t.weights, dir))
		if err != nil {
			return err
		}
		if n > most {
			return fmt.Errorf("%s holds %d files, listed are %d", dir, n, most)
		}
	}
	node, err := t.agent.Client.Node(ctx)
	if err != nil {
		return err
	}
	if node.Space.Used != want || len(node.Problems) > 0 {
		return fmt.Errorf("the agent says %d bytes are used and problems %q, listed are %d bytes", node.Space.Used, node.Problems, want)
	}
	occupied, count, err := t.occupied()
	if err != nil {
		return err
	}
	if most := want + int64(count)*perFile; occupied > most || occupied < want {
		return fmt.Errorf("the drive holds %d bytes in %d files, listed are %d", occupied, count, want)
	}
	return nil
}

// wholeView finds every file of a commit in a view, right.
func (t *torture) wholeView(dir, name string, c *commit) error {
	hubView := strings.Contains(dir, "/hub/")
	for path, b := range c.files {
		at := filepath.Join(dir, path)
		if hubView {
			at = filepath.Join(dir, "models--"+strings.ReplaceAll(c.repo, "/", "--"), "snapshots", c.id, path)
		}
		if err := t.readFile(at, b); err != nil {
			return err
		}
	}
	if _, revision, fixed := strings.Cut(name, "@"); hubView && !fixed {
		text, err := os.ReadFile(filepath.Join(dir, "models--"+strings.ReplaceAll(c.repo, "/", "--"), "refs", "main"))
		if err != nil {
			return fmt.Errorf("read hub view: %w", err)
		}
		if string(text) != c.id {
			return fmt.Errorf("hub view of %s%s says main is %q, want %s", name, revision, text, c.id)
		}
	}
	return nil
}

// files counts the files below a folder.
func files(dir string) (n int, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return err
	})
	return n, err
}

// occupied sums what store and views take on the drive, each file once however
// many names it has.
func (t *torture) occupied() (bytes int64, count int, err error) {
	seen := map[uint64]bool{}
	for _, root := range []string{t.weights, t.views} {
		err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			st, ok := info.Sys().(*syscall.Stat_t)
			if !ok {
				return errors.New("no inode is told")
			}
			if !seen[st.Ino] {
				seen[st.Ino] = true
				count++
				bytes += st.Blocks * 512
			}
			return nil
		})
		if err != nil {
			return 0, 0, fmt.Errorf("sum up the store: %w", err)
		}
	}
	return bytes, count, nil
}
