package weightcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// version is one immutable meaning of a ref at the origin.
type version struct {
	commit string
	files  map[string][]byte
	noSHA  map[string]bool
}

func newVersion(name string, files map[string][]byte) *version {
	return &version{commit: gitSHA1([]byte(name)), files: files, noSHA: map[string]bool{"config.json": true}}
}

func (v *version) listing(ref artifact.Ref) *artifact.Listing {
	l := &artifact.Listing{Ref: ref, Source: "origin", Commit: v.commit}
	for _, path := range slices.Sorted(maps.Keys(v.files)) {
		data := v.files[path]
		f := artifact.File{Path: path, Size: int64(len(data)), GitSHA1: gitSHA1(data)}
		if !v.noSHA[path] {
			f.SHA256, f.LFS = sha256.Sum256(data), artifact.KindOf(path) == artifact.Weights
		}
		l.Files = append(l.Files, f)
	}
	return l
}

// digest is the artifact digest, from the bytes alone.
func (v *version) digest() artifact.Digest {
	var files []artifact.File
	for _, path := range slices.Sorted(maps.Keys(v.files)) {
		files = append(files, artifact.File{Path: path, Size: int64(len(v.files[path])), SHA256: sha256.Sum256(v.files[path])})
	}
	return artifact.ComputeDigest(files)
}

// origin serves several refs, each of which may move.
type origin struct {
	mu     sync.Mutex
	means  map[string]*version // ref name -> what it means now
	known  map[string]*version // by commit
	served int64
	cut    int64 // bytes after which every body breaks; 0 = never
}

func (o *origin) Name() string { return "origin" }

func (o *origin) set(ref artifact.Ref, v *version) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.means[ref.Name], o.known[v.commit] = v, v
}

func (o *origin) Resolve(_ context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	v := o.means[ref.Name]
	if v == nil {
		return nil, &source.Error{Source: "origin", Op: "resolve", What: ref.String(), Status: 404, Err: source.ErrNotFound}
	}
	return v.listing(ref), nil
}

func (o *origin) Open(_ context.Context, l *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.cut > 0 && o.served+n > o.cut {
		return nil, &source.Error{Source: "origin", Op: "open", What: f.Path, Err: source.ErrForbidden}
	}
	o.served += n
	return io.NopCloser(bytes.NewReader(o.known[l.Commit].files[f.Path][off : off+n])), nil
}

func (o *origin) bytes() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.served
}

// promise is what the store said about a ref, by the calls that returned. It
// is kept apart from the store: a crash may not break it.
type promise struct {
	// may are the commits that the ref may be pinned to; "": to none.
	may map[string]bool
	// whole are those of may that are Ready where the ref is pinned to them.
	whole map[string]bool
	// before is the version that a refresh replaces: whole until the next is.
	before *version
	// views are the kinds of view that were published of shown, whole.
	views map[string]bool
	shown string
}

// world is a store on a crashable drive, its origin, and the ledger of what the
// store promised.
type world struct {
	fs      *durabletest.FS
	origin  *origin
	options func(*Options)
	boot    string
	store   *Store
	puller  *Puller
	ledger  map[artifact.Ref]*promise
	// damaged are the files whose bytes a test turned, and that no
	// verification has returned for.
	damaged map[artifact.Digest]bool
}

const worldDir = "/var/weights"

func newWorld(options func(*Options)) (*world, error) {
	w := &world{
		fs: durabletest.New(), options: options, boot: "first", ledger: map[artifact.Ref]*promise{}, damaged: map[artifact.Digest]bool{},
		origin: &origin{means: map[string]*version{}, known: map[string]*version{}},
	}
	return w, errors.Join(w.fs.MkdirAll("/var", 0o755), w.fs.SyncDir("/"))
}

// after is the same world on another state of the drive, one boot later.
func (w *world) after(fsys *durabletest.FS, boot string) *world {
	next := &world{fs: fsys, options: w.options, boot: boot, origin: &origin{means: maps.Clone(w.origin.means), known: maps.Clone(w.origin.known)}}
	next.ledger, next.damaged = map[artifact.Ref]*promise{}, maps.Clone(w.damaged)
	for ref, p := range w.ledger {
		next.ledger[ref] = &promise{may: maps.Clone(p.may), whole: maps.Clone(p.whole), before: p.before, views: maps.Clone(p.views), shown: p.shown}
	}
	return next
}

func (w *world) open() error {
	o := Options{Dir: worldDir, FS: w.fs, Boot: w.boot}
	if w.options != nil {
		w.options(&o)
	}
	store, err := Open(o)
	if err != nil {
		return err
	}
	w.store = store
	w.puller, err = NewPuller(PullerOptions{
		Store: store, Sources: []Rule{{Source: w.origin, Refs: []string{"acme/*"}}}, SegmentSize: testSegment, Streams: 2,
		RetryBase: time.Millisecond, RetryMax: time.Millisecond, Attempts: 1, ScrubEvery: -1,
	})
	return err
}

func (w *world) close() error {
	return errors.Join(w.puller.Wait(context.Background()), w.store.Close())
}

func (w *world) promise(ref artifact.Ref) *promise {
	if w.ledger[ref] == nil {
		w.ledger[ref] = &promise{may: map[string]bool{"": true}, whole: map[string]bool{}, views: map[string]bool{}}
	}
	return w.ledger[ref]
}

// pull ensures a ref that means v; victims are the refs that it may evict.
func (w *world) pull(ref artifact.Ref, v *version, victims ...artifact.Ref) error {
	w.origin.set(ref, v)
	p := w.promise(ref)
	p.may[v.commit] = true
	for _, victim := range victims {
		w.promise(victim).whole, w.promise(victim).views = map[string]bool{}, map[string]bool{}
	}
	m, err := w.puller.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		return err
	}
	p.may, p.whole = map[string]bool{m.Commit: true}, map[string]bool{m.Commit: true}
	return nil
}

// refresh moves a ref to v.
func (w *world) refresh(ref artifact.Ref, v *version) error {
	p := w.promise(ref)
	for commit := range p.may {
		p.before = w.origin.known[commit]
	}
	w.origin.set(ref, v)
	p.may[v.commit] = true
	if _, err := w.puller.Ensure(context.Background(), ref, EnsureOptions{Refresh: true}); err != nil {
		return err
	}
	p.may, p.whole, p.before, p.views = map[string]bool{v.commit: true}, map[string]bool{v.commit: true}, nil, map[string]bool{}
	return nil
}

// view publishes both views.
func (w *world) view(ref artifact.Ref) error {
	m, found := w.store.pinned(ref)
	if !found {
		return ErrUnknown
	}
	if _, err := w.store.FlatView(m.Digest); err != nil {
		return err
	}
	w.promise(ref).shown = m.Commit
	w.promise(ref).views[flatKind] = true
	if _, err := w.store.HubView(m); err != nil {
		return err
	}
	w.promise(ref).views[hubKind] = true
	return nil
}

func (w *world) remove(ref artifact.Ref) error {
	p := w.promise(ref)
	p.may[""] = true
	p.views = map[string]bool{}
	if err := w.puller.Remove(context.Background(), ref); err != nil {
		return err
	}
	p.may, p.whole = map[string]bool{"": true}, map[string]bool{}
	return nil
}

// damage turns a bit of a stored file.
func (w *world) damage(ref artifact.Ref, path string) error {
	m, found := w.store.pinned(ref)
	if !found {
		return ErrUnknown
	}
	f, _ := m.File(path)
	w.damaged[f.SHA256] = true
	return w.fs.Corrupt(w.store.blobPath(f.SHA256), f.Size/2)
}

// verify reads a ref's files again and takes the damaged ones out.
func (w *world) verify(ref artifact.Ref) error {
	for _, p := range w.ledger {
		p.whole, p.views = map[string]bool{}, map[string]bool{} // they may share the file
	}
	m, _ := w.store.pinned(ref)
	result, err := w.puller.Verify(context.Background(), ref)
	if err != nil {
		return err
	}
	for _, path := range result.Bad {
		f, _ := m.File(path)
		delete(w.damaged, f.SHA256)
	}
	return nil
}

// tree lists everything below a directory: mode, and content or target.
func (w *world) tree(root string) (map[string]string, error) {
	list := map[string]string{}
	entries, err := w.fs.ReadDir(root)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(root, e.Name())
		info, err := w.fs.Lstat(path)
		if err != nil {
			return nil, err
		}
		text := info.Mode().String()
		switch {
		case info.IsDir():
			below, err := w.tree(path)
			if err != nil {
				return nil, err
			}
			maps.Copy(list, below)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := w.fs.Readlink(path)
			if err != nil {
				return nil, err
			}
			text += " " + target
		default:
			data, err := durable.ReadFile(w.fs, path, 1<<30)
			if err != nil {
				return nil, err
			}
			text += fmt.Sprintf(" %d bytes %x", len(data), sha256.Sum256(data))
		}
		list[path] = text
	}
	return list, nil
}

// relative gives the part of a path below root.
func relative(root, path string) (string, bool) { return strings.CutPrefix(path, root+"/") }
