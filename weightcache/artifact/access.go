package artifact

import "fmt"

// Access says to whom a source serves an artifact. It belongs to the source's
// repository, not to the bytes: equal bytes may be open at one and gated at
// another.
type Access string

// Kinds of access.
const (
	AccessUnknown Access = ""        // not asked, or the source could not tell
	AccessOpen    Access = "open"    // to anybody, without a credential
	AccessGated   Access = "gated"   // its existence to anybody, its files to those admitted
	AccessPrivate Access = "private" // even its existence only to those admitted
)

// Restricted reports whether the source demands a credential for the files.
// Of AccessUnknown it says false: whoever knows the source decides.
func (a Access) Restricted() bool { return a == AccessGated || a == AccessPrivate }

// check refuses what no version has. Manifests of version 1 know no access.
func (a Access) check(version int) error {
	switch a {
	case AccessUnknown:
		return nil
	case AccessOpen, AccessGated, AccessPrivate:
		if version >= 2 {
			return nil
		}
		return fmt.Errorf("check access: %w: a manifest of version %d has none", ErrInvalid, version)
	}
	return fmt.Errorf("check access %.20q: %w: want open, gated or private", string(a), ErrInvalid)
}

// WithAccess gives a copy whose access is another, in the present version; the
// files are shared.
func (m *Manifest) WithAccess(a Access) *Manifest {
	c := *m
	c.Version, c.Access = ManifestVersion, a
	return &c
}
