package weightcache

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// The archive is what testdata/README.md says.
const oldStoreArchive = "testdata/store-v1.tar.gz"

// unpackOldStore lays the recorded store out as it was, times, modes and links
// included, and gives the directory above it.
func unpackOldStore(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Open(oldStoreArchive)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(unzipped)
	dirTimes := map[string]time.Time{}
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := unpackEntry(dir, h, archive, dirTimes); err != nil {
			t.Fatal(err)
		}
	}
	for path, when := range dirTimes {
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func unpackEntry(dir string, h *tar.Header, content io.Reader, dirTimes map[string]time.Time) error {
	path := filepath.Join(dir, filepath.FromSlash(h.Name))
	switch h.Typeflag {
	case tar.TypeDir:
		dirTimes[path] = h.ModTime
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		return os.Chmod(path, fs.FileMode(h.Mode).Perm())
	case tar.TypeSymlink:
		return os.Symlink(h.Linkname, path)
	case tar.TypeLink:
		return os.Link(filepath.Join(dir, filepath.FromSlash(h.Linkname)), path)
	case tar.TypeReg:
		data, err := io.ReadAll(content)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
		if err := os.Chmod(path, fs.FileMode(h.Mode).Perm()); err != nil {
			return err
		}
		return os.Chtimes(path, h.ModTime, h.ModTime)
	}
	return fmt.Errorf("entry %s has type %c", h.Name, h.Typeflag)
}

// treeOf describes everything below a directory: type, mode, time and content.
func treeOf(t *testing.T, root string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		content := ""
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			if content, err = os.Readlink(path); err != nil {
				return err
			}
		case info.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = fmt.Sprintf("%d bytes %x", len(data), sha256.Sum256(data))
		}
		tree[path] = fmt.Sprintf("%v %v %s", info.Mode(), info.ModTime().UnixNano(), content)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func diffTrees(before, after map[string]string) []string {
	var diff []string
	for path, was := range before {
		if now, found := after[path]; !found {
			diff = append(diff, "gone: "+path)
		} else if now != was {
			diff = append(diff, "changed: "+path+": "+was+" -> "+now)
		}
	}
	for path := range after {
		if _, found := before[path]; !found {
			diff = append(diff, "new: "+path)
		}
	}
	slices.Sort(diff)
	return diff
}

// originFiles reads what the recorded origin served.
func originFiles(t *testing.T, dir, set string) map[string][]byte {
	t.Helper()
	root := filepath.Join(dir, "origin", set)
	files := map[string][]byte{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		files[filepath.ToSlash(rel)], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// oldRefs says which of the recorded sets each ref means.
var oldRefs = map[artifact.Ref]string{
	{Scheme: artifact.SchemeHub, Name: "acme/whole", Revision: "main"}:                                                     "whole",
	{Scheme: artifact.SchemeHub, Name: "acme/whole", Revision: "v1"}:                                                       "whole",
	{Scheme: artifact.SchemeHub, Name: "acme/moved", Revision: "main"}:                                                     "moved",
	{Scheme: artifact.SchemeDir, Name: "/models/plain"}:                                                                    "plain",
	{Scheme: artifact.SchemeHub, Name: "acme/partly", Revision: "main"}:                                                    "partly",
	{Scheme: artifact.SchemeHub, Name: "acme/" + strings.Repeat("n", 80), Revision: "feature/" + strings.Repeat("r", 120)}: "long",
}

// openOldStore opens the unpacked store with this code; its origin has only
// what the unfinished ref needs.
func openOldStore(t *testing.T, dir string) *rig {
	t.Helper()
	r := &rig{dir: dir, src: newMemSource(originFiles(t, dir, "partly"))}
	r.open(t, func(o *Options, p *PullerOptions) {
		o.Dir = dir + "/store"
		p.Sources = []Rule{{Source: r.src, Refs: []string{"acme/**", "/models/**"}}}
	})
	return r
}

func TestStoreOfVersionOneIsReadServedVerifiedAndItsPartialFileResumed(t *testing.T) {
	t.Parallel()
	dir := unpackOldStore(t)
	r := openOldStore(t, dir)
	if got := len(r.store.Manifests()); got != len(oldRefs) {
		t.Errorf("%d refs are known, want %d", got, len(oldRefs))
	}
	for ref, set := range oldRefs {
		st, _ := r.puller.Status(ref)
		if want := map[bool]State{true: Metadata, false: Ready}[set == "partly"]; st.State != want {
			t.Errorf("%s is %s (%s), want %s", ref, st.State, st.Detail, want)
		}
	}
	partly := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/partly", Revision: "main"}
	m, err := r.puller.Ensure(t.Context(), partly, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	shard, _ := m.File(shard1)
	if got, want := r.src.servedBytes(), shard.Size-3*testSegment; got != want {
		t.Errorf("resuming fetched %d bytes, want %d: three segments were there", got, want)
	}
	for range 2 {
		for ref, set := range oldRefs {
			checkOldRef(t, r, ref, originFiles(t, dir, set))
		}
		checkSupersededOfOldStore(t, r, originFiles(t, dir, "moved-before"))
		r.close(t)
		r = openOldStore(t, dir)
	}
	if r.src.resolves != 0 {
		t.Errorf("the origin was asked %d times what a pinned ref means", r.src.resolves)
	}
}

// checkOldRef reads every file of a ref, by reader and by view, and verifies it.
func checkOldRef(t *testing.T, r *rig, ref artifact.Ref, want map[string][]byte) {
	t.Helper()
	m, found := r.store.pinned(ref)
	if !found || !r.store.Ready(m.Digest) || len(m.Files) != len(want) {
		t.Fatalf("%s is not Ready with %d files", ref, len(want))
	}
	view, err := r.store.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range m.Files {
		got, err := readWhole(t.Context(), r.puller, m, f.Path)
		if err != nil || !bytes.Equal(got, want[f.Path]) {
			t.Errorf("%s: reader of %s gives %d bytes, %v", ref, f.Path, len(got), err)
		}
		if got, err = os.ReadFile(filepath.Join(view, f.Path)); err != nil || !bytes.Equal(got, want[f.Path]) {
			t.Errorf("%s: view of %s has %d bytes, %v", ref, f.Path, len(got), err)
		}
		chunks, err := r.store.Chunks(f.SHA256)
		if err != nil {
			t.Errorf("%s: chunks of %s: %v", ref, f.Path, err)
			continue
		}
		for i := range chunks {
			from := min(int64(i)*artifact.ChunkSize, f.Size)
			if err := artifact.CheckChunk(chunks, f.Size, i, want[f.Path][from:min(from+artifact.ChunkSize, f.Size)]); err != nil {
				t.Errorf("%s: chunk %d of %s: %v", ref, i, f.Path, err)
			}
		}
	}
	if result, err := r.puller.Verify(t.Context(), ref); err != nil || !result.OK() {
		t.Errorf("verify %s: %+v, %v", ref, result, err)
	}
}

// checkSupersededOfOldStore: what the moved ref meant before can still be leased.
func checkSupersededOfOldStore(t *testing.T, r *rig, want map[string][]byte) {
	t.Helper()
	files := []artifact.File{}
	for path, data := range want {
		files = append(files, artifact.File{Path: path, Size: int64(len(data)), SHA256: sha256.Sum256(data)})
	}
	slices.SortFunc(files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
	lease, err := r.store.Acquire(artifact.ComputeDigest(files))
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	view, err := r.store.FlatView(lease.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for path, data := range want {
		if got, err := os.ReadFile(filepath.Join(view, path)); err != nil || !bytes.Equal(got, data) {
			t.Errorf("superseded file %s has %d bytes, %v", path, len(got), err)
		}
	}
}

// readWhole reads a file through a Reader.
func readWhole(ctx context.Context, p *Puller, m *artifact.Manifest, path string) (data []byte, err error) {
	rd, err := p.Open(ctx, m, path, OpenOptions{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rd.Close()) }()
	return readAll(ctx, rd, 0, rd.Size())
}

// rewrite replaces text in a file and keeps its time.
func rewrite(t *testing.T, path, from, to string) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(data), from) {
		t.Fatalf("%s does not hold %q, %v", path, from, err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(data), from, to, 1)), info.Mode()); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestStoreWithAnythingOfANewerVersionIsRefusedAndNoByteOfItChanges(t *testing.T) {
	t.Parallel()
	next := fmt.Sprintf("%s%d\n", formatPrefix, FormatVersion+1)
	record := fmt.Sprintf(`"version": %d`, artifact.ManifestVersion+1)
	cases := map[string]func(t *testing.T, dir string){
		"format": func(t *testing.T, dir string) { rewrite(t, dir+"/store/FORMAT", formatPrefix+"1\n", next) },
		// A later layout need not have the folders of this one.
		"format and other folders": func(t *testing.T, dir string) {
			rewrite(t, dir+"/store/FORMAT", formatPrefix+"1\n", next)
			for _, name := range []string{"store/lock", "store/chunks", "store/ready", "store-views"} {
				if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
		},
		"record": func(t *testing.T, dir string) {
			rewrite(t, dir+"/store/refs/dir%3A%2F%2F%2Fmodels%2Fplain.json", `"version": 1`, record)
		},
		"superseded record": func(t *testing.T, dir string) {
			rewrite(t, dir+"/store/refs/hub%3A%2F%2Facme%2Fmoved%40main,old,572ab677c19b.json", `"version": 1`, record)
		},
		// What else a repair would move or remove must stay too.
		"record beside damage": func(t *testing.T, dir string) {
			rewrite(t, dir+"/store/refs/hub%3A%2F%2Facme%2Fwhole%40v1.json", `"version": 1`, record)
			rewrite(t, dir+"/store/refs/hub%3A%2F%2Facme%2Fmoved%40main.json", `"version"`, `"vErsion"`)
			for _, name := range []string{"store/refs/.tmp-1-1-x", "store/landing/stray", "store/ready/stray"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(os.RemoveAll(dir+"/store/chunks"), os.RemoveAll(dir+"/store-views")); err != nil {
				t.Fatal(err)
			}
		},
	}
	for name, raise := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := unpackOldStore(t)
			raise(t, dir)
			before := treeOf(t, dir)
			store, err := Open(Options{Dir: dir + "/store"})
			if err == nil {
				err = store.Close()
			}
			if !errors.Is(err, ErrNewer) {
				t.Errorf("Open: %v, want ErrNewer", err)
			}
			for _, line := range diffTrees(before, treeOf(t, dir)) {
				t.Error(line)
			}
		})
	}
}
