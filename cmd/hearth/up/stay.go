package up

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/up/fabric"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/nodeagent/admin"
)

// stay brings a fabric up, tells how to use it and keeps it until ctx ends or
// a part of it does.
func stay(ctx context.Context, out, errOut io.Writer, options fabric.Options) (err error) {
	f, err := fabric.New(ctx, options)
	if err != nil {
		return err
	}
	defer func() {
		fmt.Fprintln(errOut, "stopping")
		err = errors.Join(err, f.Close())
	}()
	if err := start(ctx, errOut, f, options.Ref); err != nil {
		return err
	}
	if err := upstate.Write(f.State()); err != nil {
		return err
	}
	defer func() { _ = upstate.Remove(os.Getpid()) }() // readers remove what is left behind
	fmt.Fprint(out, welcome(f, options))
	if err := f.Watch(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// start runs agents, pulls, engines and the router, in this order, with the
// nodes side by side.
func start(ctx context.Context, errOut io.Writer, f *fabric.Fabric, ref string) error {
	progress := terminal.NewProgress(errOut)
	nodes, nodeCtx := errgroup.WithContext(ctx)
	for _, n := range f.Nodes {
		nodes.Go(func() error {
			if err := f.StartNode(nodeCtx, n); err != nil {
				return err
			}
			name := n.Name + " pulls"
			err := n.Pull(nodeCtx, ref, func(m admin.Model) {
				progress.Set(name, strings.ToLower(m.State), m.Present, m.Size)
			})
			if err == nil {
				progress.Done(name, "ready")
			}
			return err
		})
	}
	err := nodes.Wait()
	progress.Close()
	if err != nil {
		return err
	}
	engines, engineCtx := errgroup.WithContext(ctx)
	for _, e := range f.Engines {
		engines.Go(func() error {
			if err := f.StartEngine(engineCtx, e); err != nil {
				return err
			}
			fmt.Fprintf(errOut, "%s serves on %s of %s\n", e.Name, e.Device, e.Node)
			return nil
		})
	}
	if err := engines.Wait(); err != nil {
		return err
	}
	if err := f.StartRouter(ctx, f.Router); err != nil {
		return err
	}
	return f.AwaitEndpoints(ctx, f.Router)
}

// welcome says how to use what is up. The prompt is longer than the blocks by
// which the router remembers prefixes, so that asking twice shows a warm one.
func welcome(f *fabric.Fabric, o fabric.Options) string {
	return fmt.Sprintf(`
Hearth is up: %[1]d nodes, %[2]d engines and one router.

  %[3]s/v1    OpenAI-compatible, model %[4]q

Ask, in another terminal, with a prompt long enough to be remembered:
  ask='{"model":%[4]q,"max_tokens":32,"messages":[{"role":"user","content":"Add up '$(seq -s + 900)'"}]}'
  echo "$ask" | %[7]s explain --request -
  curl -s %[3]s/v1/chat/completions -H 'Content-Type: application/json' -d "$ask"

Ask twice, then explain again: it shows the warm tokens, and where they are.

Look, break a GPU and mend it:
  %[7]s status
  %[7]s models list
  %[7]s network
  %[7]s scaleouts --last
  %[7]s inject xid 79 --device %[5]s --node %[6]s
  %[7]s inject clear --device %[5]s --node %[6]s

Logs are in %[8]s. Ctrl-C ends everything.
`, len(f.Nodes), len(f.Engines), f.Router.URL, o.Served, f.Engines[0].Device, f.Engines[0].Node, os.Args[0], o.Dir)
}
