package weightcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Views are what engines mount: directories 0755 with hard links to the
// verified files (0444), readable by any uid. A view is made in a private
// place and appears by one rename; later files join it link by link.
const (
	flatKind = "flat"
	hubKind  = "hub"
	// cacheTag marks a hub cache for backup programs (bford.info/cachedir).
	cacheTag = "Signature: 8a477f597d28d172789f06886806bc55\n" +
		"# This file is a cache directory tag of a hub cache published by Hearth.\n"
	// treeFormat is the version of trees/COMMIT.json that huggingface_hub 2.4.0 writes.
	treeFormat = 1
)

func (s *Store) viewPath(kind string, digest artifact.Digest) string {
	return filepath.Join(s.views, kind, digest.String())
}

// FlatView publishes a directory that holds the artifact's files at their
// paths and gives its path. Files that are not verified yet are absent and
// join when they are; calling again is cheap. Errors wrap ErrUnknown,
// ErrRestricted, or ErrNotReady while a metadata file is missing.
func (s *Store) FlatView(digest artifact.Digest) (string, error) {
	dir := s.viewPath(flatKind, digest)
	err := s.publishAll(digest, flatKind, artifact.Ref{}, "", func(m *artifact.Manifest, present map[artifact.Digest]bool) error {
		return s.publish(dir, func(root string) error {
			for _, f := range m.Files {
				if !present[f.SHA256] {
					continue
				}
				if err := s.linkInto(root, f.Path, f.SHA256); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		return "", fmt.Errorf("publish flat view of %s: %w", digest.Short(), classified(err))
	}
	return dir, nil
}

// publishAll publishes the files there are as a view, and again where some came
// or went meanwhile: a file that lands beside a publication is in the view, and
// one found damaged beside it is not. What lands after the first pass finds the
// view noted and joins at the end of its pull.
func (s *Store) publishAll(digest artifact.Digest, kind string, ref artifact.Ref, commit string,
	publish func(m *artifact.Manifest, present map[artifact.Digest]bool) error,
) error {
	defer s.publishing(digest)()
	for first := true; ; first = false {
		m, present, damages, err := s.viewFiles(digest)
		if err == nil {
			err = s.viewAllowed(digest, kind, ref)
		}
		if err != nil {
			return err
		}
		if err := publish(m, present); err != nil {
			return err
		}
		if err := s.viewed(digest, kind, ref, commit); err != nil {
			return err
		}
		_, after, damagesAfter, err := s.viewFiles(digest)
		if err != nil {
			return err
		}
		if err := s.viewAllowed(digest, kind, ref); err != nil {
			// It was restricted meanwhile, perhaps before the view stood.
			return errors.Join(err, s.reviewViews())
		}
		if damages == damagesAfter && (!first || maps.Equal(present, after)) {
			return nil
		}
		if damages != damagesAfter {
			// A link made before the damage was found may point to it.
			for _, f := range m.Files {
				if err := s.unlinkFromViews(f.SHA256); err != nil {
					return err
				}
			}
		}
	}
}

// publishing lets one caller at a time publish views of an artifact, until end:
// two that made the same view would take its inodes twice, and the loser's
// would come back only after the winner has said that the view stands.
func (s *Store) publishing(digest artifact.Digest) (end func()) {
	for {
		s.mu.Lock()
		other := s.publications[digest]
		if other == nil {
			own := make(chan struct{})
			s.publications[digest] = own
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				delete(s.publications, digest)
				s.mu.Unlock()
				close(own)
			}
		}
		s.mu.Unlock()
		<-other // work on the drive alone
	}
}

// HubView publishes a self-contained hub cache (for HF_HUB_CACHE) that holds
// one repository, and gives the cache's root. The layout is that of
// huggingface_hub 2.4.0. Errors wrap ErrUnknown, ErrRestricted, ErrNotReady while
// a metadata file is missing, and artifact.ErrInvalid for a ref that is not a hub's.
func (s *Store) HubView(m *artifact.Manifest) (string, error) {
	repo := m.Ref.HubName()
	if repo == "" {
		return "", fmt.Errorf("publish hub view of %s: %w: only hub refs have one", m.Ref, artifact.ErrInvalid)
	}
	root := s.viewPath(hubKind, m.Digest)
	err := s.publishAll(m.Digest, hubKind, m.Ref, m.Commit, func(_ *artifact.Manifest, present map[artifact.Digest]bool) error {
		err := s.publish(root, func(root string) error {
			return s.writeIfAbsent(filepath.Join(root, "CACHEDIR.TAG"), []byte(cacheTag))
		})
		if err != nil {
			return err
		}
		return s.publish(filepath.Join(root, repo), func(dir string) error { return s.fillRepo(dir, m, present) })
	})
	if err != nil {
		return "", fmt.Errorf("publish hub view of %s: %w", m.Ref, classified(err))
	}
	return root, nil
}

// viewFiles gives the manifest, which of its files are verified, and how much
// damage was found in the store so far.
func (s *Store) viewFiles(digest artifact.Digest) (*artifact.Manifest, map[artifact.Digest]bool, int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.artifacts[digest]
	if r == nil || r.evicting {
		return nil, nil, 0, fmt.Errorf("artifact %s: %w", digest.Short(), ErrUnknown)
	}
	present := map[artifact.Digest]bool{}
	for _, f := range r.m.Files {
		_, found := s.blobs[f.SHA256]
		if !found && f.Kind == artifact.Metadata {
			return nil, nil, 0, fmt.Errorf("artifact %s: %w: file %s is missing", digest.Short(), ErrNotReady, f.Path)
		}
		present[f.SHA256] = found
	}
	return r.m, present, s.damages, nil
}

// viewed notes that a view exists, and which ref a hub view holds.
func (s *Store) viewed(digest artifact.Digest, kind string, ref artifact.Ref, commit string) error {
	s.mu.Lock()
	r := s.artifacts[digest]
	gone := r == nil || r.evicting
	if !gone {
		r.views[kind] = true
		if kind == hubKind {
			r.hubRefs[ref] = commit
		}
	}
	s.mu.Unlock()
	if gone {
		return errors.Join(fmt.Errorf("publish view of %s: %w", digest.Short(), ErrUnknown), s.removeViews(digest))
	}
	return nil
}

// publish fills an existing directory, or a private one that one rename makes
// visible.
func (s *Store) publish(dir string, fill func(dir string) error) error {
	if _, err := s.fs.Lstat(dir); err == nil {
		return fill(dir)
	}
	if err := s.mkdirs(s.views, filepath.Dir(dir)); err != nil {
		return err
	}
	temp := durable.TempName(filepath.Join(s.views, filepath.Base(dir)))
	err := s.mkdir(temp)
	if err == nil {
		err = fill(temp)
	}
	if err == nil {
		err = s.fs.Rename(temp, dir)
	}
	if err != nil {
		err = errors.Join(err, s.fs.RemoveAll(temp))
		if isExist(err) {
			return fill(dir) // another caller published it meanwhile
		}
		return err
	}
	return s.fs.SyncDir(filepath.Dir(dir))
}

// mkdir makes a directory 0755 whatever the umask.
func (s *Store) mkdir(dir string) error {
	if err := s.fs.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return s.fs.Chmod(dir, 0o755)
}

// mkdirs makes the directories between root, which exists, and dir.
func (s *Store) mkdirs(root, dir string) error {
	rel, err := filepath.Rel(root, dir)
	if err != nil || rel == "." {
		return err
	}
	for name := range strings.SplitSeq(rel, string(filepath.Separator)) {
		parent := root
		root = filepath.Join(root, name)
		if _, err := s.fs.Lstat(root); err == nil {
			continue
		}
		if err := s.mkdir(root); err != nil && !isExist(err) {
			return err
		}
		if err := s.fs.SyncDir(parent); err != nil {
			return err
		}
	}
	return nil
}

// linkInto links a verified file to a slash separated path below root.
func (s *Store) linkInto(root, path string, sha artifact.Digest) error {
	to := filepath.Join(root, filepath.FromSlash(path))
	if there, err := s.fs.Lstat(to); err == nil {
		blob, err := s.fs.Lstat(s.blobPath(sha))
		if err != nil || durable.SameFile(there, blob) {
			return err
		}
		// A link to bytes that were taken out and could not be unlinked then.
		if err := s.removeSynced(to); err != nil {
			return err
		}
	}
	if err := s.mkdirs(root, filepath.Dir(to)); err != nil {
		return err
	}
	if err := s.fs.Link(s.blobPath(sha), to); err != nil && !isExist(err) {
		return err
	}
	return s.fs.SyncDir(filepath.Dir(to))
}

// writeIfAbsent writes a world-readable file once.
func (s *Store) writeIfAbsent(path string, data []byte) error {
	if _, err := s.fs.Lstat(path); err == nil {
		return nil
	}
	return durable.WriteFile(s.fs, path, data, 0o644)
}

// treeEntry is one file in trees/COMMIT.json.
type treeEntry struct {
	Size      int64  `json:"size"`
	BlobID    string `json:"blob_id"`
	LFSSHA256 string `json:"lfs_sha256,omitempty"`
	LFSSize   int64  `json:"lfs_size,omitempty"`
}

// etag is the name of a file's blob in a hub cache.
func etag(f artifact.File) string {
	if f.LFS || f.GitSHA1 == "" {
		return f.SHA256.String()
	}
	return f.GitSHA1
}

// fillRepo writes what is missing of one repository's folder.
func (s *Store) fillRepo(dir string, m *artifact.Manifest, present map[artifact.Digest]bool) error {
	snapshot := filepath.Join(dir, "snapshots", m.Commit)
	if err := s.mkdirs(dir, filepath.Join(dir, "blobs")); err != nil {
		return err
	}
	if err := s.mkdirs(dir, snapshot); err != nil {
		return err
	}
	for _, f := range m.Files {
		if !present[f.SHA256] {
			continue
		}
		if err := s.linkInto(filepath.Join(dir, "blobs"), etag(f), f.SHA256); err != nil {
			return err
		}
		link := filepath.Join(snapshot, filepath.FromSlash(f.Path))
		if _, err := s.fs.Lstat(link); err == nil {
			continue
		}
		if err := s.mkdirs(snapshot, filepath.Dir(link)); err != nil {
			return err
		}
		// snapshots/COMMIT is two below the repository, and each folder of the
		// path is one more.
		up := strings.Repeat("../", 2+strings.Count(f.Path, "/"))
		if err := s.fs.Symlink(up+"blobs/"+etag(f), link); err != nil && !isExist(err) {
			return err
		}
		if err := s.fs.SyncDir(filepath.Dir(link)); err != nil {
			return err
		}
	}
	tree := struct {
		Version int                  `json:"format_version"`
		Files   map[string]treeEntry `json:"files"`
	}{treeFormat, map[string]treeEntry{}}
	for _, f := range m.Files {
		e := treeEntry{Size: f.Size, BlobID: f.GitSHA1}
		if f.LFS {
			e.LFSSHA256, e.LFSSize = f.SHA256.String(), f.Size
		}
		if e.BlobID == "" {
			e.BlobID = etag(f)
		}
		tree.Files[f.Path] = e
	}
	data, err := json.MarshalIndent(tree, "", " ")
	if err != nil {
		return err
	}
	if err := s.mkdirs(dir, filepath.Join(dir, "trees")); err != nil {
		return err
	}
	if err := s.writeIfAbsent(filepath.Join(dir, "trees", m.Commit+".json"), data); err != nil {
		return err
	}
	if m.Ref.Revision == m.Commit {
		return nil
	}
	ref := filepath.Join(dir, "refs", filepath.FromSlash(m.Ref.Revision))
	if err := s.mkdirs(dir, filepath.Dir(ref)); err != nil {
		return err
	}
	old, err := durable.ReadFile(s.fs, ref, 256)
	if err == nil && string(old) == m.Commit {
		return nil
	}
	return durable.WriteFile(s.fs, ref, []byte(m.Commit), 0o644)
}

// refreshViews adds files that were verified since to the views there are.
func (s *Store) refreshViews(digest artifact.Digest) error {
	s.mu.Lock()
	r := s.artifacts[digest]
	if r == nil {
		s.mu.Unlock()
		return nil
	}
	kinds := slices.Collect(maps.Keys(r.views))
	var manifests []*artifact.Manifest
	for _, m := range s.refs {
		if m.Digest == digest {
			manifests = append(manifests, m)
		}
	}
	s.mu.Unlock()
	var err error
	for _, kind := range kinds {
		if kind == flatKind {
			_, viewErr := s.FlatView(digest)
			err = errors.Join(err, unlessRestricted(viewErr))
			continue
		}
		for _, m := range manifests {
			if m.Ref.HubName() != "" {
				_, viewErr := s.HubView(m)
				err = errors.Join(err, unlessRestricted(viewErr))
			}
		}
	}
	return err
}

// removeViews takes the views of an artifact away.
func (s *Store) removeViews(digest artifact.Digest) error {
	var err error
	for _, kind := range []string{flatKind, hubKind} {
		dir := s.viewPath(kind, digest)
		if _, statErr := s.fs.Lstat(dir); notExist(statErr) {
			continue
		}
		err = errors.Join(err, s.vanish(dir))
	}
	return err
}

// unlinkFromViews removes every link to a damaged file, durably: beside a new
// file of the same digest the old link would be taken for one to that. The links
// come back with refreshViews.
func (s *Store) unlinkFromViews(sha artifact.Digest) error {
	s.mu.Lock()
	type place struct {
		digest artifact.Digest
		file   artifact.File
	}
	var places []place
	for digest, r := range s.artifacts {
		for _, f := range r.m.Files {
			if f.SHA256 == sha && len(r.views) > 0 {
				places = append(places, place{digest, f})
			}
		}
	}
	s.mu.Unlock()
	var err error
	for _, p := range places {
		err = errors.Join(err, s.unlink(filepath.Join(s.viewPath(flatKind, p.digest), filepath.FromSlash(p.file.Path))))
		root := s.viewPath(hubKind, p.digest)
		repos, readErr := s.fs.ReadDir(root)
		if readErr != nil && !notExist(readErr) {
			err = errors.Join(err, readErr)
		}
		for _, repo := range repos {
			if repo.IsDir() {
				for _, name := range []string{p.file.SHA256.String(), p.file.GitSHA1} {
					if name != "" {
						err = errors.Join(err, s.unlink(filepath.Join(root, repo.Name(), "blobs", name)))
					}
				}
			}
		}
	}
	return err
}

// unlink removes a name durably where it is there.
func (s *Store) unlink(path string) error {
	if _, err := s.fs.Lstat(path); notExist(err) {
		return nil
	}
	return s.removeSynced(path)
}

// loadViews notes the published views and clears those that belong to no
// artifact or were never published.
func (s *Store) loadViews() error {
	entries, err := s.fs.ReadDir(s.views)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(s.views, e.Name())
		if durable.IsTemp(e.Name()) {
			if err := s.fs.RemoveAll(path); err != nil {
				return err
			}
			continue
		}
		if e.Name() != flatKind && e.Name() != hubKind {
			continue
		}
		views, err := s.fs.ReadDir(path)
		if err != nil {
			return err
		}
		for _, v := range views {
			digest, err := artifact.ParseDigest(v.Name())
			if r := s.artifacts[digest]; err == nil && r != nil {
				r.views[e.Name()] = true
				continue
			}
			if err := s.fs.RemoveAll(filepath.Join(path, v.Name())); err != nil {
				return err
			}
		}
	}
	return s.checkViews()
}

// checkViews takes links to files that are no longer in the store out of the
// views: a discard may have been interrupted between the two.
func (s *Store) checkViews() error {
	var err error
	for _, r := range s.artifacts {
		for _, f := range s.missingLocked(r.m) {
			err = errors.Join(err, s.unlinkFromViews(f.SHA256))
		}
	}
	return err
}

// viewDirs gives the directories published for a ref, sorted. A hub view counts
// once it is known to hold the ref at its commit.
func (s *Store) viewDirs(m *artifact.Manifest, r *record) []string {
	var dirs []string
	for kind := range r.views {
		if commit, held := r.hubRefs[m.Ref]; kind != hubKind || held && commit == m.Commit {
			dirs = append(dirs, s.viewPath(kind, m.Digest))
		}
	}
	slices.Sort(dirs)
	return dirs
}
