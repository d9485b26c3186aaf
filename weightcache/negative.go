package weightcache

import (
	"errors"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

const (
	// refusedFor is how long a source's definite no answers later questions of
	// readers: long enough that a herd asks once, short enough that a repository
	// or a right just given is seen soon.
	refusedFor = 30 * time.Second
	// maxRefusals bounds the answers remembered; past it those that are over go,
	// or else all.
	maxRefusals = 1024
)

// refusals remembers what sources said no to: of a whole repository, or where
// it exists of one revision. The zero value is ready.
type refusals struct {
	mu sync.Mutex
	m  map[artifact.Ref]refusedRef // by ref; a repository has no Revision
}

type refusedRef struct {
	err   error
	until time.Time
}

// find gives the answer that still holds for a ref.
func (n *refusals) find(ref artifact.Ref, now time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	whole := artifact.Ref{Scheme: ref.Scheme, Name: ref.Name}
	for _, key := range []artifact.Ref{whole, ref} {
		if a, found := n.m[key]; found && now.Before(a.until) && now.Add(refusedFor+time.Second).After(a.until) {
			return a.err
		}
	}
	return nil
}

// note keeps an answer that asking again soon would not change. A yes ends a no.
func (n *refusals) note(ref artifact.Ref, err error, now time.Time) {
	key := artifact.Ref{Scheme: ref.Scheme, Name: ref.Name}
	switch {
	case err == nil:
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.m, key)
		delete(n.m, ref)
		return
	case errors.Is(err, source.ErrUnavailable), errors.Is(err, source.ErrThrottled):
		return // one of several sources could not be asked
	case errors.Is(err, source.ErrNoRevision):
		key = ref
	case errors.Is(err, source.ErrNotFound), errors.Is(err, source.ErrUnauthorized), errors.Is(err, source.ErrForbidden):
	default:
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.m) >= maxRefusals {
		for k, a := range n.m {
			if !now.Before(a.until) {
				delete(n.m, k)
			}
		}
	}
	if n.m == nil || len(n.m) >= maxRefusals {
		n.m = map[artifact.Ref]refusedRef{}
	}
	n.m[key] = refusedRef{err, now.Add(refusedFor)}
}
