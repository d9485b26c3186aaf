package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/units"
)

// checkedTenant is what was found of one tenant.
type checkedTenant struct {
	Kind     string          `json:"kind,omitempty"`
	Name     string          `json:"name,omitempty"`
	Folder   string          `json:"folder"`
	Segments int             `json:"segments"`
	Blocks   int             `json:"blocks"`
	Bytes    int64           `json:"bytes"`
	Unopened int             `json:"unopened"` // encrypted, and their key is not known
	Unused   int             `json:"unused"`   // that nothing finds any more
	Problem  string          `json:"problem,omitempty"`
	Damaged  []damagedRecord `json:"damaged"`
}

// damagedRecord is a record that is not as it was written.
type damagedRecord struct {
	Segment   string `json:"segment"` // path
	Page      int64  `json:"page"`
	Namespace string `json:"namespace,omitempty"`
	Key       string `json:"key,omitempty"`
	Problem   string `json:"problem"`
}

func (a *app) kvCheck() *cobra.Command {
	var file string
	command := &cobra.Command{
		Use:   "check --config FILE",
		Short: "Read and verify every KV block of an agent that is stopped",
		Long: `Check reads every record of every tenant on the drives that the configuration
names, verifies its checksum, and changes nothing. No agent may serve the store
meanwhile: a running one verifies each block that it reads from a drive by itself.
The exit status is 1 where anything is damaged. What is damaged is a miss to
engines: the agent drops it when it is asked for. NOT OPENED counts encrypted blocks
whose key is not there, UNUSED those that nothing finds any more.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			config, err := load[*nodeagent.Config](file, "agent", "check")
			if err != nil {
				return err
			}
			progress := terminal.NewProgress(a.Err)
			found, err := nodeagent.CheckKV(command.Context(), config.KV, func(done, total int64) {
				progress.Set("kv", "verifying", done, total)
			})
			word := "verified"
			if err != nil {
				word = "failed"
			}
			progress.Done("kv", word)
			progress.Close()
			if err != nil {
				return checkFailed(err)
			}
			return a.showCheck(found)
		},
	}
	configFlag(command, &file)
	return a.jsonFlag(command)
}

func checkFailed(err error) error {
	switch {
	case errors.Is(err, durable.ErrLocked):
		return terminal.Fail(terminal.ExitRefused, fmt.Errorf("an agent serves the KV store: %w", err),
			"stop it first, all its roles; 'hearth kv stat' shows what a running one found damaged")
	case errors.Is(err, fs.ErrPermission):
		return terminal.Fail(terminal.ExitRefused, err, "the store belongs to the agent's user: run as that, or as root")
	}
	return err
}

func (a *app) showCheck(found []kvtier.TenantCheck) error {
	list := []checkedTenant{}
	bad := 0
	tenants := section{header: []string{"KIND", "TENANT", "SEGMENTS", "BLOCKS", "SIZE", "NOT OPENED", "UNUSED", "DAMAGED"}}
	damage := section{header: []string{"TENANT", "SEGMENT", "PAGE", "KEY", "PROBLEM"}}
	for _, t := range found {
		one := checkedTenant{
			Kind: t.Kind, Name: t.Name, Folder: t.Folder, Segments: t.Segments, Blocks: t.Blocks, Bytes: t.Bytes, Unopened: t.Unopened,
			Unused: t.Foreign, Problem: t.Problem, Damaged: []damagedRecord{},
		}
		name := cmp.Or(t.Name, t.Folder)
		for _, d := range t.Damaged {
			record := damagedRecord{Segment: d.Path, Page: d.Page, Problem: d.Err.Error()}
			if d.Namespace != (block.Namespace{}) {
				record.Namespace, record.Key = d.Namespace.String(), d.Key.String()
			}
			one.Damaged = append(one.Damaged, record)
			damage.rows = append(damage.rows, []string{name, record.Segment, strconv.FormatInt(record.Page, 10), record.Key, record.Problem})
		}
		if t.Problem != "" {
			damage.rows = append(damage.rows, []string{name, "", "", "", t.Problem})
		}
		bad += len(t.Damaged)
		if t.Problem != "" {
			bad++
		}
		list = append(list, one)
		tenants.rows = append(tenants.rows, []string{
			tenantKind(t.Kind), name, strconv.Itoa(t.Segments), strconv.Itoa(t.Blocks), units.Bytes(t.Bytes).Human(), blank(t.Unopened), blank(t.Foreign), blank(len(t.Damaged)),
		})
	}
	var err error
	switch {
	case a.json:
		err = terminal.JSON(a.Out, map[string]any{"tenants": list, "damaged": bad})
	case len(list) == 0:
		fmt.Fprintln(a.Out, "no tenant has blocks on the drives")
	default:
		err = terminal.Table(a.Out, tenants.header, tenants.rows)
		if err == nil && len(damage.rows) > 0 {
			fmt.Fprintln(a.Out)
			err = terminal.Table(a.Out, damage.header, damage.rows)
		}
	}
	if err != nil || bad == 0 {
		return err
	}
	return terminal.Fail(terminal.ExitFailure, fmt.Errorf("%d things are not as they were written", bad),
		"the agent takes damaged blocks for missing; a drive that damages more is failing")
}
