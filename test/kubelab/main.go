// Command kubelab runs real Kubernetes clusters on this machine, to try Hearth
// on and to test it: `kubelab up`, then `kubelab kubectl get nodes`.
//
// It owns no cluster: package lab does; this is its command line. It also is the
// first process of every machine of a lab, and a few helpers inside of them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// command is one sub-command; run gets the arguments after its flags.
type command struct {
	usage string
	does  string
	flags func(*flag.FlagSet) func(ctx context.Context, args []string) error
}

// errUsage says that a command line is wrong.
var errUsage = errors.New("wrong arguments")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 {
		if done, err := insideMachine(ctx, os.Args[1:]); done {
			exit(err)
		}
	}
	exit(run(ctx, os.Args[1:]))
}

func exit(err error) {
	ended, told := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil:
		os.Exit(0)
	case errors.Is(err, errUsage), errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case told:
		os.Exit(max(1, ended.ExitCode())) // it has told why
	}
	fmt.Fprintln(os.Stderr, "kubelab:", err)
	os.Exit(1)
}

// insideMachine does the work of a process of a lab, which no person calls, and
// reports whether args are for one.
func insideMachine(ctx context.Context, args []string) (done bool, err error) {
	switch {
	case args[0] == "machine-init" && len(args) == 2:
		// An init ends by being killed, not by a signal.
		return true, machine.Init(context.WithoutCancel(ctx), args[1])
	case args[0] == "forward-serve" && len(args) == 2:
		return true, lab.RunForwards(ctx, args[1])
	case args[0] == "forward-one" && len(args) == 3:
		return true, lab.RunForward(ctx, args[1], args[2])
	case args[0] == "dns-serve" && len(args) == 2:
		return true, lab.RunDNS(ctx, args[1])
	case args[0] == "boot-hook":
		return true, lab.BootHook(os.Stdin)
	}
	return false, nil
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		help(os.Stdout)
		return nil
	}
	c, ok := commands[args[0]]
	if !ok {
		fmt.Fprintf(os.Stderr, "kubelab: there is no command %q\n", args[0])
		help(os.Stderr)
		return errUsage
	}
	set := flag.NewFlagSet(args[0], flag.ContinueOnError)
	set.Usage = func() {
		fmt.Fprintf(set.Output(), "kubelab %s: %s\n", c.usage, c.does)
		set.PrintDefaults()
	}
	do := c.flags(set)
	own, rest := args[1:], []string(nil)
	if args[0] == passing {
		own, rest = ownArgs(own)
	}
	if err := set.Parse(own); err != nil {
		return err
	}
	err := do(ctx, append(set.Args(), rest...))
	if errors.Is(err, errUsage) {
		set.Usage()
	}
	return err
}

// passing is the command that passes what it is given to another program.
const passing = "kubectl"

// ownArgs parts the arguments of such a command: a leading --name is its own, and a -- after that is left out.
func ownArgs(args []string) (own, rest []string) {
	for _, flag := range []string{"--name", "-name"} {
		switch {
		case len(args) > 1 && args[0] == flag:
			own, args = args[:2], args[2:]
		case len(args) > 0 && strings.HasPrefix(args[0], flag+"="):
			own, args = args[:1], args[1:]
		}
	}
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	return own, args
}

func help(w io.Writer) {
	fmt.Fprintln(w, "kubelab runs real Kubernetes clusters on this machine.")
	for _, name := range slices.Sorted(maps.Keys(commands)) {
		fmt.Fprintf(w, "  kubelab %-38s %s\n", commands[name].usage, commands[name].does)
	}
	fmt.Fprintln(w, "Every command takes --name LAB (default \"default\"); --help after a command lists its flags.")
	fmt.Fprintln(w, "What follows kubectl is kubectl's, but for a --name before it: kubelab kubectl --name LAB -n llm get pods.")
}

// listFlag is a flag that may be given several times.
type listFlag []string

// String joins what was given.
func (l *listFlag) String() string { return strings.Join(*l, " ") }

// Set adds one.
func (l *listFlag) Set(value string) error {
	*l = append(*l, value)
	return nil
}
