package durabletest

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"
)

// file is an open file of an FS.
type file struct {
	f      *FS
	n      *node
	path   string
	flag   int
	at     int64
	closed bool
}

func (o *file) Name() string { return o.path }

func (o *file) usable(op string, write bool) error {
	switch {
	case o.closed:
		return wrap(op, o.path, fs.ErrClosed)
	case write && o.flag&(os.O_WRONLY|os.O_RDWR) == 0:
		return wrap(op, o.path, syscall.EBADF)
	case !write && o.flag&os.O_WRONLY != 0:
		return wrap(op, o.path, syscall.EBADF)
	}
	return nil
}

func (o *file) Read(p []byte) (int, error) {
	n, err := o.ReadAt(p, o.at)
	o.at += int64(n)
	if n > 0 {
		return n, nil
	}
	return n, err
}

func (o *file) ReadAt(p []byte, off int64) (int, error) {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if err := o.usable("read", false); err != nil {
		return 0, err
	}
	if err := o.f.readLocked("read", o.path); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, wrap("read", o.path, syscall.EINVAL)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if off >= int64(len(o.n.data)) {
		return 0, io.EOF
	}
	n := copy(p, o.n.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (o *file) Write(p []byte) (int, error) {
	n, err := o.WriteAt(p, o.at)
	o.at += int64(n)
	return n, err
}

func (o *file) WriteAt(p []byte, off int64) (int, error) {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if err := o.usable("write", true); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, wrap("write", o.path, syscall.EINVAL)
	}
	torn, err := o.f.changeLocked("write", o.path)
	if torn {
		p = p[:len(p)/2]
	} else if err != nil {
		return 0, err
	}
	end := off + int64(len(p))
	if roomErr := o.f.roomLocked(end - int64(len(o.n.data))); roomErr != nil {
		return 0, wrap("write", o.path, roomErr)
	}
	if end > int64(len(o.n.data)) {
		o.resizeLocked("write", end)
	}
	o.n.mtime = o.f.now()
	o.f.noteLocked(o.n, "write", o.path, change{write: slices.Clone(p), off: off})
	return copy(o.n.data[off:], p), err
}

func (o *file) resizeLocked(op string, size int64) {
	o.n.data = resized(o.n.data, size)
	o.f.noteLocked(o.n, op, o.path, change{resize: true, size: size})
}

func (o *file) Sync() error     { return o.sync("sync") }
func (o *file) Datasync() error { return o.sync("datasync") }

func (o *file) sync(op string) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return wrap(op, o.path, fs.ErrClosed)
	}
	_, err := o.f.changeLocked(op, o.path)
	if errors.Is(err, ErrCrashed) {
		return err
	}
	o.n.sync(err != nil, op == "sync")
	return err
}

func (o *file) Allocate(size int64) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if err := o.usable("allocate", true); err != nil {
		return err
	}
	if err := o.f.roomLocked(size - int64(len(o.n.data))); err != nil {
		return wrap("allocate", o.path, err)
	}
	if _, err := o.f.changeLocked("allocate", o.path); err != nil {
		return err
	}
	if size > int64(len(o.n.data)) {
		o.resizeLocked("allocate", size)
	}
	return nil
}

func (o *file) Truncate(size int64) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if err := o.usable("truncate", true); err != nil {
		return err
	}
	if _, err := o.f.changeLocked("truncate", o.path); err != nil {
		return err
	}
	o.resizeLocked("truncate", size)
	return nil
}

func (o *file) Chmod(perm fs.FileMode) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return wrap("chmod", o.path, fs.ErrClosed)
	}
	if _, err := o.f.changeLocked("chmod", o.path); err != nil {
		return err
	}
	o.f.chmodLocked(o.n, o.path, perm)
	return nil
}

func (o *file) Stat() (fs.FileInfo, error) {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return nil, wrap("stat", o.path, fs.ErrClosed)
	}
	if err := o.f.readLocked("stat", o.path); err != nil {
		return nil, err
	}
	return infoOf(o.path, o.n), nil
}

func (o *file) Close() error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return wrap("close", o.path, fs.ErrClosed)
	}
	o.closed = true
	return nil
}
