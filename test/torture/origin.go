package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// keptCommits is how many commits of a repository before the present one the
// origin still has; older ones are gone, as after a force-push.
const keptCommits = 6

// origin is a hub whose repositories change and that misbehaves as told. It
// remembers every commit it ever had, which is what served bytes are held
// against.
type origin struct {
	*hub.Origin
	dir string // of the repositories
	url string

	swap  sync.RWMutex // a listing sees one commit
	mu    sync.Mutex
	repos map[string]*repository
	// byID are all commits there ever were.
	byID  map[string]*commit
	blobs []*blob
	made  int // names for folders

	answering atomic.Int64

	sky   sync.Mutex // never held with another lock wanted
	rough weather
	dice  *rand.Rand // of the weather
}

// repository is one repository with its past.
type repository struct {
	name    string
	history []string // commits of main, oldest first
	kept    []string // folders of commits that main has left
}

// commit is what a commit holds.
type commit struct {
	id     string
	repo   string
	digest artifact.Digest
	files  map[string]*blob
}

// paths are the names of its files, sorted.
func (c *commit) paths() []string {
	var list []string
	for p := range c.files {
		list = append(list, p)
	}
	slices.Sort(list)
	return list
}

// size is the bytes of all its files, each as often as it is named.
func (c *commit) size() int64 {
	var n int64
	for _, b := range c.files {
		n += b.size
	}
	return n
}

// newOrigin serves repositories of the given names with a first commit each.
func newOrigin(ctx context.Context, r *rig.Rig, dir string, dice *rand.Rand, names []string) (*origin, error) {
	o := &origin{
		dir: filepath.Join(dir, "repositories"), repos: map[string]*repository{}, byID: map[string]*commit{},
		dice: rand.New(rand.NewPCG(dice.Uint64(), 1)),
	}
	for _, folder := range []string{o.dir, o.blobDir()} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, fmt.Errorf("make origin: %w", err)
		}
	}
	o.Origin = hub.New(hub.Options{Dir: o.dir, PageSize: 5, Redirect: hub.Redirects(dice.IntN(3))})
	o.SetFault(o.fault)
	for _, name := range names {
		o.repos[name] = &repository{name: name}
		if err := o.publish(dice, name); err != nil {
			return nil, err
		}
	}
	var err error
	if o.url, err = r.Serve(ctx, o.counted(http.HandlerFunc(o.serve))); err != nil {
		return nil, err
	}
	cdn, err := r.Serve(ctx, o.counted(o.CDN()))
	if err != nil {
		return nil, err
	}
	o.SetCDN(cdn)
	return o, nil
}

func (o *origin) blobDir() string { return filepath.Join(filepath.Dir(o.dir), "blobs") }

// counted counts the answers under way.
func (o *origin) counted(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o.answering.Add(1)
		defer o.answering.Add(-1)
		h.ServeHTTP(w, r)
	})
}

// rested waits until nothing more is sent to an agent that is gone, and gives
// the bytes sent in all.
func (o *origin) rested(ctx context.Context) (int64, error) {
	err := rig.Until(ctx, "the origin to come to rest", func(context.Context) (bool, error) { return o.answering.Load() == 0, nil })
	return o.Bytes(), err
}

// serve keeps main from moving in the middle of a listing. Bodies are not kept
// so: a file may be replaced between its listing and its bytes.
func (o *origin) serve(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/api/") {
		o.swap.RLock()
		defer o.swap.RUnlock()
	}
	o.ServeHTTP(w, r)
}

// publish moves main of a repository to a new commit: some files replaced, some
// taken from elsewhere, some gone, some new.
func (o *origin) publish(dice *rand.Rand, name string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	repo := o.repos[name]
	var last *commit
	if n := len(repo.history); n > 0 {
		last = o.byID[repo.history[n-1]]
	}
	files, err := o.composeLocked(dice, last)
	if err != nil {
		return err
	}
	o.made++
	rev := fmt.Sprintf("c%d", o.made)
	folder := filepath.Join(o.dir, name+"@"+rev)
	for path, b := range files {
		at := filepath.Join(folder, path)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return fmt.Errorf("publish commit: %w", err)
		}
		if err := os.Link(b.file, at); err != nil {
			return fmt.Errorf("publish commit: %w", err)
		}
	}
	id, err := o.Commit(name, rev)
	if err != nil {
		return fmt.Errorf("publish commit: %w", err)
	}
	c := &commit{id: id, repo: name, files: files}
	var list []artifact.File
	for path, b := range files {
		list = append(list, artifact.File{Path: path, Size: b.size, SHA256: b.sha})
	}
	c.digest = artifact.ComputeDigest(list)
	o.byID[id] = c
	o.swap.Lock()
	defer o.swap.Unlock()
	main := filepath.Join(o.dir, name)
	if last == nil {
		err = os.Rename(folder, main)
	} else {
		err = unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, main, unix.RENAME_EXCHANGE)
		repo.kept = append(repo.kept, folder)
	}
	if err != nil {
		return fmt.Errorf("publish commit: %w", err)
	}
	repo.history = append(repo.history, id)
	if len(repo.kept) > keptCommits {
		err = os.RemoveAll(repo.kept[0])
		repo.kept = repo.kept[1:]
	}
	return err
}

// composeLocked chooses the files of a commit after last.
func (o *origin) composeLocked(dice *rand.Rand, last *commit) (map[string]*blob, error) {
	files := map[string]*blob{}
	if last != nil {
		for _, path := range last.paths() {
			files[path] = last.files[path]
		}
	}
	for _, path := range names {
		if last != nil && dice.IntN(3) > 0 {
			continue
		}
		required := path == "config.json" || path == "model.safetensors"
		switch at := dice.IntN(8); {
		case at == 0 && !required:
			delete(files, path)
			continue
		case at <= 2 && len(o.blobs) > 0:
			// Equal bytes in several commits and repositories are one blob.
			if b := o.blobs[dice.IntN(len(o.blobs))]; b.tensors == strings.HasSuffix(path, ".safetensors") {
				files[path] = b
				continue
			}
		}
		b, err := makeBlob(dice, filepath.Join(o.blobDir(), fmt.Sprintf("b%d", len(o.blobs))), len(o.blobs), path)
		if err != nil {
			return nil, err
		}
		o.blobs = append(o.blobs, b)
		files[path] = b
	}
	return files, nil
}

// main gives the commits that main of a repository has had since the n-th, and
// the present number of commits.
func (o *origin) main(name string, n int) ([]string, int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	history := o.repos[name].history
	return slices.Clone(history[n:]), len(history)
}

// offered are the commits of a repository that the origin still has.
func (o *origin) offered(name string) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	history := o.repos[name].history
	return slices.Clone(history[max(0, len(history)-keptCommits):])
}

// commit finds what a commit held.
func (o *origin) commit(id string) *commit {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byID[id]
}

// byDigest finds a commit by its artifact.
func (o *origin) byDigest(digest string) *commit {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range o.byID {
		if c.digest.String() == digest {
			return c
		}
	}
	return nil
}

// weather is how the origin misbehaves: chances in a thousand per request.
type weather struct {
	cut, stall, status, drop, wrong, tag, whole, offset int
	down                                                bool
}

// setWeather changes how the origin behaves from here on.
func (o *origin) setWeather(w weather) {
	o.sky.Lock()
	defer o.sky.Unlock()
	o.rough = w
}

// someWeather is clear, rough or foul.
func someWeather(dice *rand.Rand) weather {
	switch dice.IntN(5) {
	case 0, 1:
		return weather{}
	case 2:
		return weather{cut: 60, status: 40, drop: 20, stall: 10}
	case 3:
		return weather{cut: 40, status: 40, drop: 20, stall: 10, tag: 20, whole: 20, offset: 20}
	}
	return weather{cut: 40, status: 20, wrong: 25, tag: 10, whole: 10}
}

// fault rolls for one request.
func (o *origin) fault(r *http.Request) *hub.Fault {
	o.sky.Lock()
	defer o.sky.Unlock()
	w := o.rough
	if w.down {
		return &hub.Fault{Drop: true}
	}
	hits := func(chance int) bool { return o.dice.IntN(1000) < chance }
	switch {
	case hits(w.drop):
		return &hub.Fault{Drop: true}
	case hits(w.status):
		status := []int{500, 502, 503, 504, 429}[o.dice.IntN(5)]
		return &hub.Fault{Status: status, Header: http.Header{"Retry-After": {"0"}}}
	case strings.HasPrefix(r.URL.Path, "/api/"):
		return nil
	case hits(w.cut):
		return &hub.Fault{CutAfter: 1 + o.dice.Int64N(int64(300*units.KiB))}
	case hits(w.stall):
		return &hub.Fault{StallAfter: 1 + o.dice.Int64N(int64(200*units.KiB))}
	case hits(w.wrong):
		return &hub.Fault{WrongBytes: true}
	case hits(w.tag):
		return &hub.Fault{ETag: fmt.Sprintf("%q", fmt.Sprint("other-", o.dice.Uint32()))}
	case hits(w.whole):
		return &hub.Fault{IgnoreRange: true}
	case hits(w.offset):
		return &hub.Fault{ContentRange: "bytes 5-9/77"}
	}
	return nil
}

// errStrange says that the agent named a commit that never was.
var errStrange = errors.New("no such commit ever was")
