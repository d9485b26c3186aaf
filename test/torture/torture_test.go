package main

import (
	"os"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/cli"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// asHearth makes this program the hearth binary: the agent under test is a
// process of its own without a second build.
const asHearth = "HEARTH_TORTURE_AS_HEARTH"

func TestMain(m *testing.M) {
	if os.Getenv(asHearth) != "" {
		os.Exit(int(cli.Main(os.Args[1:], terminal.Std())))
	}
	os.Exit(m.Run())
}

func TestTheAgentKeepsItsPromisesOverAFewKills(t *testing.T) {
	t.Parallel()
	const rounds = 1
	o := brief(t, rounds)
	summary, err := run(t.Context(), o)
	if err != nil {
		t.Fatalf("everything is kept in %s: %v", o.dir, err)
	}
	// How much a life gets done before it is ended depends on the machine; that
	// every model is pulled and compared at the end of the round does not.
	if summary.Rounds != rounds || summary.Kills+summary.Stops == 0 || summary.Viewed == 0 || summary.Calls["pull"]+summary.Calls["cli"] == 0 {
		t.Errorf("the run tried too little: %+v", summary)
	}
}

// brief is a short torture of this very program as the agent.
func brief(t *testing.T, rounds int) options {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// A socket's path is short, the name of a test's directory need not be.
	dir, err := os.MkdirTemp("", "torture-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			_ = os.RemoveAll(dir)
		}
	})
	return options{
		rounds: rounds, seed: 5, dir: dir, program: self, args: []string{"agent"}, hearth: self, env: []string{asHearth + "=1"}, out: t.Output(),
		memory: 1 << 30, // tests may run under the race detector
	}
}

func TestTheKVStoreKeepsItsPromisesOverAFewKills(t *testing.T) {
	t.Parallel()
	const rounds = 1
	o := brief(t, rounds)
	summary, err := runKV(t.Context(), o)
	if err != nil {
		t.Fatalf("everything is kept in %s: %v", o.dir, err)
	}
	if summary.Rounds != rounds || summary.Kills+summary.Stops == 0 || summary.Gets == 0 {
		t.Errorf("the run tried too little: %+v", summary)
	}
}
