package cli

import (
	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/up"
)

var components = []component{}

func (a *app) runCommands() []*cobra.Command {
	return []*cobra.Command{up.Command(), up.EngineSimCommand()}
}

func (a *app) askCommands() []*cobra.Command {
	return []*cobra.Command{a.status(), a.models(), a.nodes(), a.inject(), a.explain()}
}
