// Command hearth-router is `hearth router` alone, for images that hold nothing else.
package main

import (
	"os"

	"github.com/hearth-dev/hearth/cmd/hearth/cli"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

func main() {
	os.Exit(int(cli.Main(append([]string{"router"}, os.Args[1:]...), terminal.Std())))
}
