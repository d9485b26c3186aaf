package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// DirOptions configures a Dir. Name and Root are required.
type DirOptions struct {
	// Name is the configured name, used in errors and metrics.
	Name string
	// Root is the absolute folder below which dir:// refs may lie.
	Root string
	// Now tells the time; nil means time.Now.
	Now func() time.Time
}

// Dir is the source behind dir:// refs: a local folder or a network mount. It
// follows no link, so that nothing outside Root can be read through it. It is
// safe for concurrent use.
type Dir struct {
	opts DirOptions
	sums sumCache
}

var _ Source = (*Dir)(nil)

// NewDir checks the options. It reads nothing: Root may be mounted later.
func NewDir(opts DirOptions) (*Dir, error) {
	if opts.Name == "" {
		return nil, errors.New("configure dir source: name is empty")
	}
	if !filepath.IsAbs(opts.Root) {
		return nil, fmt.Errorf("configure dir source %q: root %q must be an absolute path", opts.Name, opts.Root)
	}
	opts.Root = filepath.Clean(opts.Root)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Dir{opts: opts}, nil
}

// Name returns the configured name.
func (d *Dir) Name() string { return d.opts.Name }

// lfsSize is the size in bytes from which a file of a folder is named by its
// SHA-256 alone, as a hub does; smaller ones that are not tensors also get a
// git id.
const lfsSize = 10 << 20

// Resolve lists every regular file below the ref's folder and reads it once
// for its SHA-256; files whose size, times and inode are as they were are not
// read again. The commit is the digest of the file lines. Links, devices,
// sockets and pipes are refused by name. Folders named ".git", ".cache" and
// ".snapshot" at the top, and ".nfs*" leftovers, are not part of an artifact.
func (d *Dir) Resolve(ctx context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	root, rel, err := d.open(ref)
	if err != nil {
		return nil, d.refuse("resolve", describe(ref, ""), err)
	}
	defer func() { _ = root.Close() }()
	var files []artifact.File
	err = d.walk(ctx, root, rel, "", func(name string, info fs.FileInfo) error {
		if len(files) == artifact.MaxFiles {
			return fmt.Errorf("%w: more than %d files", ErrProtocol, artifact.MaxFiles)
		}
		f := artifact.File{Path: name, Size: info.Size(), Kind: artifact.KindOf(name), Validator: validator(info)}
		f.LFS = f.Kind == artifact.Weights || f.Size >= lfsSize
		if err := d.hash(ctx, root, path.Join(rel, name), &f); err != nil {
			return fmt.Errorf("file %q: %w", name, err)
		}
		files = append(files, f)
		return nil
	})
	if err != nil {
		return nil, d.refuse("resolve", describe(ref, ""), err)
	}
	if len(files) == 0 {
		return nil, d.refuse("resolve", describe(ref, ""), fmt.Errorf("%w: the folder holds no files", ErrProtocol))
	}
	slices.SortFunc(files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
	if err := artifact.CheckFiles(files, true); err != nil {
		return nil, d.refuse("resolve", describe(ref, ""), fmt.Errorf("%w: %w", ErrProtocol, err))
	}
	return &artifact.Listing{
		Ref: ref, Source: d.opts.Name, Commit: artifact.ComputeDigest(files).String(), Files: files, Access: artifact.AccessOpen,
	}, nil
}

// open opens Root and gives the ref's folder relative to it. No part of the
// way below Root may be a link.
func (d *Dir) open(ref artifact.Ref) (*os.Root, string, error) {
	if ref.Scheme != artifact.SchemeDir {
		return nil, "", fmt.Errorf("%w: a dir source resolves dir:// refs", ErrNotFound)
	}
	rel, err := filepath.Rel(d.opts.Root, filepath.Clean(ref.Name))
	if err != nil || !filepath.IsLocal(rel) {
		return nil, "", fmt.Errorf("%w: folder is outside the source's root %q", ErrForbidden, d.opts.Root)
	}
	root, err := os.OpenRoot(d.opts.Root)
	if err != nil {
		return nil, "", fileError(err)
	}
	for at := rel; at != "."; at = path.Dir(at) {
		info, err := root.Lstat(at)
		if err == nil && !info.IsDir() {
			err = fmt.Errorf("%w: %q is not a folder but a %s", ErrProtocol, at, kindOfMode(info.Mode()))
		} else if err != nil {
			err = fileError(err)
		}
		if err != nil {
			_ = root.Close()
			return nil, "", err
		}
	}
	return root, rel, nil
}

// walk calls visit for each regular file below rel, named relative to it.
func (d *Dir) walk(ctx context.Context, root *os.Root, rel, below string, visit func(name string, info fs.FileInfo) error) error {
	if strings.Count(below, "/") > 64 {
		return fmt.Errorf("%w: folder %q is nested deeper than 64", ErrProtocol, below)
	}
	dir, err := root.Open(path.Join(rel, below))
	if err != nil {
		return fileError(err)
	}
	entries, err := dir.ReadDir(-1)
	_ = dir.Close()
	if err != nil {
		return fileError(err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, entry := range entries {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		name := path.Join(below, entry.Name())
		if below == "" && (name == ".git" || name == ".cache" || name == ".snapshot") || strings.HasPrefix(entry.Name(), ".nfs") {
			continue
		}
		info, err := root.Lstat(path.Join(rel, name))
		switch {
		case err != nil:
			return fileError(err)
		case info.IsDir():
			err = d.walk(ctx, root, rel, name, visit)
		case info.Mode().IsRegular():
			err = visit(name, info)
		default:
			err = fmt.Errorf("%w: %q is a %s, only regular files are taken", ErrProtocol, name, kindOfMode(info.Mode()))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Open reads a range of a file whose size and times are still those of the
// listing. They are checked again after the last byte: a file rewritten
// meanwhile ends in ErrChanged.
func (d *Dir) Open(ctx context.Context, l *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	what := describe(l.Ref, f.Path)
	if off < 0 || n < 0 || off > f.Size || n > f.Size-off || artifact.ValidPath(f.Path) != nil {
		return nil, d.refuse("open", what, fmt.Errorf("%w: range of %d bytes at %d is outside the file's %d", ErrProtocol, n, off, f.Size))
	}
	root, rel, err := d.open(l.Ref)
	if err != nil {
		return nil, d.refuse("open", what, err)
	}
	defer func() { _ = root.Close() }()
	file, err := openRegular(root, path.Join(rel, f.Path))
	if err != nil {
		return nil, d.refuse("open", what, err)
	}
	r := &dirBody{ctx: ctx, dir: d, what: what, want: f.Validator, file: file, off: off, left: n}
	if err := r.check(); err != nil {
		_ = file.Close()
		return nil, d.refuse("open", what, err)
	}
	return r, nil
}

// openRegular opens a file that is no link and no device, at any component.
func openRegular(root *os.Root, name string) (*os.File, error) {
	for at := name; at != "."; at = path.Dir(at) {
		info, err := root.Lstat(at)
		if err != nil {
			return nil, fileError(err)
		}
		if at == name && !info.Mode().IsRegular() || at != name && !info.IsDir() {
			return nil, fmt.Errorf("%w: %q is now a %s", ErrChanged, at, kindOfMode(info.Mode()))
		}
	}
	// Without waiting, should the file have turned into a pipe just now.
	file, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fileError(err)
	}
	return file, nil
}

// dirBody yields exactly left bytes from off, or an error.
type dirBody struct {
	ctx  context.Context // of the call that opened the reader
	dir  *Dir
	what string
	want string
	file *os.File
	off  int64
	left int64
}

// check compares size and times with the listing's.
func (b *dirBody) check() error {
	info, err := b.file.Stat()
	if err != nil {
		return fileError(err)
	}
	if !info.Mode().IsRegular() || validator(info) != b.want {
		return fmt.Errorf("%w: size or modification time differs from the listing", ErrChanged)
	}
	return nil
}

// Read yields the next bytes.
func (b *dirBody) Read(p []byte) (int, error) {
	if cause := context.Cause(b.ctx); cause != nil {
		return 0, b.dir.refuse("open", b.what, cause)
	}
	if b.left == 0 {
		return 0, io.EOF
	}
	n, err := b.file.ReadAt(p[:min(int64(len(p)), b.left)], b.off)
	b.off, b.left = b.off+int64(n), b.left-int64(n)
	if err == nil || errors.Is(err, io.EOF) {
		if b.left > 0 && err == nil {
			return n, nil
		}
		if err = b.check(); err == nil && b.left > 0 {
			err = fmt.Errorf("%w: file ended %d bytes early", ErrUnavailable, b.left)
		}
		if err == nil {
			return n, nil
		}
		return n, b.dir.refuse("open", b.what, err)
	}
	return n, b.dir.refuse("open", b.what, fileError(err))
}

// Close releases the file.
func (b *dirBody) Close() error {
	if err := b.file.Close(); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	return nil
}

func (d *Dir) refuse(op, what string, err error) error {
	return &Error{Source: d.opts.Name, Op: op, What: what, Err: err}
}

// validator names a version of a file's bytes as well as a file system can.
func validator(info fs.FileInfo) string {
	return fmt.Sprintf("%d-%d", info.Size(), info.ModTime().UnixNano())
}

// fileError maps a file system's error to a sentinel.
func fileError(err error) error {
	if said, ok := errors.AsType[*fs.PathError](err); ok && strings.HasSuffix(said.Op, "at") {
		err = fmt.Errorf("%s: %w", said.Path, said.Err) // without the name of a system call
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %w", ErrForbidden, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// kindOfMode names what is not a regular file.
func kindOfMode(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeSymlink != 0:
		return "symbolic link"
	case mode&fs.ModeDevice != 0:
		return "device"
	case mode&fs.ModeSocket != 0:
		return "socket"
	case mode&fs.ModeNamedPipe != 0:
		return "pipe"
	case mode.IsDir():
		return "folder"
	case mode.IsRegular():
		return "regular file"
	}
	return "special file"
}
