package durabletest

import (
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
	return o.f.aliveLocked(op, o.path)
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
	grow := off + int64(len(p)) - int64(len(o.n.data))
	if roomErr := o.f.roomLocked(grow); roomErr != nil {
		return 0, wrap("write", o.path, roomErr)
	}
	if grow > 0 {
		o.n.data = append(o.n.data, make([]byte, grow)...)
	}
	return copy(o.n.data[off:], p), err
}

func (o *file) Sync() error     { return o.sync("sync") }
func (o *file) Datasync() error { return o.sync("datasync") }

func (o *file) sync(op string) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return wrap(op, o.path, fs.ErrClosed)
	}
	if _, err := o.f.changeLocked(op, o.path); err != nil {
		return err
	}
	o.n.keptData = slices.Clone(o.n.data)
	o.n.keptMode = o.n.mode
	o.n.kept = true
	return nil
}

func (o *file) Allocate(size int64) error {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if err := o.usable("allocate", true); err != nil {
		return err
	}
	grow := size - int64(len(o.n.data))
	if err := o.f.roomLocked(grow); err != nil {
		return wrap("allocate", o.path, err)
	}
	if _, err := o.f.changeLocked("allocate", o.path); err != nil {
		return err
	}
	if grow > 0 {
		o.n.data = append(o.n.data, make([]byte, grow)...)
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
	if size <= int64(len(o.n.data)) {
		o.n.data = o.n.data[:size:size]
		return nil
	}
	o.n.data = append(o.n.data, make([]byte, size-int64(len(o.n.data)))...)
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
	o.n.mode = o.n.mode.Type() | perm.Perm()
	return nil
}

func (o *file) Stat() (fs.FileInfo, error) {
	o.f.mu.Lock()
	defer o.f.mu.Unlock()
	if o.closed {
		return nil, wrap("stat", o.path, fs.ErrClosed)
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
