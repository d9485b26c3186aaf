package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/weightcache"
)

// crew works on a living agent until its context ends, which is before the
// agent's death or with it.
type crew struct {
	t      *torture
	agent  *victim.Agent
	dying  <-chan struct{} // closed before a signal is sent
	group  sync.WaitGroup
	failed chan error // capacity 1
}

// work sets actors and readers to work; the function it gives waits for them
// and tells the first fault they found.
func (t *torture) work(ctx context.Context, dice *rand.Rand, dying <-chan struct{}) func() error {
	c := &crew{t: t, agent: t.agent, dying: dying, failed: make(chan error, 1)}
	spawn := func(do func(context.Context, *rand.Rand) error) {
		own := rand.New(rand.NewPCG(dice.Uint64(), dice.Uint64()))
		c.group.Go(func() {
			for ctx.Err() == nil && !c.over() {
				if err := do(ctx, own); err != nil {
					select {
					case c.failed <- err:
					default:
					}
					return
				}
			}
		})
	}
	for _, name := range repositories {
		spawn(func(ctx context.Context, dice *rand.Rand) error { return c.act(ctx, dice, name) })
	}
	for range 3 {
		spawn(c.readMirror)
	}
	spawn(c.readView)
	return func() error {
		c.group.Wait()
		select {
		case err := <-c.failed:
			return err
		default:
			return nil
		}
	}
}

func (c *crew) over() bool {
	select {
	case <-c.dying:
		return true
	default:
		return false
	}
}

// act does one call on a repository.
func (c *crew) act(ctx context.Context, dice *rand.Rand, repo string) error {
	r := c.t.model.ref(repo, "")
	if dice.IntN(6) == 0 {
		offered := c.t.origin.offered(repo)
		r = c.t.model.ref(repo, offered[dice.IntN(len(offered))])
	}
	switch at := dice.IntN(20); {
	case at < 8:
		return c.pull(ctx, dice, r, false)
	case at < 14:
		return c.pull(ctx, dice, r, true)
	case at < 17:
		return c.remove(ctx, r)
	case at < 19:
		return c.verify(ctx, r)
	}
	return pause(ctx, time.Duration(dice.IntN(200))*time.Millisecond)
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// pull makes a ref Ready, sometimes through the command line and sometimes
// giving up early.
func (c *crew) pull(ctx context.Context, dice *rand.Rand, r *ref, refresh bool) error {
	c.t.count("pull")
	if dice.IntN(5) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(dice.IntN(400))*time.Millisecond)
		defer cancel()
	}
	_, from := c.t.origin.main(r.repo, 0)
	before, commit, _ := r.now()
	if refresh && r.fixed() == "" {
		before, commit, _ = r.change()
	}
	end := r.pin()
	var m admin.Model
	var err error
	if dice.IntN(8) == 0 {
		m, err = c.byCommandLine(ctx, r, refresh)
	} else {
		m, err = c.agent.Client.Pull(ctx, admin.PullRequest{Ref: r.full(), Refresh: refresh}, func(p admin.Progress) { r.saw(p.Model) })
	}
	// An error of the agent's own is an answer, anything else is the loss of one.
	said, answered := errors.AsType[*admin.Error](err)
	end(err == nil || answered)
	moved, _ := c.t.origin.main(r.repo, max(0, from-1))
	if err != nil {
		if answered && (said.Code == admin.CodeBroken && !c.t.foul.Load() || said.Code == admin.CodeBadRequest || said.Code == admin.CodeNotAllowed) {
			return fmt.Errorf("pull %s: %w", r.name, err)
		}
		if answered && !refresh && before == ready {
			return fmt.Errorf("pull %s: it was Ready at commit %s: %w", r.name, commit, err)
		}
		switch {
		case !refresh || r.fixed() != "":
		case !answered:
			r.lost()
		case len(moved) == 1 && moved[0] == commit:
			r.back(before, commit) // it could not have moved
		}
		return nil
	}
	switch {
	case m.State != string(weightcache.Ready):
		return fmt.Errorf("pull %s: it ended well in state %q: %s", r.name, m.State, m.Detail)
	case !refresh && before == ready && m.Commit != commit:
		return fmt.Errorf("pull %s: it was pinned to %s and moved to %s unasked", r.name, commit, m.Commit)
	case r.fixed() != "" && m.Commit != r.fixed():
		return fmt.Errorf("pull %s: it came as commit %s", r.name, m.Commit)
	}
	if refresh && r.fixed() == "" && !slices.Contains(moved, m.Commit) {
		return fmt.Errorf("refresh %s: it came as commit %s, main was at %q meanwhile", r.name, m.Commit, moved)
	}
	if found := c.t.origin.commit(m.Commit); found == nil || found.digest.String() != m.Digest {
		return fmt.Errorf("pull %s: %w with this artifact: %s %s", r.name, errStrange, m.Commit, m.Digest)
	}
	r.know(m.Commit, refresh)
	c.t.count("pull ok")
	return nil
}

// byCommandLine pulls as a person would.
func (c *crew) byCommandLine(ctx context.Context, r *ref, refresh bool) (admin.Model, error) {
	c.t.count("cli")
	args := []string{"models", "pull", r.full(), "--addr", c.agent.Socket}
	if refresh {
		args = append(args, "--refresh")
	}
	if _, err := c.t.rig.Run(ctx, rig.Command{Name: "hearth", Path: c.t.options.hearth, Args: args, Env: c.t.options.env}); err != nil {
		return admin.Model{}, err
	}
	return c.agent.Client.Model(ctx, r.full())
}

// remove drops a ref.
func (c *crew) remove(ctx context.Context, r *ref) error {
	c.t.count("rm")
	before, commit, pins := r.change()
	err := c.agent.Client.Remove(ctx, r.full())
	said, answered := errors.AsType[*admin.Error](err)
	switch {
	case err == nil:
		r.gone(pins)
		c.t.count("rm ok")
	case answered && said.Code == admin.CodeUnknownRef:
		if before == ready {
			return fmt.Errorf("remove %s: a pull answered Ready at commit %s, now: %w", r.name, commit, err)
		}
		r.gone(pins)
	case answered && said.Code == admin.CodeLeased:
		r.back(before, commit)
	case answered:
		return fmt.Errorf("remove %s: %w", r.name, err)
	}
	return nil
}

// verify has the agent read everything again: nothing here damages files.
func (c *crew) verify(ctx context.Context, r *ref) error {
	c.t.count("verify")
	before, _, changes := r.now()
	result, err := c.agent.Client.Verify(ctx, r.full())
	said, answered := errors.AsType[*admin.Error](err)
	_, _, since := r.now()
	switch {
	case err == nil && len(result.Bad) > 0 && before == ready && since == changes:
		return fmt.Errorf("verify %s: these are found damaged: %q", r.name, result.Bad)
	case answered && said.Code == admin.CodeInternal:
		return fmt.Errorf("verify %s: %w", r.name, err)
	case answered && before == ready && since == changes:
		return fmt.Errorf("verify %s: it is Ready, and: %w", r.name, err)
	}
	return nil
}

// readMirror reads a file as an engine's hub client does: by branch or commit,
// whole or in part, to the end or not.
func (c *crew) readMirror(ctx context.Context, dice *rand.Rand) error {
	repo := repositories[dice.IntN(len(repositories))]
	offered := c.t.origin.offered(repo)
	revision := "main"
	if dice.IntN(4) == 0 {
		revision = offered[dice.IntN(len(offered))]
	}
	r := c.t.model.ref(repo, revision)
	if standing, _, _ := r.now(); standing == removed && dice.IntN(4) > 0 {
		return pause(ctx, 20*time.Millisecond) // else the mirror would bring back all that is removed
	}
	path := names[dice.IntN(len(names))]
	before, commit, changes := r.now()
	end := r.pin()
	got, err := c.get(ctx, dice, repo, revision, path)
	end(got.status != 0)
	if err != nil || c.over() || ctx.Err() != nil {
		return err
	}
	standing, _, since := r.now()
	if before != ready || standing != ready || since != changes || got.gaveUp {
		return nil
	}
	// It was Ready all the time, so the answer had to be whole.
	want := c.t.origin.commit(commit)
	if _, has := want.files[path]; !has {
		if got.status != http.StatusNotFound || got.commit != commit {
			return fmt.Errorf("mirror: %s lacks %s at commit %s, the answer is %d for commit %q", r.name, path, commit, got.status, got.commit)
		}
		return nil
	}
	if got.cut != nil || got.commit != commit || got.status >= 300 && got.status != http.StatusRequestedRangeNotSatisfiable {
		return fmt.Errorf("mirror: %s is Ready at commit %s, the answer for %s is %d for commit %q: %w", r.name, commit, path, got.status, got.commit, errors.Join(errNotWhole, got.cut))
	}
	return nil
}

var errNotWhole = errors.New("it is not whole")

// stranger is a client at an address of its own among those of loopback: the
// mirror keeps a client that it knows to the commit of its first question.
func (t *torture) stranger(dice *rand.Rand) *http.Client {
	from := &net.TCPAddr{IP: net.IPv4(127, byte(1+dice.IntN(250)), byte(dice.IntN(250)), byte(1+dice.IntN(250)))}
	dialer := &net.Dialer{LocalAddr: from}
	return &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true, DisableCompression: true}}
}

// answer is what the mirror gave.
type answer struct {
	status int
	commit string
	gaveUp bool  // the driver left before the end
	cut    error // why the body ended early
}

// get asks the mirror for a file or a range of it and compares every byte that
// comes. An error is a fault of the agent; no answer at all is none.
func (c *crew) get(ctx context.Context, dice *rand.Rand, repo, revision, path string) (answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.agent.Mirror+"/"+repo+"/resolve/"+revision+"/"+path, nil)
	if err != nil {
		return answer{}, fmt.Errorf("make request: %w", err)
	}
	ranged := ""
	switch dice.IntN(6) {
	case 0:
		ranged = fmt.Sprintf("bytes=%d-", dice.Int64N(3<<20))
	case 1:
		from := dice.Int64N(2 << 20)
		ranged = fmt.Sprintf("bytes=%d-%d", from, from+dice.Int64N(1<<20))
	case 2:
		ranged = []string{"bytes=0-0", "bytes=-1", "bytes=-70000", "bytes=0-100000"}[dice.IntN(4)]
	}
	if ranged != "" {
		request.Header.Set("Range", ranged)
	}
	response, err := c.t.stranger(dice).Do(request)
	if err != nil {
		return answer{gaveUp: true}, nil // killed or stopped in mid-call
	}
	defer func() { _ = response.Body.Close() }()
	a := answer{status: response.StatusCode, commit: response.Header.Get("X-Repo-Commit")}
	if a.status >= 500 {
		return a, fmt.Errorf("mirror: %s answers %d", request.URL.Path, a.status)
	}
	if a.status != http.StatusOK && a.status != http.StatusPartialContent {
		return a, nil
	}
	found := c.t.origin.commit(a.commit)
	if found == nil || found.repo != repo || revision != "main" && revision != a.commit {
		return a, fmt.Errorf("mirror: %s: %w: %q", request.URL.Path, errStrange, a.commit)
	}
	b, has := found.files[path]
	if !has {
		return a, fmt.Errorf("mirror: %s: commit %s has no such file", request.URL.Path, a.commit)
	}
	off := int64(0)
	if a.status == http.StatusPartialContent {
		if _, err := fmt.Sscanf(response.Header.Get("Content-Range"), "bytes %d-", &off); err != nil {
			return a, fmt.Errorf("mirror: %s: unreadable Content-Range %q", request.URL.Path, response.Header.Get("Content-Range"))
		}
	}
	body := io.Reader(response.Body)
	if dice.IntN(5) == 0 {
		body = io.LimitReader(body, dice.Int64N(1<<20))
		a.gaveUp = true
	}
	n, wrong, err := b.differs(body, off)
	a.cut = err
	c.t.served(n)
	if a.status == http.StatusPartialContent {
		c.t.count("range")
	} else {
		c.t.count("get")
	}
	if wrong >= 0 {
		whole := err == nil && !a.gaveUp
		// A file that is still landing is sent ahead of its proof, less its last
		// segment. Where the origin lied, such bytes end in a broken body, which no
		// client takes for whole, or in a part of the file that asked for no more.
		if c.t.foul.Load() && (!whole || a.status == http.StatusPartialContent && off+n < b.size) {
			c.t.count("unproven")
			return a, nil
		}
		return a, fmt.Errorf("mirror: %s %s of commit %s: byte %d is wrong, %d bytes came, whole answer: %v", request.URL.Path, ranged, a.commit, wrong, n, whole)
	}
	if a.status == http.StatusOK && err == nil && !a.gaveUp && n != b.size {
		return a, fmt.Errorf("mirror: %s of commit %s: %d bytes came of %d", request.URL.Path, a.commit, n, b.size)
	}
	return a, nil
}

// readView reads the views of what the agent lists, as an engine on the node
// does while models come and go.
func (c *crew) readView(ctx context.Context, dice *rand.Rand) error {
	listed, err := c.agent.Client.Models(ctx)
	if err != nil || len(listed) == 0 {
		return pause(ctx, 50*time.Millisecond)
	}
	l := listed[dice.IntN(len(listed))]
	if len(l.Views) == 0 {
		return pause(ctx, 20*time.Millisecond)
	}
	for _, dir := range l.Views {
		found := c.t.origin.byDigest(l.Digest)
		if found == nil {
			return fmt.Errorf("view %s: %w", dir, errStrange)
		}
		// Views of equal artifacts are one, whatever the ref: the commit is the
		// hub view's own.
		if err := c.t.readTree(dir, strings.Contains(dir, "/hub/"), found); err != nil {
			return err
		}
	}
	c.t.count("view")
	return nil
}
