package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/weightcache"
)

// standing is what must hold of a ref, from what was acknowledged.
type standing int

const (
	// open: an answer was lost, or none was asked for. Anything right may be.
	open standing = iota
	// ready: the ref means a commit, whose bytes are all there.
	ready
	// removed: the ref means nothing.
	removed
)

// ref is what the driver knows about one ref.
type ref struct {
	name string // org/name or org/name@commit
	repo string

	mu       sync.Mutex
	standing standing
	commit   string // while ready
	// pinning counts calls under way that may pin the ref, pins those ever begun;
	// loose says that one ended without an answer in this life of the agent.
	pinning, pins int
	loose         bool
	// stray says that a refresh lost its answer in this life of the agent: until
	// another is answered it may still move the ref.
	stray bool
	// changes counts removals and refreshes begun: what a reader sees between
	// two equal counts is of one artifact.
	changes int
	// seen is what the agent said last of a pull under way: commit and bytes.
	seen    string
	present int64
}

// full is the ref as the agent takes it.
func (r *ref) full() string { return "hub://" + r.name }

// fixed is the revision that never moves, empty for main.
func (r *ref) fixed() string {
	_, revision, _ := strings.Cut(r.name, "@")
	return revision
}

// pin begins a call that may pin the ref; the function it gives ends it and is
// told whether there was an answer.
func (r *ref) pin() func(answered bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.standing == removed {
		r.standing = open
	}
	r.pinning++
	r.pins++
	return func(answered bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.pinning--
		r.loose = r.loose || !answered
	}
}

// know notes an acknowledged commit, told by a refresh or not.
func (r *ref) know(commit string, refresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen, r.present = "", 0
	if r.stray = r.stray && !refresh; !r.stray {
		r.standing, r.commit = ready, commit
	}
}

// lost notes a refresh whose answer was lost.
func (r *ref) lost() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stray = true
}

// change begins a call after which the ref may mean something else. It gives
// what held before.
func (r *ref) change() (before standing, commit string, pins int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, commit = r.standing, r.commit
	r.standing = open
	r.changes++
	return before, commit, r.pins
}

// back restores what held before a change that was refused, where that was
// readiness: nothing else can have come of it.
func (r *ref) back(before standing, commit string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if before == ready {
		r.standing, r.commit = before, commit
	}
}

// gone notes an acknowledged removal, which holds unless something asked for
// the ref since it began.
func (r *ref) gone(pins int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen, r.present = "", 0
	if r.pins == pins && r.pinning == 0 && !r.loose {
		r.standing = removed
	}
}

// saw notes how far a pull is.
func (r *ref) saw(m *admin.Model) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m != nil && m.Commit != "" && m.State != string(weightcache.Ready) {
		r.seen, r.present = m.Commit, m.Present
	}
}

// now reads what must hold, and a count that differs once that may have changed.
func (r *ref) now() (standing, string, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.standing, r.commit, r.changes
}

// reborn notes that the agent runs anew: nothing of before is under way.
func (r *ref) reborn() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loose, r.stray = false, false
}

// model is the driver's knowledge of all refs.
type model struct {
	origin *origin
	mu     sync.Mutex
	refs   map[string]*ref
}

// ref finds or begins the knowledge of a ref.
func (m *model) ref(repo, revision string) *ref {
	name := repo
	if revision != "" && revision != "main" {
		name += "@" + revision
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.refs[name]
	if r == nil {
		r = &ref{name: name, repo: repo, standing: removed}
		m.refs[name] = r
	}
	return r
}

// all lists the refs by name.
func (m *model) all() []*ref {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []*ref
	for _, r := range m.refs {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *ref) int { return strings.Compare(a.name, b.name) })
	return list
}

// short is a ref as the agent prints it, without scheme and default revision.
func short(text string) string {
	text = strings.TrimPrefix(text, "hub://")
	return strings.TrimSuffix(text, "@main")
}

// judge holds what the agent lists against what was acknowledged, and gives the
// models by ref.
func (m *model) judge(listed []admin.Model) (map[string]admin.Model, error) {
	byRef := map[string]admin.Model{}
	for _, l := range listed {
		name := short(l.Ref)
		byRef[name] = l
		if l.Digest == "" {
			continue
		}
		c := m.origin.commit(l.Commit)
		if c == nil {
			return nil, fmt.Errorf("%s: %w: %q", name, errStrange, l.Commit)
		}
		repo, revision, _ := strings.Cut(name, "@")
		if c.repo != repo || revision != "" && revision != l.Commit {
			return nil, fmt.Errorf("%s: the agent says commit %s, which is of %s", name, l.Commit, c.repo)
		}
		if l.Digest != c.digest.String() || l.Size != c.size() {
			return nil, fmt.Errorf("%s: commit %s has artifact %s of %d bytes, the agent says %s of %d", name, c.id, c.digest, c.size(), l.Digest, l.Size)
		}
	}
	for _, r := range m.all() {
		standing, commit, _ := r.now()
		l, listed := byRef[r.name]
		switch {
		case standing == ready && (l.State != string(weightcache.Ready) || l.Commit != commit):
			return nil, fmt.Errorf("%s: a pull answered Ready at commit %s, now it is %q at %q: %s", r.name, commit, l.State, l.Commit, l.Detail)
		case standing == removed && listed && l.Digest != "":
			return nil, fmt.Errorf("%s: it was removed, now it is %q at %q", r.name, l.State, l.Commit)
		}
	}
	return byRef, nil
}
