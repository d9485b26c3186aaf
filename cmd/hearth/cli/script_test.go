package cli

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// TestMain lets the test binary stand in for hearth in the scripts, and keeps
// the agent, the router and the 'hearth up' of this machine out of the tests.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) != "hearth" {
		for _, name := range []string{envAgent, envRouter} {
			_ = os.Unsetenv(name)
		}
		_ = os.Setenv("XDG_RUNTIME_DIR", "/nonexistent")
		_ = os.Setenv(envRuntime, "/nonexistent")
	}
	testscript.Main(m, map[string]func(){
		"hearth": func() { os.Exit(int(Main(os.Args[1:], terminal.Std()))) },
	})
}

func TestScriptsOfTheCommandLineHold(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"status": exitStatus},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// Nothing that runs on this machine reaches a script.
			env.Setenv("XDG_RUNTIME_DIR", env.WorkDir)
			env.Setenv(envRuntime, env.WorkDir)
			env.Setenv("NO_COLOR", "1")
			return nil
		},
	})
}

// exitStatus runs a command and wants its exit status: status N command args.
func exitStatus(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status N command [args]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	have := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		have = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if have != want {
		ts.Fatalf("exit status %d, want %d", have, want)
	}
}
