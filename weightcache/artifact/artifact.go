// Package artifact holds the vocabulary of the weight cache: Ref (what a user
// names), Manifest (the immutable set of files it resolved to), Digest and
// File. It is pure: no I/O, no clock, standard library only. The byte formats
// are in weightcache/FORMAT.md.
package artifact

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Digest is a SHA-256 value: of a file's bytes, or of an artifact's file lines.
type Digest [sha256.Size]byte

// ParseDigest reads 64 lower-case hex digits.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if len(s) != 2*len(d) || strings.ToLower(s) != s {
		return d, fmt.Errorf("parse digest %q: want 64 lower-case hex digits", s)
	}
	if _, err := hex.Decode(d[:], []byte(s)); err != nil {
		return d, fmt.Errorf("parse digest %q: want 64 lower-case hex digits", s)
	}
	return d, nil
}

// String gives 64 lower-case hex digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// Short gives the first 12 hex digits, for people.
func (d Digest) Short() string { return hex.EncodeToString(d[:6]) }

// IsZero reports whether the digest is unset.
func (d Digest) IsZero() bool { return d == Digest{} }

// MarshalText implements encoding.TextMarshaler with String.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParseDigest.
func (d *Digest) UnmarshalText(text []byte) error {
	v, err := ParseDigest(string(text))
	if err != nil {
		return err
	}
	*d = v
	return nil
}

// Kind says when a file is needed: metadata first, weights after.
type Kind string

// Kinds of files.
const (
	Metadata Kind = "metadata" // configuration, tokenizer, indexes, templates
	Weights  Kind = "weights"  // tensors
	Other    Kind = "other"    // everything else (licences, pictures)
)

// File is one file of an artifact.
type File struct {
	// Path is slash separated, relative, clean and free of "..".
	Path string `json:"path"`
	// Size is the length in bytes.
	Size int64 `json:"size"`
	// SHA256 is the digest of the content. It is zero only in a source's
	// listing, never in a Manifest.
	SHA256 Digest `json:"sha256"`
	// GitSHA1 is the git blob id as 40 hex digits, where the source gives it.
	GitSHA1 string `json:"gitSHA1,omitempty"`
	// LFS says that the source keeps the file outside git, so that the hub
	// names its blob by SHA256; other files are named by GitSHA1.
	LFS bool `json:"lfs,omitempty"`
	// Kind is derived from the path by KindOf.
	Kind Kind `json:"kind"`
	// Validator is the source's own version tag of the bytes (an ETag, or
	// size and mtime of a local file), used to notice a change in mid-pull.
	Validator string `json:"validator,omitempty"`
}

// Listing is what a source says a ref means at one immutable commit.
type Listing struct {
	Ref    Ref
	Source string // configured name of the source
	Commit string // 40 hex digits for hub; for dir the digest of the file lines
	Access Access // to whom the source serves it
	Files  []File // sorted by Path; SHA256 may be zero, GitSHA1 is then set
}

// ErrInvalid is wrapped by every error about a malformed ref, path or manifest.
var ErrInvalid = errors.New("invalid")
