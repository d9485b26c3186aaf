// Package stock is a node's stock for tests and benches: a stock.Cache and a
// stock.KV on a directory, small and real. What they hold is in files, so that
// another process, or the same after a kill, opens what the last one left; they
// sync nothing. Artifacts are given, not downloaded: a ref that can be pulled
// becomes Ready when its Origin says so. They pass the conformance suites of
// stocktest.
package stock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Origin is what a ref that is not on the node leads to.
type Origin struct {
	// Artifact becomes Ready; its Ref is the one that is pulled.
	Artifact stock.Artifact
	// Manual leaves the pull where Advance puts it; else it ends at once.
	Manual bool
	// Failed, Reason and Final are the end of a pull that fails.
	Failed, Reason string
	Final          bool
}

// Cache is a stock.Cache whose node is a directory.
type Cache struct {
	dir string

	mu         sync.Mutex
	drive      stock.Drive
	artifacts  map[artifact.Digest]stock.Artifact
	restricted map[artifact.Digest]bool
	origins    map[artifact.Ref]Origin
	pulls      map[artifact.Ref]stock.Progress
	holds      map[string][]artifact.Digest
	pulling    map[string][]artifact.Ref
	down       bool
	changed    []chan struct{}
}

// OpenCache opens the node that a directory is; a new directory is an empty
// node with the drive given.
func OpenCache(dir string, drive stock.Drive) (*Cache, error) {
	c := &Cache{
		dir: dir, drive: drive,
		artifacts: map[artifact.Digest]stock.Artifact{}, restricted: map[artifact.Digest]bool{},
		origins: map[artifact.Ref]Origin{}, pulls: map[artifact.Ref]stock.Progress{},
		holds: map[string][]artifact.Digest{}, pulling: map[string][]artifact.Ref{},
	}
	for _, sub := range []string{"artifacts", "holds"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("open stock: %w", err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "artifacts/*.json"))
	if err != nil {
		return nil, fmt.Errorf("open stock: %w", err)
	}
	for _, file := range files {
		var a stock.Artifact
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &a)
		}
		if err != nil {
			return nil, fmt.Errorf("open stock: %w", err)
		}
		c.artifacts[a.Digest] = a
	}
	claims, err := os.ReadDir(filepath.Join(dir, "holds"))
	if err != nil {
		return nil, fmt.Errorf("open stock: %w", err)
	}
	for _, claim := range claims {
		digests, err := os.ReadDir(filepath.Join(dir, "holds", claim.Name()))
		if err != nil {
			return nil, fmt.Errorf("open stock: %w", err)
		}
		for _, entry := range digests {
			digest, err := artifact.ParseDigest(entry.Name())
			if err != nil {
				return nil, fmt.Errorf("open stock: %w", err)
			}
			c.holds[claim.Name()] = append(c.holds[claim.Name()], digest)
		}
	}
	return c, nil
}

// Add makes an artifact Ready.
func (c *Cache) Add(a stock.Artifact) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addLocked(a)
}

func (c *Cache) addLocked(a stock.Artifact) error {
	views := c.views(a)
	for _, dir := range []string{views.Flat, views.Hub} {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("add artifact: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o644); err != nil {
			return fmt.Errorf("add artifact: %w", err)
		}
	}
	data, err := json.Marshal(a)
	if err == nil {
		err = os.WriteFile(c.file(a.Digest), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("add artifact: %w", err)
	}
	c.artifacts[a.Digest] = a
	c.signalLocked()
	return nil
}

// Restrict takes an artifact's views away, as a source that restricts it does.
func (c *Cache) Restrict(digest artifact.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restricted[digest] = true
	c.signalLocked()
}

// Remove takes an artifact off the node; it fails while a claim holds it.
func (c *Cache) Remove(digest artifact.Digest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for claim, held := range c.holds {
		if slices.Contains(held, digest) {
			return fmt.Errorf("remove artifact %s: claim %s holds it", digest.Short(), claim)
		}
	}
	return c.loseLocked(digest)
}

// Lose takes an artifact off the node whoever holds it, as damage does.
func (c *Cache) Lose(digest artifact.Digest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.loseLocked(digest)
}

func (c *Cache) loseLocked(digest artifact.Digest) error {
	delete(c.artifacts, digest)
	err := errors.Join(os.Remove(c.file(digest)), os.RemoveAll(filepath.Join(c.dir, "views", digest.String())))
	c.signalLocked()
	return err
}

// Offer says what the pull of a ref leads to.
func (c *Cache) Offer(ref artifact.Ref, o Origin) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o.Artifact.Ref = ref
	c.origins[ref] = o
	delete(c.pulls, ref)
}

// Advance puts a manual pull where it says; with present at the artifact's size
// it ends.
func (c *Cache) Advance(ref artifact.Ref, p stock.Progress) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pulls[ref] = p
	if origin := c.origins[ref]; p.Failed == "" && p.Present == origin.Artifact.Size {
		return c.addLocked(origin.Artifact)
	}
	c.signalLocked()
	return nil
}

// SetDown makes every call fail as it does while the data role is away.
func (c *Cache) SetDown(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = down
	c.signalLocked()
}

// Weights implements stock.Cache.
func (c *Cache) Weights() (stock.Weights, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := stock.Weights{Drive: c.drive}
	for digest, a := range c.artifacts {
		if !c.restricted[digest] {
			state.Artifacts = append(state.Artifacts, a)
		}
	}
	slices.SortFunc(state.Artifacts, func(a, b stock.Artifact) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	return state, !c.down
}

// Subscribe implements stock.Cache.
func (c *Cache) Subscribe() (<-chan struct{}, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := make(chan struct{}, 1)
	c.changed = append(c.changed, changed)
	return changed, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changed = slices.DeleteFunc(c.changed, func(other chan struct{}) bool { return other == changed })
	}
}

func (c *Cache) signalLocked() {
	for _, changed := range c.changed {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// Hold implements stock.Cache.
func (c *Cache) Hold(ctx context.Context, digest artifact.Digest, claim string) (stock.Views, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.readyLocked(ctx); err != nil {
		return stock.Views{}, fmt.Errorf("hold artifact: %w", err)
	}
	a, ok := c.artifacts[digest]
	switch {
	case !ok:
		return stock.Views{}, fmt.Errorf("hold artifact %s: %w", digest.Short(), stock.ErrNotReady)
	case c.restricted[digest]:
		return stock.Views{}, fmt.Errorf("hold artifact %s: %w", digest.Short(), stock.ErrRestricted)
	}
	return c.views(a), c.holdLocked(digest, claim)
}

func (c *Cache) holdLocked(digest artifact.Digest, claim string) error {
	if slices.Contains(c.holds[claim], digest) {
		return nil
	}
	dir := filepath.Join(c.dir, "holds", claim)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("hold artifact: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, digest.String()), nil, 0o600); err != nil {
		return fmt.Errorf("hold artifact: %w", err)
	}
	c.holds[claim] = append(c.holds[claim], digest)
	return nil
}

// Pull implements stock.Cache.
func (c *Cache) Pull(ctx context.Context, ref artifact.Ref, claim string) (stock.Progress, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.readyLocked(ctx); err != nil {
		return stock.Progress{}, fmt.Errorf("pull %s: %w", ref, err)
	}
	for _, a := range c.artifacts {
		if a.Ref == ref && !c.restricted[a.Digest] {
			return stock.Progress{Views: c.views(a), Ready: true, Present: a.Size, Size: a.Size}, c.holdLocked(a.Digest, claim)
		}
	}
	origin, ok := c.origins[ref]
	if !ok {
		return stock.Progress{Failed: "the source does not have it", Reason: "NotFound", Final: true}, nil
	}
	if !slices.Contains(c.pulling[claim], ref) {
		c.pulling[claim] = append(c.pulling[claim], ref)
	}
	if origin.Failed != "" {
		return stock.Progress{Failed: origin.Failed, Reason: origin.Reason, Final: origin.Final}, nil
	}
	p := c.pulls[ref]
	if p.Failed == "" {
		if err := c.holdLocked(origin.Artifact.Digest, claim); err != nil {
			return stock.Progress{}, err
		}
	}
	if origin.Manual {
		return p, nil
	}
	p.Views.Digest, p.Size = origin.Artifact.Digest, origin.Artifact.Size
	return p, c.addLocked(origin.Artifact)
}

// Release implements stock.Cache.
func (c *Cache) Release(ctx context.Context, claim string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.readyLocked(ctx); err != nil {
		return fmt.Errorf("release claim: %w", err)
	}
	if err := os.RemoveAll(filepath.Join(c.dir, "holds", claim)); err != nil {
		return fmt.Errorf("release claim: %w", err)
	}
	delete(c.holds, claim)
	delete(c.pulling, claim)
	return nil
}

// Holds implements stock.Cache.
func (c *Cache) Holds(ctx context.Context) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.readyLocked(ctx); err != nil {
		return nil, fmt.Errorf("list holds: %w", err)
	}
	claims := map[string]bool{}
	for claim := range c.holds {
		claims[claim] = true
	}
	for claim := range c.pulling {
		claims[claim] = true
	}
	list := make([]string, 0, len(claims))
	for claim := range claims {
		list = append(list, claim)
	}
	slices.Sort(list)
	return list, nil
}

func (c *Cache) readyLocked(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.down {
		return stock.ErrUnavailable
	}
	return nil
}

func (c *Cache) views(a stock.Artifact) stock.Views {
	dir := filepath.Join(c.dir, "views", a.Digest.String())
	views := stock.Views{Digest: a.Digest, Flat: filepath.Join(dir, "flat")}
	if a.Ref.Scheme == artifact.SchemeHub {
		views.Hub = filepath.Join(dir, "hub")
	}
	return views
}

func (c *Cache) file(digest artifact.Digest) string {
	return filepath.Join(c.dir, "artifacts", digest.String()+".json")
}

// Sample makes an artifact for a test: its digest and size follow from n.
func Sample(name string, n byte) stock.Artifact {
	a := stock.Artifact{
		Ref:   artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/" + name, Revision: artifact.DefaultRevision},
		Model: name, Format: "safetensors", Size: units.Bytes(n) << 20,
		Commit: strings.Repeat(fmt.Sprintf("%02x", n), 20),
	}
	for i := range a.Digest {
		a.Digest[i] = n + byte(i)
	}
	return a
}
