package dradriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"
)

// dialWithin bounds the question whether anybody answers on a socket.
const dialWithin = time.Second

// socket is a listener that knows the file that it made: it removes that one,
// and no other that has its name by then.
type socket struct {
	*net.UnixListener
	path string
	made os.FileInfo
}

// unanswered refuses the path of a socket on which somebody answers; one that
// is absent, or was left by a dead process, is nobody's.
func unanswered(ctx context.Context, path string) error {
	dialer := net.Dialer{Timeout: dialWithin}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = conn.Close()
		return fmt.Errorf("%w: it answers on %s", ErrServed, path)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTSOCK), errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err // such as a backlog that is full: it is somebody's
}

// listenAlone opens a socket, over a file that a dead process left.
func listenAlone(ctx context.Context, path string) (*socket, error) {
	if err := unanswered(ctx, path); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	l, ok := listener.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("listen on %s: no unix socket", path), listener.Close())
	}
	l.SetUnlinkOnClose(false)
	made, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &socket{UnixListener: l, path: path, made: made}, nil
}

// there reports whether the socket's file is where it was made.
func (s *socket) there() bool {
	now, err := os.Lstat(s.path)
	return err == nil && os.SameFile(now, s.made)
}

// Close implements net.Listener.
func (s *socket) Close() error {
	if s.there() {
		_ = os.Remove(s.path)
	}
	return s.UnixListener.Close()
}

// lockFolder takes a folder for this process. The lock is of the folder itself:
// it leaves no file, and one that is made again in its place has none.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = fmt.Errorf("%w: it has %s", ErrServed, dir)
	} else if err != nil {
		err = fmt.Errorf("lock %s: %w", dir, err)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// unlockFolder gives a folder back by its name: a child that is being made may
// have a copy of the open file.
func unlockFolder(f *os.File) {
	_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN)
	_ = f.Close()
}

// isAt reports whether an open folder is the one at a path.
func isAt(f *os.File, path string) (bool, error) {
	open, err := f.Stat()
	if err != nil {
		return false, err
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(open, now), err
}

// mounted refuses a folder that was removed and is still seen, as a mount of it
// is. One that is not there is none of those: it may come.
func mounted(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return nil //nolint:nilerr // what cannot be looked at is told when it is used
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Nlink == 0 {
		return fmt.Errorf("%s %w", dir, ErrUnmounted)
	}
	return nil
}
