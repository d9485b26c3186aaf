package lab

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// BootHook is the work of a container's createContainer hook: runc runs it in
// the container's mounts before it enters the container's root, with the
// container's state on standard input. It puts the node's boot id over the
// kernel's, which all nodes share, so that a container sees its node boot.
func BootHook(stdin io.Reader) error {
	var state struct{ Bundle string }
	if err := json.NewDecoder(stdin).Decode(&state); err != nil {
		return fmt.Errorf("read state of container: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(state.Bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("read spec of container: %w", err)
	}
	var spec struct{ Root struct{ Path string } }
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("read spec of container: %w", err)
	}
	root := spec.Root.Path
	if !filepath.IsAbs(root) {
		root = filepath.Join(state.Bundle, root)
	}
	target := filepath.Join(root, "proc/sys/kernel/random/boot_id")
	if _, err := os.Stat(target); err != nil {
		return nil //nolint:nilerr // a container without /proc reads no boot id
	}
	if err := syscall.Mount("/etc/boot_id", target, "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("give container its boot id: %w", err)
	}
	return nil
}
