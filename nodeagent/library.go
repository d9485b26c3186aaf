package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
)

// library lets the mirror read from the weight cache. It maps the errors that
// the mirror branches on.
type library struct {
	store  *weightcache.Store
	puller *weightcache.Puller
}

var (
	_ hubmirror.Library   = library{}
	_ hubmirror.RefLister = library{}
	_ hubmirror.Holder    = library{}
	_ hubmirror.RefNamer  = library{}
	_ hubmirror.Dater     = library{}
	_ hubmirror.Doubter   = library{}
)

// Manifest implements hubmirror.Library.
func (l library) Manifest(ctx context.Context, ref artifact.Ref) (*artifact.Manifest, error) {
	m, err := l.puller.Manifest(ctx, ref)
	return m, forMirror(err)
}

// Open implements hubmirror.Library.
func (l library) Open(ctx context.Context, m *artifact.Manifest, path string) (hubmirror.Content, error) {
	r, err := l.puller.Open(ctx, m, path, weightcache.OpenOptions{Reason: weightcache.ReasonMirror})
	if err != nil {
		return nil, forMirror(err)
	}
	return content{r}, nil
}

// Refs implements hubmirror.RefLister.
func (l library) Refs(_ context.Context, repo string) (map[string]string, error) {
	refs := map[string]string{}
	for _, m := range l.store.Manifests() {
		if m.Ref.Scheme == artifact.SchemeHub && m.Ref.Name == repo {
			refs[m.Ref.Revision] = m.Commit
		}
	}
	return refs, nil
}

// Held implements hubmirror.Holder.
func (l library) Held(repo, commit string) (*artifact.Manifest, bool) {
	return l.puller.Held(repo, commit)
}

// RefNames implements hubmirror.RefNamer.
func (l library) RefNames(ctx context.Context, repo string) (map[string]string, error) {
	return l.puller.RefNames(ctx, repo)
}

// Doubtful implements hubmirror.Doubter.
func (l library) Doubtful(file artifact.Digest) bool { return l.store.Doubtful(file) }

// Since implements hubmirror.Dater.
func (l library) Since(m *artifact.Manifest) time.Time { return l.puller.Since(m) }

// Keep implements hubmirror.Holder.
func (l library) Keep(m *artifact.Manifest, until time.Time) { l.store.Keep(m.Digest, until) }

// content is a Reader whose mismatch the mirror knows.
type content struct{ *weightcache.Reader }

// File implements hubmirror.Content.
func (c content) File() *os.File { return c.Reader.File() }

// ReadAt implements hubmirror.Content.
func (c content) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, err := c.Reader.ReadAt(ctx, p, off)
	return n, forMirror(err)
}

func forMirror(err error) error {
	switch {
	case errors.Is(err, weightcache.ErrNotAllowed):
		return fmt.Errorf("%w: %w", hubmirror.ErrNotAllowed, err)
	case errors.Is(err, weightcache.ErrMismatch):
		return fmt.Errorf("%w: %w", hubmirror.ErrMismatch, err)
	}
	return err
}
