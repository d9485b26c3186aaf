package cli

import (
	"errors"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/durable"
)

// setting is a path in a configuration and the field that holds it.
type setting struct{ field, path string }

// listening finds the listener in an error of a component.
var listening = regexp.MustCompile(`listen for (\w+)`)

// hinted gives the errors with which an agent or a router most often does not
// start a hint that names the field of the configuration to change.
func hinted(err error, settings []setting) error {
	hint := ""
	path, named := settingOf(err, settings)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, durable.ErrLocked):
		hint = "another agent or router uses it; stop that one"
		if named {
			hint += ", or name another place in " + path.field
		}
	case errors.Is(err, syscall.EADDRINUSE):
		hint = "another process listens there; stop it, or change the address"
		if name := listening.FindStringSubmatch(err.Error()); name != nil {
			hint += " in listen." + name[1]
		}
	case named && strings.Contains(err.Error(), "another process answers there"):
		hint = "another agent or router runs; stop it, or name another path in " + path.field
	case strings.Contains(err.Error(), "read certificate"):
		hint = "'hearth config check' looks at every file under tls"
	case named && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EROFS)):
		hint = "this user cannot make or write " + path.path + "; make it for the user, or name another place in " + path.field
	}
	if hint == "" {
		return err
	}
	return terminal.Fail(terminal.CodeOf(err), err, hint)
}

// settingOf finds the setting that an error is about: its path, or a folder
// on the way to it, is the one that failed or is named in the text.
func settingOf(err error, settings []setting) (setting, bool) {
	failed, isPath := errors.AsType[*fs.PathError](err)
	for _, s := range settings {
		if s.path == "" {
			continue
		}
		onTheWay := isPath && filepath.IsAbs(failed.Path) && strings.HasPrefix(s.path, strings.TrimRight(failed.Path, "/")+"/")
		if onTheWay || err != nil && strings.Contains(err.Error(), s.path) {
			return s, true
		}
	}
	return setting{}, false
}
