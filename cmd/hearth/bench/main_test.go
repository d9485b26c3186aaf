package bench_test

import (
	"os"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/cli"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// TestMain lets this program be hearth where the bench starts itself again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "bench" || os.Args[1] == "agent") {
		os.Exit(int(cli.Main(os.Args[1:], terminal.Std())))
	}
	os.Exit(m.Run())
}
