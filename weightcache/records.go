package weightcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// A record is the manifest a ref is pinned to, one file per ref. A record
// whose ref has moved on keeps its artifact known under a second name until
// it is evicted.
const (
	recordSuffix  = ".json"
	supersededTag = ",old,"
	// maxRecordName leaves room for the tag, a digest and the suffix in 255.
	maxRecordName = 180
	// maxQuarantine bounds the bad records kept for people to look at.
	maxQuarantine = 100
)

// recordName is the file name of a ref's record, without suffix.
func recordName(ref artifact.Ref) string {
	name := url.QueryEscape(ref.String())
	if len(name) > maxRecordName {
		sum := sha256.Sum256([]byte(name))
		name = name[:maxRecordName-2*len(sum)-1] + "," + hex.EncodeToString(sum[:])
	}
	return name
}

func (s *Store) recordPath(ref artifact.Ref) string {
	return s.path(refsDir, recordName(ref)+recordSuffix)
}

func (s *Store) supersededPath(m *artifact.Manifest) string {
	return s.oldPath(m.Ref, m.Digest)
}

// oldPath is the record that keeps an artifact known which a ref meant before.
func (s *Store) oldPath(ref artifact.Ref, digest artifact.Digest) string {
	return s.path(refsDir, recordName(ref)+supersededTag+digest.Short()+recordSuffix)
}

// readRecords reads every record and gives those for quarantine. One of a
// newer version, or one that cannot be read now, stops the open before anything
// changes: its artifact's files would else be removed as nobody's.
func (s *Store) readRecords() (bad []string, err error) {
	entries, err := s.fs.ReadDir(s.path(refsDir))
	if err != nil && !notExist(err) {
		return nil, err
	}
	var superseded []*artifact.Manifest
	supersededPaths := map[*artifact.Manifest]string{}
	for _, e := range entries {
		path := s.path(refsDir, e.Name())
		if !strings.HasSuffix(e.Name(), recordSuffix) || durable.IsTemp(e.Name()) || e.IsDir() {
			bad = append(bad, path)
			continue
		}
		m, err := s.readRecord(path)
		switch {
		case errors.Is(err, artifact.ErrNewer):
			return nil, fmt.Errorf("%w: record %s", ErrNewer, e.Name())
		case errors.Is(err, artifact.ErrInvalid), errors.Is(err, durable.ErrTooLong), errors.Is(err, syscall.EIO):
			s.log.Error("record is unreadable, moving it to quarantine", slog.String("path", path), slog.Any("error", err))
			bad = append(bad, path)
		case err != nil:
			return nil, err
		case strings.Contains(e.Name(), supersededTag):
			superseded = append(superseded, m)
			supersededPaths[m] = path
		case s.recordPath(m.Ref) != path:
			s.log.Error("record has another ref's name, moving it to quarantine", slog.String("path", path))
			bad = append(bad, path)
		default:
			s.refs[m.Ref] = m
			s.addRecordLocked(m)
		}
	}
	for _, m := range superseded {
		if s.artifacts[m.Digest] != nil {
			bad = append(bad, supersededPaths[m]) // the ref did not move on after all, or another means it
			continue
		}
		s.addRecordLocked(m).old[m.Ref] = true
	}
	return bad, nil
}

// readRecord reads and checks one record.
func (s *Store) readRecord(path string) (*artifact.Manifest, error) {
	data, err := durable.ReadFile(s.fs, path, artifact.MaxManifestBytes)
	if err != nil {
		return nil, err
	}
	m, err := artifact.DecodeManifest(data)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return m, nil
}

// addRecordLocked makes an artifact known; the first manifest of a digest stays.
func (s *Store) addRecordLocked(m *artifact.Manifest) *record {
	r := s.artifacts[m.Digest]
	if r == nil {
		r = &record{m: m, views: map[string]bool{}, hubRefs: map[artifact.Ref]string{}, old: map[artifact.Ref]bool{}, lastUsed: s.now()}
		s.artifacts[m.Digest] = r
	}
	if r.turn == 0 {
		s.turnLocked(r)
	}
	return r
}

// loadReady reads which artifacts were found right; the marker's time is when
// the artifact was last used.
func (s *Store) loadReady() error {
	entries, err := s.fs.ReadDir(s.path(readyDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := s.path(readyDir, e.Name())
		digest, err := artifact.ParseDigest(e.Name())
		r := s.artifacts[digest]
		if err != nil || r == nil {
			if err := s.fs.RemoveAll(path); err != nil {
				return err
			}
			continue
		}
		r.checked = true
		if info, err := s.fs.Stat(path); err == nil && info.ModTime().Before(r.lastUsed) {
			r.lastUsed = info.ModTime() // never later than now, whatever the clock was
		}
	}
	order := slices.SortedFunc(maps.Values(s.artifacts), func(a, b *record) int { return a.lastUsed.Compare(b.lastUsed) })
	for _, r := range order {
		s.turnLocked(r)
	}
	return nil
}

// quarantine moves a file aside for people; the oldest past the bound goes.
func (s *Store) quarantine(path string) error {
	base := filepath.Base(path)
	if durable.IsTemp(base) || strings.Contains(base, supersededTag) {
		return s.fs.RemoveAll(path)
	}
	to := s.path(quarantineDir, strconv.FormatInt(s.now().UnixNano(), 10)+"-"+base)
	if len(filepath.Base(to)) > artifact.MaxSegmentBytes {
		to = to[:len(to)-(len(filepath.Base(to))-artifact.MaxSegmentBytes)]
	}
	if err := s.fs.Rename(path, to); err != nil {
		return err
	}
	if err := errors.Join(s.fs.SyncDir(s.path(quarantineDir)), s.fs.SyncDir(filepath.Dir(path))); err != nil {
		return err
	}
	kept, err := s.fs.ReadDir(s.path(quarantineDir))
	if err != nil {
		return err
	}
	for i := range max(0, len(kept)-maxQuarantine) {
		if err := s.fs.RemoveAll(s.path(quarantineDir, kept[i].Name())); err != nil {
			return err
		}
	}
	return nil
}

// pin makes a manifest the durable meaning of its ref and gives what the ref
// means then. The manifest it replaces stays known, so that its bytes can be
// leased and evicted. Without replace a ref that means something already keeps
// its meaning: the answer may be older than that. A question that was given up
// pins nothing: who asked may have been told something newer since.
func (s *Store) pin(ctx context.Context, m *artifact.Manifest, replace bool) (*artifact.Manifest, error) {
	select {
	case s.recording <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("pin %s: %w", m.Ref, context.Cause(ctx))
	}
	now, found := s.pinned(m.Ref)
	var err error
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("pin %s: %w", m.Ref, context.Cause(ctx))
	case found && !replace:
	default:
		now, err = m, s.pinRecord(m)
	}
	<-s.recording
	if err != nil {
		return nil, err
	}
	// What the ref meant before may have lost the ref that opened it.
	if err := s.reviewViews(); err != nil {
		return nil, fmt.Errorf("pin %s: %w", m.Ref, err)
	}
	s.notify()
	return now, nil
}

// pinRecord writes the record; the caller has s.recording.
func (s *Store) pinRecord(m *artifact.Manifest) error {
	m = s.withKnownAccess(m)
	data, err := m.Encode()
	if err != nil {
		return err
	}
	s.mu.Lock()
	old := s.refs[m.Ref]
	s.mu.Unlock()
	if old != nil && old.Digest != m.Digest {
		err := s.fs.Link(s.recordPath(m.Ref), s.supersededPath(old))
		if err != nil && !isExist(err) && !notExist(err) {
			return fmt.Errorf("pin %s: %w", m.Ref, err)
		}
		s.mu.Lock()
		if r := s.artifacts[old.Digest]; r != nil {
			r.m, r.old[m.Ref] = old, true
		}
		s.mu.Unlock()
		if err := s.fs.SyncDir(s.path(refsDir)); err != nil {
			return fmt.Errorf("pin %s: %w", m.Ref, err)
		}
	}
	// A record that says the same already keeps its time, which tells clients
	// since when the ref means that.
	if same, err := s.says(m.Ref, data); err != nil || !same {
		if err := s.writeRecord(m, data); err != nil {
			return fmt.Errorf("pin %s: %w", m.Ref, err)
		}
	}
	s.mu.Lock()
	s.refs[m.Ref] = m
	s.addRecordLocked(m)
	s.mu.Unlock()
	return s.agree(m)
}

// writeRecord writes the record of a ref. Where only the sync of its name
// failed the next start would find the new record, so it counts once the
// directory can be synced after all.
func (s *Store) writeRecord(m *artifact.Manifest, data []byte) error {
	err := durable.WriteFile(s.fs, s.recordPath(m.Ref), data, 0o600)
	if err == nil {
		return nil
	}
	held, readErr := durable.ReadFile(s.fs, s.recordPath(m.Ref), artifact.MaxManifestBytes)
	if readErr != nil || !bytes.Equal(held, data) || s.fs.SyncDir(s.path(refsDir)) != nil {
		return err
	}
	return nil
}

// says reports whether the record of a ref holds just these bytes and is known
// to be durable.
func (s *Store) says(ref artifact.Ref, data []byte) (bool, error) {
	known, found := s.pinned(ref)
	if !found {
		return false, nil
	}
	if known, err := known.Encode(); err != nil || !bytes.Equal(known, data) {
		return false, err
	}
	held, err := durable.ReadFile(s.fs, s.recordPath(ref), artifact.MaxManifestBytes)
	return err == nil && bytes.Equal(held, data), err
}

// pinned gives the manifest of a ref.
func (s *Store) pinned(ref artifact.Ref) (*artifact.Manifest, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, found := s.refs[ref]
	return m, found
}

// markReady records durably that the artifact's structure was found right.
// Where a file was found damaged meanwhile it fails with ErrNotReady: its links
// in views are to come first.
func (s *Store) markReady(digest artifact.Digest) error {
	if err := s.fs.settle(); err != nil {
		return fmt.Errorf("mark artifact %s: %w", digest.Short(), err)
	}
	marker := s.path(readyDir, digest.String())
	if err := durable.WriteFile(s.fs, marker, nil, 0o600); err != nil {
		return err
	}
	s.mu.Lock()
	r := s.artifacts[digest]
	complete := r != nil && len(s.missingLocked(r.m)) == 0
	if complete {
		r.checked = true
		r.lastUsed = s.now()
		s.turnLocked(r)
	}
	s.mu.Unlock()
	if !complete {
		return errors.Join(fmt.Errorf("mark artifact %s: %w: a file was found damaged meanwhile", digest.Short(), ErrNotReady), s.removeSynced(marker))
	}
	s.notify()
	return nil
}

// Manifests lists what every ref is pinned to, sorted by ref.
func (s *Store) Manifests() []*artifact.Manifest {
	s.mu.Lock()
	list := make([]*artifact.Manifest, 0, len(s.refs))
	for _, m := range s.refs {
		list = append(list, m)
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b *artifact.Manifest) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	return list
}

// Ready reports whether every file of the artifact is verified and its
// structure was found right.
func (s *Store) Ready(digest artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.readyLocked(digest)
}

func (s *Store) readyLocked(digest artifact.Digest) bool {
	select {
	case <-s.lost:
		return false
	default:
	}
	r := s.artifacts[digest]
	return r != nil && r.checked && !r.evicting && len(s.missingLocked(r.m)) == 0
}

// missingLocked lists the files of a manifest that are not committed, each
// digest once, in the order of the manifest.
func (s *Store) missingLocked(m *artifact.Manifest) []artifact.File {
	var missing []artifact.File
	seen := map[artifact.Digest]bool{}
	for _, f := range m.Files {
		if _, found := s.blobs[f.SHA256]; !found && !seen[f.SHA256] {
			seen[f.SHA256] = true
			missing = append(missing, f)
		}
	}
	return missing
}
