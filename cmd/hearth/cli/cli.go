// Package cli is hearth's command tree. The programs under cmd call Main. It
// reads flags, speaks to agents and routers through their admin clients, prints
// answers and turns errors into exit statuses. It keeps no state, decides
// nothing that a component should decide, and leaves ending the process to its
// caller.
package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// Main runs one command line under the process's signals: the first SIGINT or
// SIGTERM cancels the command's context, the second ends the process at once.
func Main(args []string, streams terminal.Streams) terminal.Code {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
			return
		}
		<-signals
		os.Exit(int(terminal.ExitInterrupted))
	}()
	return Run(ctx, args, streams)
}

// Run runs one command line and reports its error on streams.Err.
func Run(ctx context.Context, args []string, streams terminal.Streams) terminal.Code {
	a := &app{Streams: streams, target: target{notes: streams.Err}}
	root := a.root()
	started := false
	markStart(root, &started)
	root.SetArgs(args)
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	command, err := root.ExecuteContextC(ctx)
	if err != nil && !started {
		if _, stated := errors.AsType[*terminal.Error](err); !stated {
			err = terminal.Fail(terminal.ExitUsage, err, fmt.Sprintf("run '%s --help'", command.CommandPath()))
		}
	}
	if err != nil && errors.Is(ctx.Err(), context.Canceled) && terminal.CodeOf(err) == terminal.ExitFailure {
		err = terminal.Fail(terminal.ExitInterrupted, err, "")
	}
	terminal.Report(streams.Err, err)
	return terminal.CodeOf(err)
}

// markStart notes that a command's own work has begun: an error before that is
// a usage error.
func markStart(command *cobra.Command, started *bool) {
	if run := command.RunE; run != nil {
		command.RunE = func(command *cobra.Command, args []string) error {
			*started = true
			return run(command, args)
		}
	}
	for _, child := range command.Commands() {
		markStart(child, started)
	}
}

// app is one invocation.
type app struct {
	terminal.Streams
	json bool
	target
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "hearth",
		Short: "The node layer of an LLM inference fabric",
		Long: `Hearth keeps GPU nodes warm and honest: one agent per node holds model weights
and watches the GPUs, and one router sends each request where its prefix is warm.

Start with 'hearth up', which runs a whole fabric on this machine.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.CompletionOptions.HiddenDefaultCmd = false
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run:"},
		&cobra.Group{ID: "ask", Title: "Ask and change:"},
		&cobra.Group{ID: "other", Title: "Other:"},
	)
	root.SetHelpCommandGroupID("other")
	root.SetCompletionCommandGroupID("other")
	add := func(group string, commands ...*cobra.Command) {
		for _, command := range commands {
			command.GroupID = group
			root.AddCommand(command)
		}
	}
	add("run", a.runCommands()...)
	add("ask", a.askCommands()...)
	add("other", a.config(), a.certs(), a.uninstall(), a.version())
	root.AddCommand(&cobra.Command{Use: "exit-codes", Short: "What the exit statuses mean", Long: terminal.ExitCodesText})
	groups(root)
	return root
}

// groups makes every command that only holds others a group.
func groups(command *cobra.Command) {
	for _, child := range command.Commands() {
		groups(child)
	}
	if command.HasSubCommands() && !command.Runnable() {
		group(command)
	}
}

// group makes a command that only holds others say so: without arguments it
// shows its help, with an unknown one it is a usage error.
func group(command *cobra.Command) {
	command.Args = cobra.ArbitraryArgs
	command.RunE = func(command *cobra.Command, args []string) error {
		if len(args) == 0 {
			return command.Help()
		}
		err := terminal.Usagef("unknown command %q for %q", args[0], command.CommandPath())
		hint := fmt.Sprintf("run '%s --help'", command.CommandPath())
		if command.SuggestionsMinimumDistance <= 0 {
			command.SuggestionsMinimumDistance = 2
		}
		if near := command.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf("did you mean '%s %s'?", command.CommandPath(), near[0])
		}
		return terminal.Fail(terminal.ExitUsage, err, hint)
	}
}

// jsonFlag gives a command --json.
func (a *app) jsonFlag(command *cobra.Command) *cobra.Command {
	command.Flags().BoolVar(&a.json, "json", false, "answer in JSON, for programs")
	return command
}
