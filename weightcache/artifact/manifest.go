package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// ManifestVersion is the version this code writes. It reads this one and the
// one before; a newer one is refused.
const ManifestVersion = 2

// MaxManifestBytes is the longest encoded manifest in bytes: 256 MiB.
const MaxManifestBytes = 256 << 20

// Manifest is the immutable answer to "what does this ref mean": a set of
// files with their digests. Only the files' content lines are under Digest;
// everything else stands beside it.
type Manifest struct {
	Version int    `json:"version"`
	Digest  Digest `json:"digest"`
	Ref     Ref    `json:"ref"`
	Source  string `json:"source"`
	Commit  string `json:"commit"`
	// Access is what the source said when it was last asked; absent: unknown.
	Access Access `json:"access,omitempty"`
	// Files are sorted by Path; every SHA256 is set.
	Files []File `json:"files"`
}

// ErrNewer is wrapped where stored bytes have a version this code does not
// know; such bytes are left untouched.
var ErrNewer = fmt.Errorf("%w: written by a newer version", ErrInvalid)

// ComputeDigest is SHA-256 over one line "<sha256 hex> <size> <path>\n" per
// file, the lines sorted bytewise.
func ComputeDigest(files []File) Digest { return digestInOrder(files, byContent(files)) }

// byContent gives the files' indices in the order of their lines.
func byContent(files []File) []int {
	order := make([]int, len(files))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		// A line begins with the digest, whose bytes sort as their hex digits do.
		if c := bytes.Compare(files[a].SHA256[:], files[b].SHA256[:]); c != 0 {
			return c
		}
		return compareRest(files[a], files[b])
	})
	return order
}

// compareRest orders the lines of two files of one digest.
func compareRest(a, b File) int {
	n := min(len(a.Path), len(b.Path))
	switch {
	case a.Size != b.Size: // one of them is wrong, which is said elsewhere
		return bytes.Compare(appendLine(nil, a), appendLine(nil, b))
	case a.Path[:n] != b.Path[:n] || len(a.Path) == len(b.Path):
		return strings.Compare(a.Path, b.Path)
	case len(a.Path) > n:
		return -compareRest(b, a)
	case b.Path[n] < '\n':
		return 1 // the line of a ends here
	}
	return -1
}

func appendLine(line []byte, f File) []byte {
	line = hex.AppendEncode(line, f.SHA256[:])
	line = append(line, ' ')
	line = strconv.AppendInt(line, f.Size, 10)
	line = append(line, ' ')
	line = append(line, f.Path...)
	return append(line, '\n')
}

func digestInOrder(files []File, order []int) Digest {
	h := sha256.New()
	var lines []byte
	for _, i := range order {
		if lines = appendLine(lines, files[i]); len(lines) > 32<<10 {
			_, _ = h.Write(lines)
			lines = lines[:0]
		}
	}
	_, _ = h.Write(lines)
	return Digest(h.Sum(nil))
}

// NewManifest makes a manifest from a listing whose files all have a SHA256,
// derives kinds and computes the digest. Errors wrap ErrInvalid.
func NewManifest(l *Listing) (*Manifest, error) {
	m := &Manifest{
		Version: ManifestVersion, Ref: l.Ref, Source: l.Source, Commit: l.Commit, Access: l.Access,
		Files: slices.Clone(l.Files),
	}
	for i := range m.Files {
		m.Files[i].Kind = KindOf(m.Files[i].Path)
	}
	slices.SortFunc(m.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	var err error
	if m.Digest, err = m.check(); err != nil {
		return nil, err
	}
	return m, nil
}

// Size is the sum of all files' lengths in bytes.
func (m *Manifest) Size() int64 {
	var n int64
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

// File finds a file by path.
func (m *Manifest) File(p string) (File, bool) {
	i, found := slices.BinarySearchFunc(m.Files, p, func(f File, p string) int { return strings.Compare(f.Path, p) })
	if !found {
		return File{}, false
	}
	return m.Files[i], true
}

// Listing gives back what a source needs to open the files.
func (m *Manifest) Listing() *Listing {
	return &Listing{Ref: m.Ref, Source: m.Source, Commit: m.Commit, Access: m.Access, Files: m.Files}
}

// Check validates everything about a manifest, including that Digest is that
// of the files. Errors wrap ErrInvalid.
func (m *Manifest) Check() error {
	got, err := m.check()
	if err == nil && got != m.Digest {
		err = fmt.Errorf("check manifest: %w: digest is %s, its files give %s", ErrInvalid, m.Digest.Short(), got.Short())
	}
	return err
}

// check validates everything but Digest, and gives what that has to be.
func (m *Manifest) check() (digest Digest, err error) {
	if m.Version > ManifestVersion {
		return digest, fmt.Errorf("check manifest: %w: version %d, this code knows %d", ErrNewer, m.Version, ManifestVersion)
	}
	if m.Version < 1 {
		return digest, fmt.Errorf("check manifest: %w: version %d", ErrInvalid, m.Version)
	}
	if err := m.Access.check(m.Version); err != nil {
		return digest, err
	}
	if _, err := ParseRef(m.Ref.String()); err != nil {
		return digest, fmt.Errorf("check manifest: %w", err)
	}
	if err := ValidCommit(m.Commit); err != nil {
		return digest, err
	}
	if len(m.Source) > MaxSegmentBytes {
		return digest, fmt.Errorf("check manifest: %w: source name longer than %d bytes", ErrInvalid, MaxSegmentBytes)
	}
	if err := CheckFiles(m.Files, true); err != nil {
		return digest, err
	}
	for _, f := range m.Files {
		if f.Kind != KindOf(f.Path) {
			return digest, fmt.Errorf("check file %q: %w: kind %.20q, want %q", f.Path, ErrInvalid, f.Kind, KindOf(f.Path))
		}
	}
	order := byContent(m.Files)
	for n := 1; n < len(order); n++ {
		if a, b := m.Files[order[n-1]], m.Files[order[n]]; a.SHA256 == b.SHA256 && a.Size != b.Size {
			return digest, fmt.Errorf("check file %q: %w: one digest with two sizes", b.Path, ErrInvalid)
		}
	}
	return digestInOrder(m.Files, order), nil
}

// ValidCommit accepts what may name a commit: 1 to 128 lower-case hex digits.
func ValidCommit(commit string) error {
	if len(commit) > 128 || commit == "" || !isHex(commit, len(commit)) {
		return fmt.Errorf("check commit %.140q: %w: want lower-case hex digits", commit, ErrInvalid)
	}
	return nil
}

// Encode gives the stored form: indented JSON with a final newline.
func (m *Manifest) Encode() ([]byte, error) {
	if err := m.Check(); err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return m.appendStored(), nil
}

// DecodeManifest reads the stored form strictly: unknown fields, trailing
// bytes and anything Check refuses are errors that wrap ErrInvalid; a version
// newer than ManifestVersion gives ErrNewer whatever else it holds.
func DecodeManifest(data []byte) (*Manifest, error) {
	if len(data) > MaxManifestBytes {
		return nil, fmt.Errorf("decode manifest: %w: longer than %d bytes", ErrInvalid, MaxManifestBytes)
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, fmt.Errorf("decode manifest: %w: %w", ErrInvalid, err)
	}
	if version.Version > ManifestVersion {
		return nil, fmt.Errorf("decode manifest: %w: version %d, this code knows %d", ErrNewer, version.Version, ManifestVersion)
	}
	m := new(Manifest)
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(m); err != nil {
		return nil, fmt.Errorf("decode manifest: %w: %w", ErrInvalid, err)
	}
	if err := m.Check(); err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	return m, nil
}

// HubName splits a hub ref's name for the folder of a hub cache:
// "models--org--name". It is empty for other schemes.
func (r Ref) HubName() string {
	if r.Scheme != SchemeHub {
		return ""
	}
	return "models--" + strings.ReplaceAll(path.Clean(r.Name), "/", "--")
}
