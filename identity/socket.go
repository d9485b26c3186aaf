package identity

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"
)

// MaxSocketPath is the longest path the kernel takes for a unix socket, in bytes.
const MaxSocketPath = 107

// socketMode is that of a local socket: its owner and its group may call.
const socketMode = 0o660

// ListenSocket binds a unix socket that its owner and the group of Hearth's
// name may call. A socket file whose process is gone is replaced; one that
// answers, and a file that is no socket, are errors. The directory is made, 0755.
func ListenSocket(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make directory of socket: %w", err)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("listen on socket %s: a file that is no socket is there", path)
		}
		dialer := net.Dialer{Timeout: time.Second}
		if conn, err := dialer.DialContext(ctx, "unix", path); err == nil {
			_ = conn.Close()
			return nil, fmt.Errorf("listen on socket %s: another process answers there", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("replace socket: %w", err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on socket: %w", err)
	}
	if err := errors.Join(os.Chmod(path, socketMode), shareSocket(path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on socket: %w", err), listener.Close())
	}
	return listener, nil
}

// shareSocket gives a socket to the group that carries Hearth's name, where
// the system has one and the process may.
func shareSocket(path string) error {
	group, err := user.LookupGroup(Name)
	if err != nil || os.Geteuid() != 0 {
		return nil //nolint:nilerr // without the group the socket stays the owner's
	}
	id, err := strconv.Atoi(group.Gid)
	if err != nil {
		return fmt.Errorf("read group %s: %w", Name, err)
	}
	return os.Chown(path, -1, id)
}
