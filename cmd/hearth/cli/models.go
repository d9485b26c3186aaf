package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// nodeModel is a model on a node; the node is empty where it was not named.
type nodeModel struct {
	Node string `json:"node,omitempty"`
	admin.Model
}

func (a *app) models() *cobra.Command {
	command := &cobra.Command{Use: "models", Short: "List, pull, check and drop the models of a node"}
	command.AddCommand(a.modelsList(), a.modelsPull(), a.modelsShow(), a.modelsVerify(), a.modelsRemove())
	for _, child := range command.Commands() {
		a.addrFlags(child, "agent", envAgent)
		a.nodeFlag(child)
		a.jsonFlag(child)
	}
	return command
}

func (a *app) modelsList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List models and their state on each node",
		Args:    cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			places, err := a.agents(command.Context(), false)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(command.Context(), askTimeout)
			defer cancel()
			answers, failure := onAgents(ctx, places, listed)
			models := []nodeModel{}
			for _, said := range answers {
				for _, m := range said.value {
					m.Node = cmp.Or(said.place.node, m.Node)
					models = append(models, m)
				}
			}
			if failure != nil && len(models) == 0 {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"models": models}), failure)
			}
			return errors.Join(terminal.Table(a.Out, []string{"NODE", "REF", "STATE", "SIZE", "PRESENT", "ACCESS", "LEASES", "DIGEST"}, modelRows(models)), failure)
		},
	}
}

// listed gives an agent's models under its node's name.
func listed(ctx context.Context, c *admin.Client) ([]nodeModel, error) {
	node, err := c.Node(ctx)
	if err != nil {
		return nil, err
	}
	models, err := c.Models(ctx)
	named := make([]nodeModel, len(models))
	for i, m := range models {
		named[i] = nodeModel{Node: node.Name, Model: m}
	}
	return named, err
}

func modelRows(models []nodeModel) [][]string {
	var rows [][]string
	for _, m := range models {
		present := ""
		if m.Size > 0 {
			present = fmt.Sprintf("%d%%", m.Present*100/m.Size)
		}
		rows = append(rows, []string{
			m.Node, m.Ref, m.State, units.Bytes(m.Size).Human(), present, access(m.Model), strconv.Itoa(m.Leases), short(m.Digest),
		})
	}
	return rows
}

// access is to whom a model's source serves it, and that views are withheld.
func access(m admin.Model) string {
	word := m.Access
	if word == "" && m.Digest != "" {
		word = "unknown"
	}
	if m.NoViews != "" {
		word += ", no views"
	}
	return word
}

// short gives the first characters of a digest, for people.
func short(digest string) string { return digest[:min(len(digest), 12)] }

func (a *app) modelsPull() *cobra.Command {
	var refresh bool
	command := &cobra.Command{
		Use:   "pull REF",
		Short: "Bring a model onto each node and wait until it is ready",
		Long: `Pull brings a model onto the node (onto every node of a running 'hearth up',
unless --node names one) and waits until it is verified and ready. Closing the
command does not end a pull that others wait for, and a pull that was cut goes on
from what has landed. A ref that was resolved before keeps its meaning;
--refresh asks the source again.`,
		Args: cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			ref, err := parseRef(args[0])
			if err != nil {
				return err
			}
			places, err := a.agents(command.Context(), true)
			if err != nil {
				return err
			}
			progress := terminal.NewProgress(a.Err)
			models := make([]nodeModel, len(places))
			group, ctx := errgroup.WithContext(command.Context())
			for i, p := range places {
				group.Go(func() error {
					model, err := onAgent(ctx, p, func(ctx context.Context, c *admin.Client) (nodeModel, error) {
						model, err := pull(ctx, c, admin.PullRequest{Ref: ref, Refresh: refresh}, progress, strings.TrimSpace(p.node+" "+ref))
						if err != nil {
							return nodeModel{}, err
						}
						node, err := c.Node(ctx)
						return nodeModel{Node: cmp.Or(p.node, node.Name), Model: model}, err
					})
					models[i] = model
					return err
				})
			}
			err = group.Wait()
			progress.Close()
			if err != nil {
				return err
			}
			if a.json {
				return terminal.JSON(a.Out, map[string]any{"models": models})
			}
			return terminal.Table(a.Out, []string{"NODE", "REF", "STATE", "SIZE", "PRESENT", "ACCESS", "LEASES", "DIGEST"}, modelRows(models))
		},
	}
	command.Flags().BoolVar(&refresh, "refresh", false, "ask the source again what the ref means")
	return command
}

// pull runs one pull and shows how far it is.
func pull(ctx context.Context, c *admin.Client, request admin.PullRequest, progress *terminal.Progress, name string) (admin.Model, error) {
	model, err := c.Pull(ctx, request, func(p admin.Progress) {
		if p.Model != nil {
			progress.Set(name, strings.ToLower(p.Model.State), p.Model.Present, p.Model.Size)
		}
	})
	word := "failed"
	if err == nil {
		word = strings.ToLower(model.State)
	}
	progress.Done(name, word)
	return model, err
}

func (a *app) modelsShow() *cobra.Command {
	return &cobra.Command{
		Use:   "show REF",
		Short: "Show a model with its files",
		Args:  cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			ref, err := parseRef(args[0])
			if err != nil {
				return err
			}
			places, err := a.agents(command.Context(), false)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(command.Context(), askTimeout)
			defer cancel()
			answers, failure := onAgents(ctx, places, func(ctx context.Context, c *admin.Client) (admin.Model, error) { return c.Model(ctx, ref) })
			models := []nodeModel{}
			for _, said := range answers {
				if said.err == nil {
					models = append(models, nodeModel{Node: said.place.node, Model: said.value})
				}
			}
			if len(models) == 0 {
				return failure
			}
			// Not to have the model is an answer of a node; to say nothing is none.
			failure = nil
			for _, said := range answers {
				if said.err != nil && terminal.CodeOf(said.err) != terminal.ExitNotFound {
					failure = errors.Join(failure, said.err)
				}
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"models": models}), failure)
			}
			for i, m := range models {
				if i > 0 {
					fmt.Fprintln(a.Out)
				}
				if err := a.showModel(m); err != nil {
					return errors.Join(err, failure)
				}
			}
			return failure
		},
	}
}

func (a *app) showModel(m nodeModel) error {
	for _, line := range [][2]string{
		{"node", m.Node},
		{"ref", m.Ref},
		{"state", m.State},
		{"detail", m.Detail},
		{"digest", m.Digest},
		{"commit", m.Commit},
		{"source", m.Source},
		{"size", units.Bytes(m.Size).Human()},
		{"fetched", units.Bytes(m.BytesFetched).Human()},
		{"leases", strconv.Itoa(m.Leases)},
		{"access", m.Access},
		{"views", strings.Join(m.Views, " ")},
		{"no views", m.NoViews},
	} {
		if line[1] != "" {
			fmt.Fprintf(a.Out, "%-8s %s\n", line[0], terminal.Plain(line[1]))
		}
	}
	var rows [][]string
	for _, f := range m.FileList {
		rows = append(rows, []string{f.Path, fmt.Sprint(f.Kind), units.Bytes(f.Size).Human(), short(f.SHA256)})
	}
	if len(rows) == 0 {
		return nil
	}
	return terminal.Table(a.Out, []string{"FILE", "KIND", "SIZE", "SHA256"}, rows)
}

func (a *app) modelsVerify() *cobra.Command {
	return &cobra.Command{
		Use:   "verify REF",
		Short: "Read every byte of a model again and compare",
		Args:  cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			ref, err := parseRef(args[0])
			if err != nil {
				return err
			}
			p, err := a.agent(command.Context(), true)
			if err != nil {
				return err
			}
			result, err := onAgent(command.Context(), p, func(ctx context.Context, c *admin.Client) (admin.VerifyResult, error) { return c.Verify(ctx, ref) })
			if err != nil {
				return err
			}
			if a.json {
				if err := terminal.JSON(a.Out, result); err != nil {
					return err
				}
			} else {
				fmt.Fprintf(a.Out, "%s: %d files, %s read, %d bad\n", ref, result.Files, units.Bytes(result.Bytes).Human(), len(result.Bad))
			}
			if len(result.Bad) > 0 {
				return terminal.Fail(terminal.ExitFailure, fmt.Errorf("verify %s: wrong bytes in %s", ref, strings.Join(result.Bad, ", ")),
					"these files left service and are fetched again")
			}
			return nil
		},
	}
}

func (a *app) modelsRemove() *cobra.Command {
	return &cobra.Command{
		Use:     "rm REF",
		Aliases: []string{"remove"},
		Short:   "Drop a model that nobody uses",
		Args:    cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			ref, err := parseRef(args[0])
			if err != nil {
				return err
			}
			p, err := a.agent(command.Context(), true)
			if err != nil {
				return err
			}
			_, err = onAgent(command.Context(), p, func(ctx context.Context, c *admin.Client) (struct{}, error) { return struct{}{}, c.Remove(ctx, ref) })
			if err != nil {
				return err
			}
			if a.json {
				return terminal.JSON(a.Out, map[string]string{"removed": ref})
			}
			fmt.Fprintf(a.Out, "%s: removed\n", ref)
			return nil
		},
	}
}
