package cli

import (
	"github.com/spf13/cobra"
)

var components = []component{}

func (a *app) runCommands() []*cobra.Command { return nil }

func (a *app) askCommands() []*cobra.Command { return nil }
