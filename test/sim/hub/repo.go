package hub

import (
	"crypto/sha1" // git names its objects by SHA-1
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"sync"
	"time"
)

// lfsSize is the size in bytes from which any file is kept outside git, as the
// hub does.
const lfsSize = 10 << 20

var lfsSuffixes = []string{".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack"}

// isLFS says whether the hub would keep the file outside git.
func isLFS(name string, size int64) bool {
	for _, s := range lfsSuffixes {
		if strings.HasSuffix(name, s) {
			return true
		}
	}
	return size >= lfsSize
}

// entry is one file of a commit.
type entry struct {
	path   string
	size   int64
	mtime  time.Time
	sha256 string // of the content, 64 hex digits
	oid    string // git blob id of the content or of the LFS pointer
	lfs    bool
	file   string // where the bytes are
}

// etag is the name of the blob: sha256 of LFS files, git id of others.
func (e entry) etag() string {
	if e.lfs {
		return e.sha256
	}
	return e.oid
}

// pointer is the text that git holds in place of an LFS file.
func (e entry) pointer() string {
	return fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", e.sha256, e.size)
}

// commit is one immutable listing.
type commit struct {
	id    string
	files []entry // sorted by path
}

func (c *commit) find(name string) (entry, bool) {
	i := sort.Search(len(c.files), func(i int) bool { return c.files[i].path >= name })
	if i < len(c.files) && c.files[i].path == name {
		return c.files[i], true
	}
	return entry{}, false
}

// hashes of one file's content.
type hashes struct{ sha256, git string }

type hashKey struct {
	path  string
	size  int64
	mtime int64 // nanoseconds
}

// hashCache remembers digests by path, size and mtime; entries of changed
// files stay until the process ends, which a simulator affords.
type hashCache struct {
	mu sync.Mutex
	m  map[hashKey]hashes
}

func (c *hashCache) of(file string, info fs.FileInfo) (hashes, error) {
	key := hashKey{file, info.Size(), info.ModTime().UnixNano()}
	c.mu.Lock()
	h, ok := c.m[key]
	c.mu.Unlock()
	if ok {
		return h, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return hashes{}, fmt.Errorf("hash file: %w", err)
	}
	defer func() { _ = f.Close() }()
	wide, git := sha256.New(), sha1.New() // git names its objects by SHA-1
	_, _ = fmt.Fprintf(git, "blob %d\x00", info.Size())
	dst := io.Writer(wide)
	if !isLFS(file, info.Size()) {
		dst = io.MultiWriter(wide, git)
	}
	if _, err := io.Copy(dst, f); err != nil {
		return hashes{}, fmt.Errorf("hash file: %w", err)
	}
	h = hashes{sha256: hex.EncodeToString(wide.Sum(nil)), git: hex.EncodeToString(git.Sum(nil))}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[hashKey]hashes{}
	}
	c.m[key] = h
	return h, nil
}

var errAbsent = errors.New("absent")

// revisions lists the folders of a repository by revision; errAbsent if none.
func (o *Origin) revisions(repo string) (map[string]string, error) {
	if path.Clean("/"+repo) != "/"+repo {
		return nil, errAbsent
	}
	parent := filepath.Join(o.opts.Dir, filepath.FromSlash(path.Dir(repo)))
	names, err := os.ReadDir(parent)
	if err != nil {
		return nil, errAbsent
	}
	out := map[string]string{}
	for _, d := range names {
		name, rev, tagged := strings.Cut(d.Name(), "@")
		if name != path.Base(repo) || !d.IsDir() {
			continue
		}
		if !tagged {
			rev = "main"
		} else if rev, err = url.PathUnescape(rev); err != nil {
			continue
		}
		out[rev] = filepath.Join(parent, d.Name())
	}
	if len(out) == 0 {
		return nil, errAbsent
	}
	return out, nil
}

// scan lists one folder as a commit.
func (o *Origin) scan(dir string) (*commit, error) {
	c := &commit{}
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return fmt.Errorf("scan repository: %w", err)
		}
		if !info.Mode().IsRegular() {
			return nil
		}
		rel, err := filepath.Rel(dir, file)
		if err != nil {
			return fmt.Errorf("scan repository: %w", err)
		}
		h, err := o.hashes.of(file, info)
		if err != nil {
			return err
		}
		e := entry{path: filepath.ToSlash(rel), size: info.Size(), mtime: info.ModTime(), sha256: h.sha256, oid: h.git, lfs: isLFS(rel, info.Size()), file: file}
		if e.lfs {
			e.oid = gitID(e.pointer())
		}
		c.files = append(c.files, e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	sort.Slice(c.files, func(i, j int) bool { return c.files[i].path < c.files[j].path })
	sum := sha1.New() // commit ids are 40 hex digits
	for _, e := range c.files {
		_, _ = fmt.Fprintf(sum, "%s %d %s\n", e.sha256, e.size, e.path)
	}
	c.id = hex.EncodeToString(sum.Sum(nil))
	return c, nil
}

// lookup finds the commit that rev names: a branch, a tag, a commit id, or
// HEAD for main.
func (o *Origin) lookup(repo, rev string) (*commit, error) {
	revs, err := o.revisions(repo)
	if err != nil {
		return nil, err
	}
	if rev == "HEAD" {
		rev = "main"
	}
	if dir, ok := revs[rev]; ok {
		return o.scan(dir)
	}
	for _, dir := range revs {
		c, err := o.scan(dir)
		if err != nil {
			return nil, err
		}
		if c.id == rev {
			return c, nil
		}
	}
	return nil, fmt.Errorf("revision %q: %w", rev, fs.ErrNotExist)
}

// Commit returns the commit id that a revision of a repository has now.
func (o *Origin) Commit(repo, rev string) (string, error) {
	c, err := o.lookup(repo, rev)
	if err != nil {
		return "", fmt.Errorf("find commit of %s: %w", repo, err)
	}
	return c.id, nil
}

var tagName = regexp.MustCompile(`^v[0-9]`)

// gitID is the git blob id of a text.
func gitID(text string) string {
	sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(text), text)) // git names its objects by SHA-1
	return hex.EncodeToString(sum[:])
}
