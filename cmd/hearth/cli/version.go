package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/configfile"
)

// build is what this program was made from.
type build struct {
	Version    string `json:"version"`
	Commit     string `json:"commit"`
	Modified   bool   `json:"modified"`
	Go         string `json:"go"`
	Platform   string `json:"platform"`
	APIVersion string `json:"apiVersion"`
}

func readBuild() build {
	b := build{
		Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		APIVersion: configfile.APIVersion,
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	// Go writes "(devel)" where no commit was at hand, or -buildvcs=false said so.
	if b.Version = info.Main.Version; b.Version == "(devel)" {
		b.Version = "devel"
	}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			b.Commit = setting.Value
		case "vcs.modified":
			b.Modified = setting.Value == "true"
		}
	}
	return b
}

func (a *app) version() *cobra.Command {
	return a.jsonFlag(&cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := readBuild()
			if a.json {
				return terminal.JSON(a.Out, b)
			}
			commit := b.Commit
			if b.Modified {
				commit += " (modified)"
			}
			if commit == "" {
				commit = "no commit recorded"
			} else {
				commit = "commit " + commit
			}
			fmt.Fprintf(a.Out, "hearth %s (%s, %s, %s, %s)\n", b.Version, commit, b.Go, b.Platform, b.APIVersion)
			return nil
		},
	})
}
