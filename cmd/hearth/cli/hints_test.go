package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/durable"
)

func TestWhatKeepsAComponentFromStartingNamesItsField(t *testing.T) {
	t.Parallel()
	settings := []setting{{"weights.viewsDir", ""}, {"weights.dir", "/var/lib/hearth/weights"}, {"listen.socket", "/run/hearth/agent.sock"}}
	for want, err := range map[string]error{
		"another agent or router uses it; stop that one, or name another place in weights.dir": fmt.Errorf("lock /var/lib/hearth/weights/lock: %w", durable.ErrLocked),
		"change the address in listen.mirror":                                                  fmt.Errorf("listen for mirror: %w", syscall.EADDRINUSE),
		"name another place in weights.dir":                                                    &fs.PathError{Op: "mkdir", Path: "/var/lib/hearth", Err: syscall.EACCES},
		"name another place in listen.socket":                                                  fmt.Errorf("listen unix /run/hearth/agent.sock: bind: %w", syscall.EACCES),
		"'hearth config check' looks at every file under tls":                                  fmt.Errorf("listen for mirror: read certificates: stat /etc/agent.pem: %w", fs.ErrNotExist),
		"name another path in listen.socket":                                                   errors.New("listen on socket /run/hearth/agent.sock: another process answers there"),
	} {
		var said strings.Builder
		terminal.Report(&said, hinted(err, settings))
		if !strings.Contains(said.String(), "hint: ") || !strings.Contains(said.String(), want) {
			t.Errorf("%v: %s, want %q", err, said.String(), want)
		}
	}
	if err := hinted(nil, settings); err != nil {
		t.Errorf("no error became %v", err)
	}
}
