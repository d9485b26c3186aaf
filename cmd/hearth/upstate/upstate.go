// Package upstate owns the small files by which each running `hearth up` tells
// the other commands of the same user where its agents and its router answer.
// `up` writes one; the commands of cmd/hearth/cli read them when no address is
// given and no default socket exists. They never hold a secret.
package upstate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// maxSize bounds one file, in bytes, and maxFiles how many are read.
const (
	maxSize  = 64 << 10
	maxFiles = 1024
)

// ErrForeign says that a file or the directory belongs to another user or may
// be written by one, so its addresses are not believed.
var ErrForeign = errors.New("belongs to another user or is writable by one")

// State is a file's content.
type State struct {
	PID         int       `json:"pid"`         // process id of the `hearth up`
	StartedAt   time.Time `json:"startedAt"`   // when it was up
	Router      string    `json:"router"`      // ingress, "http://127.0.0.1:7400"
	RouterAdmin string    `json:"routerAdmin"` // admin listener, "http://..."
	Agents      []Agent   `json:"agents"`
}

// Agent is one node's agent.
type Agent struct {
	Node   string `json:"node"`
	Socket string `json:"socket"` // path of the local socket, for changing calls
	Admin  string `json:"admin"`  // admin listener, "http://..."
}

// Dir gives the files' directory: hearth-<uid> under $XDG_RUNTIME_DIR, or under
// the directory for temporary files where that is unset.
func Dir() string {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	return filepath.Join(base, "hearth-"+strconv.Itoa(os.Getuid()))
}

// Path gives the place of the file of one `hearth up`: up-<pid>.json in Dir.
func Path(pid int) string {
	return filepath.Join(Dir(), "up-"+strconv.Itoa(pid)+".json")
}

// Write writes the file of state.PID, 0600 in a 0700 directory of the user.
func Write(state State) error {
	dir := Dir()
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
	if err := durable.WriteFile(durable.OS, Path(state.PID), append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}

// Read gives the states of every `hearth up` whose process lives, newest first,
// and removes the files of those that are gone. With none the error is
// os.ErrNotExist; a file that another user could have written is ErrForeign.
func Read() ([]State, error) {
	dir := Dir()
	if err := own(dir); err != nil {
		return nil, fmt.Errorf("check state directory %s: %w", dir, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read state directory: %w", err)
	}
	var states []State
	for _, entry := range entries[:min(len(entries), maxFiles)] {
		text, isState := strings.CutSuffix(entry.Name(), ".json")
		text, named := strings.CutPrefix(text, "up-")
		pid, err := strconv.Atoi(text)
		if !isState || !named || err != nil || pid < 1 {
			continue
		}
		if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			_ = Remove(pid) // left behind by one that was killed
			continue
		}
		state, err := read(Path(pid))
		if errors.Is(err, os.ErrNotExist) {
			continue // it ended just now
		}
		if err != nil {
			return nil, err
		}
		state.PID = pid
		states = append(states, *state)
	}
	if len(states) == 0 {
		return nil, fmt.Errorf("find state in %s: %w", dir, os.ErrNotExist)
	}
	slices.SortFunc(states, func(a, b State) int { return b.StartedAt.Compare(a.StartedAt) })
	return states, nil
}

func read(path string) (*State, error) {
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

// Remove deletes the file of one `hearth up`; one that is already gone is no
// error.
func Remove(pid int) error {
	if err := os.Remove(Path(pid)); err != nil && !errors.Is(err, os.ErrNotExist) {
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
