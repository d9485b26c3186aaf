package hubmirror

import (
	"container/list"
	"encoding/hex"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of sessions.
const (
	// sessionIdle ends a session that asks for nothing and is sent nothing.
	sessionIdle = 10 * time.Minute
	// sessionMax is how long a name means the same to one client at most.
	sessionMax = 6 * time.Hour
	// keepEvery is how often a session asks again that its bytes stay.
	keepEvery = time.Minute
	// maxSessions are remembered; past it the one idle longest is forgotten.
	maxSessions = 4096
)

// Holder is implemented by a Library that knows what revisions meant before.
// Without it a session ends when its revision moves.
type Holder interface {
	// Held finds the manifest of a commit, under whatever name it became known,
	// where it is known without asking a source and may be served.
	Held(repo, commit string) (*artifact.Manifest, bool)
	// Keep asks that the bytes of a manifest stay until then, though its ref may
	// come to mean something else.
	Keep(m *artifact.Manifest, until time.Time)
}

// sessionKey is a client that asks what one revision means.
type sessionKey struct{ who, repo, rev string }

// session is what a revision meant when its client asked first.
type session struct {
	key               sessionKey
	manifest          *artifact.Manifest
	began, last, kept time.Time
}

// sessions remembers what clients were told. It is safe for concurrent use.
type sessions struct {
	mu    sync.Mutex
	byKey map[sessionKey]*list.Element // of *session
	order list.List                    // least recently used first
}

// find gives the live session of a key, or begins one with m.
func (s *sessions) find(key sessionKey, m *artifact.Manifest, now time.Time) *artifact.Manifest {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, known := s.byKey[key]; known {
		if old, ok := e.Value.(*session); ok && within(now, old.last, sessionIdle) && within(now, old.began, sessionMax) {
			old.last = now
			s.order.MoveToBack(e)
			return old.manifest
		}
	}
	s.putLocked(key, m, now)
	return m
}

// replace begins the session of a key anew.
func (s *sessions) replace(key sessionKey, m *artifact.Manifest, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.putLocked(key, m, now)
}

func (s *sessions) putLocked(key sessionKey, m *artifact.Manifest, now time.Time) {
	if e, known := s.byKey[key]; known {
		s.order.Remove(e)
	}
	if s.byKey == nil {
		s.byKey = map[sessionKey]*list.Element{}
	}
	s.byKey[key] = s.order.PushBack(&session{key: key, manifest: m, began: now, last: now})
	for s.order.Len() > maxSessions {
		if oldest, ok := s.order.Remove(s.order.Front()).(*session); ok {
			delete(s.byKey, oldest.key)
		}
	}
}

// touch notes that a session's client is there, and says whether its bytes are
// to be kept again.
func (s *sessions) touch(key sessionKey, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, known := s.byKey[key]
	if !known {
		return false
	}
	one, ok := e.Value.(*session)
	if !ok {
		return false
	}
	one.last = now
	if within(now, one.kept, keepEvery) {
		return false
	}
	one.kept = now
	s.order.MoveToBack(e)
	return true
}

// keyOf says whose session a request belongs to: the address it comes from and,
// where it shows one, its identity. Clients behind one address that show none
// share a session; that is what a pod's processes do.
func (m *Mirror) keyOf(r *http.Request, rt route) sessionKey {
	who, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		who = r.RemoteAddr
	}
	if c := m.auth.callerOf(r); c.known() {
		who += " " + c.name()
	} else if c.token != "" {
		who += " " + hex.EncodeToString(c.sum[:])
	}
	return sessionKey{who, rt.repo, revisionOf(rt.rev)}
}

// judgedAlike says that who was judged by one manifest may have the other as
// well: it is open, or for those whom the same source admits in the same way.
func (m *Mirror) judgedAlike(other, judged *artifact.Manifest) bool {
	restricted := m.auth.opts.Restricted
	return !restricted(other) || restricted(judged) && other.Source == judged.Source && other.Access == judged.Access
}

// steady gives what a revision means to the client of a request: what it meant
// when the client asked first, so that all questions of one start have one
// answer, also where the revision has moved meanwhile. now is what it means to
// others. touch is to be called while the client is served.
func (m *Mirror) steady(r *http.Request, rt route, now *artifact.Manifest) (mf *artifact.Manifest, touch func()) {
	holder, ok := m.opts.Library.(Holder)
	if !ok {
		return now, func() {}
	}
	key := m.keyOf(r, rt)
	mf = m.sessions.find(key, now, m.opts.Now())
	if mf.Commit != now.Commit || mf.Digest != now.Digest {
		held, found := holder.Held(rt.repo, mf.Commit)
		if found && held.Digest == mf.Digest && m.judgedAlike(held, now) {
			mf = held
		} else {
			mf = now
			m.sessions.replace(key, now, m.opts.Now())
		}
	}
	touch = func() {
		if at := m.opts.Now(); m.sessions.touch(key, at) {
			holder.Keep(mf, at.Add(sessionIdle+keepEvery))
		}
	}
	touch()
	return mf, touch
}
