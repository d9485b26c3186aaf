// Package up is `hearth up`: a whole fabric on this machine for a person to
// try, or headless as the check of the main job. It also holds `hearth
// engine-sim`. The command tree calls it; the processes themselves are run by
// the fabric package and the steps of the check by the check package.
package up

import (
	"errors"

	"github.com/spf13/cobra"
)

// Command is `hearth up`.
func Command() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Run two nodes, four engines and the router on this machine",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return errors.New("run fabric: not wired yet") },
	}
}
