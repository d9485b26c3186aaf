// Command hearth is the program people type: the agent, the router, a whole
// fabric on one machine, and everything that asks or changes them.
package main

import (
	"os"

	"github.com/hearth-dev/hearth/cmd/hearth/cli"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

func main() {
	os.Exit(int(cli.Main(os.Args[1:], terminal.Std())))
}
