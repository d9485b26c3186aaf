package bench

import (
	"context"
	"path/filepath"

	"github.com/spf13/cobra"
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
	var rows []Row
	for _, part := range kvParts {
		more, err := part.rows(cmd.Context(), filepath.Join(dir, part.name), o)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}
