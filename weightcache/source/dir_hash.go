package source

import (
	"context"
	"crypto/sha1" // git names its objects by SHA-1
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// sumKey identifies bytes that need not be read again.
type sumKey struct {
	path         string
	size         int64
	mtime, ctime int64 // nanoseconds
	inode        uint64
}

type sums struct {
	sha256 artifact.Digest
	git    string
}

// sumCache remembers digests. At maxSums entries it starts again from none,
// which costs reading time and never truth.
type sumCache struct {
	mu sync.Mutex
	m  map[sumKey]sums
}

const maxSums = 4 * artifact.MaxFiles

func (c *sumCache) get(k sumKey) (sums, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.m[k]
	return s, ok
}

func (c *sumCache) put(k sumKey, s sums) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil || len(c.m) >= maxSums {
		c.m = map[sumKey]sums{}
	}
	c.m[k] = s
}

// settled is the age in time from which a modification time can be trusted to
// change with the next write, whatever the file system's clock granularity.
const settled = 3 * time.Second

// hash fills in the digests of f, whose bytes are at name below root, reading
// it once. A file that changes meanwhile is ErrChanged.
func (d *Dir) hash(ctx context.Context, root *os.Root, name string, f *artifact.File) error {
	file, err := openRegular(root, name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return fileError(err)
	}
	if validator(info) != f.Validator {
		return fmt.Errorf("%w: file is being written", ErrChanged)
	}
	key := keyOf(filepath.Join(d.opts.Root, name), info)
	if s, ok := d.sums.get(key); ok {
		f.SHA256, f.GitSHA1 = s.sha256, s.git
		return nil
	}
	wide, git := sha256.New(), sha1.New()
	dst := io.Writer(wide)
	if !f.LFS {
		_, _ = fmt.Fprintf(git, "blob %d\x00", f.Size)
		dst = io.MultiWriter(wide, git)
	}
	n, err := io.CopyBuffer(dst, ctxReader{ctx, file}, make([]byte, 1<<20))
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return fileError(err)
	}
	after, err := file.Stat()
	if err != nil {
		return fileError(err)
	}
	if n != f.Size || validator(after) != f.Validator {
		return fmt.Errorf("%w: file is being written", ErrChanged)
	}
	f.SHA256 = artifact.Digest(wide.Sum(nil))
	if !f.LFS {
		f.GitSHA1 = hex.EncodeToString(git.Sum(nil))
	}
	if d.opts.Now().Sub(after.ModTime()) > settled {
		d.sums.put(key, sums{f.SHA256, f.GitSHA1})
	}
	return nil
}

func keyOf(path string, info fs.FileInfo) sumKey {
	k := sumKey{path: path, size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		k.inode, k.ctime = st.Ino, st.Ctim.Nano()
	}
	return k
}

// ctxReader ends with ctx. It hides what else the file can do, so that copies
// use the buffer given.
type ctxReader struct {
	ctx context.Context // of the call
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if cause := context.Cause(c.ctx); cause != nil {
		return 0, cause
	}
	return c.r.Read(p)
}
