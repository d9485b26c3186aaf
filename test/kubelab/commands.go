package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
	"github.com/hearth-dev/hearth/test/kubelab/programs"
)

var commands = map[string]command{
	"build": {"build", "build Kubernetes, containerd and runc into the cache, and print where", func(*flag.FlagSet) func(context.Context, []string) error {
		return build
	}},
	"up":   {"up [--nodes N] [--image FILE]", "bring a lab up and print how to use it", up},
	"down": {"down [--all]", "take a lab down, also what a crashed run left of one", down},
	"status": {"status", "print the lab, its nodes and their processes as JSON", onLab(func(ctx context.Context, l *lab.Lab, _ []string) error {
		status, err := l.Status(ctx)
		if err != nil {
			return err
		}
		return printJSON(status)
	})},
	"kubeconfig": {"kubeconfig", "print the path of the lab's kubeconfig", onLab(func(_ context.Context, l *lab.Lab, _ []string) error {
		fmt.Println(l.Kubeconfig())
		return nil
	})},
	passing: {"kubectl ARG...", "run the lab's own kubectl", onLab(func(ctx context.Context, l *lab.Lab, args []string) error {
		return onTerminal(l.Kubectl(ctx, args...))
	})},
	"load-image": {"load-image FILE...", "give every node the images of archives", onLab(func(ctx context.Context, l *lab.Lab, args []string) error {
		for _, archive := range args {
			if err := l.LoadImage(ctx, archive); err != nil {
				return err
			}
		}
		return nil
	})},
	"add-node": {"add-node", "add a node", onLab(func(ctx context.Context, l *lab.Lab, _ []string) error {
		n, err := l.AddNode(ctx)
		if err == nil {
			fmt.Println(n.Name())
		}
		return err
	})},
	"power-off": {"power-off NODE", "end everything on a node at once", onNode(func(ctx context.Context, n *lab.Node) error {
		return n.PowerOff(ctx)
	})},
	"power-on": {"power-on NODE", "boot a node that is off, with a new boot id", onNode(func(ctx context.Context, n *lab.Node) error {
		return n.PowerOn(ctx)
	})},
	"exec": {"exec MACHINE COMMAND...", "run a command on a node or on \"control\", outside of pods", onLab(func(ctx context.Context, l *lab.Lab, args []string) error {
		if len(args) < 2 {
			return errUsage
		}
		cmd, err := l.Enter(ctx, args[0], args[1:]...)
		if err != nil {
			return err
		}
		return onTerminal(cmd)
	})},
	"logs": {"logs MACHINE PROCESS", "print the log of a process of a node or of \"control\"", onLab(func(_ context.Context, l *lab.Lab, args []string) error {
		if len(args) != 2 {
			return errUsage
		}
		text, err := os.ReadFile(l.Log(args[0], args[1]))
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
		return err
	})},
	"start": {"start MACHINE PROCESS [ARG...]", "start kubelet, containerd, kube-proxy or one of control's", onProcess(processes.Start)},
	"stop": {"stop MACHINE PROCESS", "end a process of a node or of \"control\"", onProcess(func(p processes, ctx context.Context, process string, _ ...string) error {
		return p.Stop(ctx, process)
	})},
	"kill": {"kill MACHINE PROCESS", "the same with SIGKILL", onProcess(func(p processes, ctx context.Context, process string, _ ...string) error {
		return p.Kill(ctx, process)
	})},
	"forward": {"forward NAMESPACE/SERVICE PORT [LOCAL]", "let a service answer on 127.0.0.1 until Ctrl-C", onLab(forward)},
}

func build(ctx context.Context, _ []string) error {
	source, err := programs.Source()
	if err != nil {
		return err
	}
	cache, err := programs.Cache()
	if err != nil {
		return err
	}
	built, err := programs.Build(ctx, source, cache, os.Stderr)
	if err == nil {
		fmt.Println(built.Dir)
	}
	return err
}

func up(set *flag.FlagSet) func(context.Context, []string) error {
	o := lab.Options{Log: os.Stderr}
	set.StringVar(&o.Name, "name", "default", "the lab's `name`")
	set.IntVar(&o.Nodes, "nodes", 2, "how many nodes")
	set.BoolVar(&o.Replace, "replace", false, "take down a lab of that name first")
	set.DurationVar(&o.Within, "within", 0, "how long the lab may take, once its programs are built")
	gates := set.String("feature-gates", "", "`A=true,B=false` for every component")
	var images, runtimes, extra, forwards listFlag
	set.Var(&images, "image", "an archive of images that every node has; more than once")
	set.Var(&runtimes, "runtime-config", "`group/version=true` for the API server; more than once")
	set.Var(&extra, "arg", "`COMPONENT=--flag=value` for one component; more than once")
	set.Var(&forwards, "forward", "`NAME=NAMESPACE/SERVICE:PORT[:LOCAL]` answers on 127.0.0.1; more than once")
	return func(ctx context.Context, _ []string) error {
		var err error
		if o.FeatureGates, err = lab.ParseFeatureGates(*gates); err != nil {
			return err
		}
		o.Images, o.RuntimeConfig = images, runtimes
		o.Args = map[string][]string{}
		for _, pair := range extra {
			component, arg, ok := strings.Cut(pair, "=")
			if !ok {
				return errUsage
			}
			o.Args[component] = append(o.Args[component], arg)
		}
		for _, text := range forwards {
			f, err := parseForward(text)
			if err != nil {
				return err
			}
			o.Forwards = append(o.Forwards, f)
		}
		if o.Program, err = os.Executable(); err != nil {
			return err
		}
		l, err := lab.Up(ctx, o)
		if errors.Is(err, lab.ErrUp) {
			l, err = lab.Open(o.Name)
		}
		if err != nil {
			return err
		}
		fmt.Printf("The lab is up. Use it with\n\n  export KUBECONFIG=%s\n  kubectl get nodes\n\n", l.Kubeconfig())
		for _, f := range l.Forwards {
			fmt.Printf("Service %s/%s answers on http://%s once it has a ready pod.\n", f.Namespace, f.Service, l.Address(f.Name))
		}
		return nil
	}
}

func parseForward(text string) (lab.Forward, error) {
	name, target, ok := strings.Cut(text, "=")
	parts := strings.Split(target, ":")
	namespace, service, slash := strings.Cut(parts[0], "/")
	if !ok || !slash || len(parts) < 2 || len(parts) > 3 {
		return lab.Forward{}, fmt.Errorf("read forward: %q is not NAME=NAMESPACE/SERVICE:PORT[:LOCAL]", text)
	}
	f := lab.Forward{Name: name, Namespace: namespace, Service: service, Port: parts[1]}
	if len(parts) == 3 {
		var err error
		if f.Local, err = strconv.Atoi(parts[2]); err != nil {
			return f, fmt.Errorf("read forward: %w", err)
		}
	}
	return f, nil
}

func down(set *flag.FlagSet) func(context.Context, []string) error {
	name := set.String("name", "default", "the lab's `name`")
	all := set.Bool("all", false, "every lab")
	return func(ctx context.Context, _ []string) error {
		names := []string{*name}
		if *all {
			var err error
			if names, err = lab.List(); err != nil {
				return err
			}
		}
		var failed error
		for _, name := range names {
			failed = errors.Join(failed, lab.Down(ctx, name))
		}
		return failed
	}
}

// onLab is a command on a lab that is up.
func onLab(do func(context.Context, *lab.Lab, []string) error) func(*flag.FlagSet) func(context.Context, []string) error {
	return func(set *flag.FlagSet) func(context.Context, []string) error {
		name := set.String("name", "default", "the lab's `name`")
		return func(ctx context.Context, args []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			return do(ctx, l, args)
		}
	}
}

// onNode is a command on a node by name.
func onNode(do func(context.Context, *lab.Node) error) func(*flag.FlagSet) func(context.Context, []string) error {
	return onLab(func(ctx context.Context, l *lab.Lab, args []string) error {
		if len(args) != 1 {
			return errUsage
		}
		n, err := l.NodeNamed(args[0])
		if err != nil {
			return err
		}
		return do(ctx, n)
	})
}

// processes are those of the control plane (a *lab.Lab) or of a node (a *lab.Node).
type processes interface {
	Start(ctx context.Context, process string, args ...string) error
	Stop(ctx context.Context, process string) error
	Kill(ctx context.Context, process string) error
}

// onProcess is a command on a process of a machine.
func onProcess(do func(p processes, ctx context.Context, process string, args ...string) error) func(*flag.FlagSet) func(context.Context, []string) error {
	return onLab(func(ctx context.Context, l *lab.Lab, args []string) error {
		if len(args) < 2 {
			return errUsage
		}
		var on processes = l
		if args[0] != "control" {
			n, err := l.NodeNamed(args[0])
			if err != nil {
				return err
			}
			on = n
		}
		return do(on, ctx, args[1], args[2:]...)
	})
}

func forward(ctx context.Context, l *lab.Lab, args []string) error {
	if len(args) < 2 || len(args) > 3 {
		return errUsage
	}
	text := "forward=" + args[0] + ":" + args[1]
	if len(args) == 3 {
		text += ":" + args[2]
	}
	f, err := parseForward(text)
	if err != nil {
		return err
	}
	return l.Forward(ctx, f, func(address string) { fmt.Println("http://" + address) })
}

func onTerminal(cmd *exec.Cmd) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

func printJSON(value any) error {
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
