package weightcache

import (
	"errors"
	"slices"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// stateFacts are what an artifact's state follows from.
type stateFacts struct {
	evicting  bool
	complete  bool // every file is committed
	checked   bool // the structure was found right
	metadata  bool // every metadata file is committed
	weights   int64
	present   int64
	damaged   []string // paths of files found damaged and not replaced
	pulling   bool
	verifying bool
	failed    error
}

// state folds the facts into one word and a detail for people.
func (f stateFacts) state() (State, string) {
	detail := ""
	if f.failed != nil {
		detail = f.failed.Error()
	}
	switch {
	case errors.Is(f.failed, ErrLost):
		return Failed, detail
	case f.evicting:
		return Evicting, ""
	case f.complete && f.checked:
		return Ready, ""
	case len(f.damaged) > 0:
		if detail == "" {
			detail = "damaged file " + f.damaged[0]
		}
		return Suspect, detail
	case f.failed != nil && !f.pulling:
		return Failed, detail
	case f.complete && f.pulling || f.verifying:
		return Verifying, ""
	case f.metadata && f.weights > 0:
		return Filling, ""
	case f.metadata && f.present > 0:
		return Metadata, ""
	case f.pulling:
		return Resolving, "fetching metadata files"
	case f.present > 0:
		return Filling, "no pull under way"
	}
	return Absent, ""
}

// status reads what the store knows of an artifact; landings are the files
// being fetched.
func (s *Store) status(m *artifact.Manifest, landings map[artifact.Digest]*landing, facts *stateFacts) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Ref: m.Ref, Digest: m.Digest, Commit: m.Commit, Source: m.Source, Access: m.Access, Size: m.Size(), Files: len(m.Files)}
	facts.complete, facts.metadata = true, true
	for _, f := range m.Files {
		size, found := s.blobs[f.SHA256]
		if !found {
			facts.complete = false
			if f.Kind == artifact.Metadata {
				facts.metadata = false
			}
			if l := landings[f.SHA256]; l != nil {
				size = l.present()
			}
		}
		if s.bad[f.SHA256] {
			facts.damaged = append(facts.damaged, f.Path)
		}
		st.Present += size
		if f.Kind == artifact.Weights {
			facts.weights += size
		}
	}
	facts.present = st.Present
	st.MetadataReady = facts.metadata
	if r := s.artifacts[m.Digest]; r != nil {
		facts.checked, facts.evicting = r.checked, r.evicting
		st.Leases, st.LastUsed = r.leases, r.lastUsed
		st.Views = s.viewDirs(m, r)
	}
	st.ViewsWithheld = !s.mayView(m)
	slices.Sort(facts.damaged)
	return st
}

// use notes that an artifact was read.
func (s *Store) use(digest artifact.Digest) {
	s.mu.Lock()
	r := s.artifacts[digest]
	touch := r != nil && s.useLocked(r)
	s.mu.Unlock()
	s.touch(digest, touch)
}

func (s *Store) leased(digest artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.artifacts[digest]
	return r != nil && r.leases > 0
}

// shared reports whether another ref means the same artifact.
func (s *Store) shared(ref artifact.Ref) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.refs[ref]
	for other, om := range s.refs {
		if m != nil && other != ref && om.Digest == m.Digest {
			return true
		}
	}
	return false
}
