package bench

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// kvParts measure the KV store, each with a directory of its own, in this order.
var kvParts = []struct {
	name string
	rows func(ctx context.Context, dir string, o options) ([]Row, error)
}{
	{"index", indexRows},
	{"ram", ramRows},
	{"wait", waitRows},
	{"nvme", nvmeRows},
	{"restart", restartRows},
	{"resp", respRows},
}

func runKV(cmd *cobra.Command, dir string, o options) ([]Row, error) {
	for _, name := range o.only {
		if !slices.Contains(kvPartNames(), name) {
			return nil, terminal.Usagef("--only is %q, want some of %s", name, strings.Join(kvPartNames(), ", "))
		}
	}
	var rows []Row
	for _, part := range kvParts {
		if len(o.only) > 0 && !slices.Contains(o.only, part.name) {
			continue
		}
		more, err := part.rows(cmd.Context(), filepath.Join(dir, part.name), o)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func kvPartNames() (names []string) {
	for _, part := range kvParts {
		names = append(names, part.name)
	}
	return names
}
