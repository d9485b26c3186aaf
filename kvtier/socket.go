package kvtier

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// SocketName is the agent's socket in a claim's directory.
const SocketName = "kv.sock"

// Listen puts the agent's socket into a claim's directory, in place of what has
// its name there. Anybody who sees the directory may connect: that is the claim's
// containers. The socket goes with the directory.
func (s *Space) Listen(ctx context.Context, claim string) (net.Listener, error) {
	if err := checkClaim(claim); err != nil {
		return nil, fmt.Errorf("listen for claim: %w", err)
	}
	// A container may write into its directory and is not to be followed by any
	// link in it: the socket is made beside it, where only the agent comes, and
	// moved in whole. The folder's descriptor keeps the path short enough.
	folder, err := os.Open(s.path(claimsDir))
	if err != nil {
		return nil, fmt.Errorf("listen for claim %s: %w", claim, err)
	}
	defer func() { _ = folder.Close() }()
	beside := s.path(claimsDir, ".sock-"+claim)
	if err := os.Remove(beside); err != nil && !notExist(err) {
		return nil, fmt.Errorf("listen for claim %s: %w", claim, err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(folder.Fd()))+"/.sock-"+claim)
	if err != nil {
		return nil, fmt.Errorf("listen for claim %s: %w", claim, err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false)
	}
	err = os.Chmod(beside, 0o666)
	if err == nil {
		err = s.moveIn(beside, s.path(claimsDir, claim, SocketName), claim)
	}
	if err != nil {
		return nil, fmt.Errorf("listen for claim %s: %w", claim, errors.Join(err, l.Close(), os.Remove(beside)))
	}
	return l, nil
}

// moveIn gives a claim's socket its name, whatever a container has put there: a
// directory is not replaced by a rename, so the two change places and it goes into
// the trash. The container may go on meanwhile, but not for ever.
func (s *Space) moveIn(beside, name, claim string) (err error) {
	for range 16 {
		err = unix.Rename(beside, name)
		if err == nil || !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTEMPTY) {
			break
		}
		if err = unix.Renameat2(unix.AT_FDCWD, beside, unix.AT_FDCWD, name, unix.RENAME_EXCHANGE); err == nil {
			trash := s.path(trashDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+claim+"-"+SocketName)
			return s.fs.Rename(beside, trash)
		}
		if !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return os.NewSyscallError("rename", err)
}
