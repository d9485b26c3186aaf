package artifact

import (
	"fmt"
	"path"
	"strings"
)

// Schemes of a Ref.
const (
	SchemeHub = "hub"
	SchemeDir = "dir"
)

// DefaultRevision is the branch a hub ref means when it names none.
const DefaultRevision = "main"

// Ref is a user's name for an artifact: "hub://org/name@revision" or
// "dir:///absolute/path". It is resolved once to a digest.
type Ref struct {
	Scheme   string // SchemeHub or SchemeDir
	Name     string // "org/name" (or "name"), or the absolute path of a dir ref
	Revision string // branch, tag or commit of a hub ref; empty for dir
}

// ParseRef reads the text form of a Ref. A hub ref without "@revision" means
// DefaultRevision. Errors wrap ErrInvalid.
func ParseRef(s string) (Ref, error) {
	scheme, rest, found := strings.Cut(s, "://")
	if !found {
		return Ref{}, fmt.Errorf("parse ref %q: %w: want hub://org/name@revision or dir:///path", s, ErrInvalid)
	}
	switch scheme {
	case SchemeHub:
		name, revision, hasRevision := strings.Cut(rest, "@")
		if !hasRevision {
			revision = DefaultRevision
		}
		if !validRepo(name) {
			return Ref{}, fmt.Errorf("parse ref %q: %w: repository %q is not org/name", s, ErrInvalid, name)
		}
		if !validRevision(revision) {
			return Ref{}, fmt.Errorf("parse ref %q: %w: revision %q is not a branch, tag or commit", s, ErrInvalid, revision)
		}
		return Ref{Scheme: SchemeHub, Name: name, Revision: revision}, nil
	case SchemeDir:
		if !strings.HasPrefix(rest, "/") || strings.ContainsRune(rest, 0) {
			return Ref{}, fmt.Errorf("parse ref %q: %w: a dir ref wants an absolute path, such as dir:///models/x", s, ErrInvalid)
		}
		return Ref{Scheme: SchemeDir, Name: path.Clean(rest)}, nil
	}
	return Ref{}, fmt.Errorf("parse ref %q: %w: unknown scheme %q, want hub or dir", s, ErrInvalid, scheme)
}

// String gives the text form that ParseRef reads.
func (r Ref) String() string {
	if r.Scheme == SchemeHub {
		return "hub://" + r.Name + "@" + r.Revision
	}
	return r.Scheme + "://" + r.Name
}

// IsZero reports whether the ref is unset.
func (r Ref) IsZero() bool { return r == Ref{} }

// MarshalText implements encoding.TextMarshaler with String.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParseRef.
func (r *Ref) UnmarshalText(text []byte) error {
	v, err := ParseRef(string(text))
	if err != nil {
		return err
	}
	*r = v
	return nil
}

// validRepo accepts one or two segments of the characters the hub allows.
func validRepo(name string) bool {
	segments := strings.Split(name, "/")
	if len(segments) > 2 || len(name) > 200 {
		return false
	}
	for _, segment := range segments {
		if segment == "" || segment == "." || segment == ".." || strings.Contains(segment, "..") || strings.Contains(segment, "--") {
			return false
		}
		for _, c := range segment {
			if !isNameRune(c) {
				return false
			}
		}
	}
	return true
}

// validRevision accepts a git ref name that is safe as a relative path.
func validRevision(revision string) bool {
	if revision == "" || len(revision) > 200 || path.Clean(revision) != revision || revision[0] == '/' {
		return false
	}
	for segment := range strings.SplitSeq(revision, "/") {
		if segment == ".." || segment == "." || strings.HasSuffix(segment, ".lock") {
			return false
		}
	}
	for _, c := range revision {
		if !isNameRune(c) && c != '/' && c != '+' && c != '#' {
			return false
		}
	}
	return true
}

func isNameRune(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
}
