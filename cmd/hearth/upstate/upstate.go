// Package upstate owns the small file by which a running `hearth up` tells the
// other commands of the same user where its agents and its router answer. `up`
// writes it; the commands of cmd/hearth/cli read it when no address is given
// and no default socket exists. It never holds a secret.
package upstate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
)

// maxSize bounds the file, in bytes.
const maxSize = 64 << 10

// ErrForeign says that the file or its directory belongs to another user or may
// be written by one, so its addresses are not believed.
var ErrForeign = errors.New("belongs to another user or is writable by one")

// State is the file's content.
type State struct {
	Router      string  `json:"router"`      // ingress, "http://127.0.0.1:7400"
	RouterAdmin string  `json:"routerAdmin"` // admin listener, "http://..."
	Agents      []Agent `json:"agents"`
}

// Agent is one node's agent.
type Agent struct {
	Node   string `json:"node"`
	Socket string `json:"socket"` // path of the local socket, for changing calls
	Admin  string `json:"admin"`  // admin listener, "http://..."
}

// Path gives the file's place: hearth-<uid>/up.json under $XDG_RUNTIME_DIR, or
// under the directory for temporary files where that is unset.
func Path() string {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	return filepath.Join(base, "hearth-"+strconv.Itoa(os.Getuid()), "up.json")
}

// Write replaces the file, 0600 in a 0700 directory of the user.
func Write(state State) error {
	path := Path()
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make state directory: %w", err)
	}
	if err := own(dir); err != nil {
		return fmt.Errorf("check state directory %s: %w", dir, err)
	}
	text, err := json.MarshalIndent(state, "", "  ")
	if err != nil {
		return fmt.Errorf("marshal state: %w", err)
	}
	if err := durable.WriteFile(durable.OS, path, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}

// Read gives the state of the running `hearth up`. Without one the error is
// os.ErrNotExist; a file that another user could have written is ErrForeign.
func Read() (*State, error) {
	path := Path()
	if err := own(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("check state directory %s: %w", filepath.Dir(path), err)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	defer func() { _ = file.Close() }()
	if err := own(path); err != nil {
		return nil, fmt.Errorf("check state %s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxSize))
	if err != nil {
		return nil, fmt.Errorf("read state %s: %w", path, err)
	}
	var state State
	if err := json.Unmarshal(text, &state); err != nil {
		return nil, fmt.Errorf("parse state %s: %w", path, err)
	}
	return &state, nil
}

// Remove deletes the file; one that is already gone is no error.
func Remove() error {
	if err := os.Remove(Path()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove state: %w", err)
	}
	return nil
}

// own checks that path is the user's own, no link, and writable by no other.
func own(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(stat.Uid) != os.Getuid() || info.Mode()&os.ModeSymlink != 0 || info.Mode().Perm()&0o022 != 0 {
		return ErrForeign
	}
	return nil
}
