// Package up is `hearth up`: a whole fabric on this machine for a person to
// try, or headless as the check of the main job. It also holds `hearth
// engine-sim`. The command tree calls it. It runs no process and no step of the
// check itself: that is for the packages fabric and check.
package up

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/up/check"
	"github.com/hearth-dev/hearth/cmd/hearth/up/fabric"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

type flags struct {
	dir, model, origin, engine, kind, served, size, gpus string
	nodes, engines                                       int
	seed                                                 uint64
	check                                                bool
}

// Bounds of --size.
const (
	minSize = units.MiB
	maxSize = 64 * units.GiB
)

// engineKinds are what --engine-kind may be.
var engineKinds = []string{"vllm", "sglang", "llama-server", "sim"}

// Command is `hearth up`.
func Command() *cobra.Command {
	var f flags
	c := &cobra.Command{
		Use:   "up",
		Short: "Run two nodes, four engines and the router on this machine",
		Long: `up runs a whole fabric on this machine until Ctrl-C: agents with simulated GPUs
that pull a model, engines that read it from them, and the router in front. All
of it listens on the loopback only, on free ports, and ends with this command.

Without --model it makes a model on the spot and serves it from a small hub, and
the engines are simulated. --engine runs any other engine on the pulled files:

    hearth up --engine 'llama-server -m {model_dir}/model.gguf --port {port} --metrics' \
        --engine-kind llama-server --model /models/smol --nodes 1 --engines 1

The command is run by a shell in place of itself ('exec CMD'). With --check the
main job runs headless and ends with one line of JSON on standard output.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return terminal.Fail(terminal.ExitUsage, fmt.Errorf("up takes no argument, and got %q", args[0]), "'hearth up --model "+args[0]+"' serves a model that you have")
		},
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	o := c.Flags()
	o.StringVar(&f.dir, "dir", "", "work directory to keep (default a temporary one, removed at the end)")
	o.StringVar(&f.size, "size", "256MiB", "size of the generated model")
	o.Uint64Var(&f.seed, "seed", 1, "seed of the generated model and of the simulated text")
	o.StringVar(&f.model, "model", "", "model to serve instead: a directory, dir:///path or hub://org/name@revision")
	o.StringVar(&f.origin, "origin", "", "hub to pull hub:// models from, https://host")
	o.StringVar(&f.engine, "engine", "", "command of the engines, with {model_dir} and {port} in it")
	o.StringVar(&f.kind, "engine-kind", "vllm", "what kind of engine --engine is: vllm, sglang or llama-server")
	o.StringVar(&f.served, "served-model", "demo", "model name that clients ask for and engines serve")
	o.IntVar(&f.nodes, "nodes", 2, "number of nodes")
	o.IntVar(&f.engines, "engines", 4, "number of engines, dealt out to the nodes in turn")
	o.StringVar(&f.gpus, "gpus", "", "simulated GPUs of each node, such as h100x8, or a file of kind SimInventory")
	o.BoolVar(&f.check, "check", false, "run the main job headless and report it as one line of JSON")
	return c
}

func (f *flags) run(c *cobra.Command) error {
	size, err := f.validate()
	if err != nil {
		return err
	}
	// A reader of the output that goes away (| head) ends no fabric half-way: a
	// write then fails, and is not missed. Children do not inherit this.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	dir, clean, err := f.workDir()
	if err != nil {
		return err
	}
	defer clean()
	if f.check {
		return runCheck(c.Context(), c.OutOrStdout(), check.Options{
			Program: program, Dir: dir, Size: size, Seed: f.seed, Out: c.ErrOrStderr(),
		})
	}
	options, err := f.fabricOptions(c.Context(), c.ErrOrStderr(), size)
	if err != nil {
		return err
	}
	options.Program, options.Dir = program, dir
	return explain(stay(c.Context(), c.OutOrStdout(), c.ErrOrStderr(), options), f.dir)
}

// validate checks every flag that can be before anything is made, and gives
// the size of the generated model.
func (f *flags) validate() (units.Bytes, error) {
	size, err := units.ParseBytes(f.size)
	switch {
	case err != nil:
		return 0, terminal.Usagef("--size: %w", err)
	case size < minSize || size > maxSize:
		return 0, terminal.Usagef("--size %s: want %s to %s", f.size, minSize.Human(), maxSize.Human())
	case f.check && (f.engine != "" || f.model != "" || f.origin != "" || f.gpus != ""):
		return 0, terminal.Usagef("--check runs its own model and simulated engines; drop --engine, --model, --origin and --gpus")
	case f.nodes < 1 || f.nodes > fabric.MaxNodes:
		return 0, terminal.Usagef("--nodes %d: want 1 to %d", f.nodes, fabric.MaxNodes)
	case f.engines < 1 || f.engines > fabric.MaxEngines:
		return 0, terminal.Usagef("--engines %d: want 1 to %d", f.engines, fabric.MaxEngines)
	case f.engine != "" && !strings.Contains(f.engine, "{port}"):
		return 0, terminal.Usagef("--engine %q has no {port}: want one such as 'vllm serve {model_dir} --port {port}'", f.engine)
	case f.engine != "" && !slices.Contains(engineKinds, f.kind):
		return 0, terminal.Usagef("--engine-kind %q: want %s", f.kind, strings.Join(engineKinds, ", "))
	case f.served == "":
		return 0, terminal.Usagef("--served-model: want a name")
	case f.origin != "" && f.model == "":
		return 0, terminal.Usagef("--origin without --model: name the model to pull, hub://org/name@revision")
	}
	return size, nil
}

// workDir gives the directory to work in and what to do with it at the end.
func (f *flags) workDir() (string, func(), error) {
	if f.dir == "" {
		dir, err := os.MkdirTemp("", "hearth-up-")
		if err != nil {
			return "", nil, fmt.Errorf("make work directory: %w", err)
		}
		return dir, func() { _ = os.RemoveAll(dir) }, nil
	}
	dir, err := filepath.Abs(f.dir)
	if err != nil {
		return "", nil, fmt.Errorf("find work directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, fmt.Errorf("make work directory: %w", err)
	}
	lock, err := durable.Lock(filepath.Join(dir, "up.lock"))
	if errors.Is(err, durable.ErrLocked) {
		return "", nil, terminal.Fail(terminal.ExitRefused, fmt.Errorf("use work directory %s: another 'hearth up' has it", dir), "stop it or name another --dir")
	}
	if err != nil {
		return "", nil, fmt.Errorf("use work directory: %w", err)
	}
	return dir, func() { _ = lock.Close() }, nil
}

// fabricOptions turns the flags into a fabric, generating the model if none is
// named.
func (f *flags) fabricOptions(ctx context.Context, errOut io.Writer, size units.Bytes) (fabric.Options, error) {
	o := fabric.Options{
		Nodes: f.nodes, Engines: f.engines, Served: f.served, Engine: f.engine, EngineKind: f.kind, Origin: f.origin, GPUs: f.gpus,
	}
	if f.engine == "" {
		o.EngineKind = "sim"
		o.EngineArgs = []string{"--seed", fmt.Sprint(f.seed)}
	}
	switch {
	case f.model == "":
		fmt.Fprintf(errOut, "model: %s, generated once and kept in the user's cache\n", size.Human())
		dir, err := fabric.GeneratedModel(ctx, size, f.seed)
		if err != nil {
			return o, err
		}
		o.Repos, o.Ref = map[string]string{"demo/model": dir}, "hub://demo/model@main"
	case strings.Contains(f.model, "://"):
		ref, err := artifact.ParseRef(f.model)
		if err != nil {
			return o, terminal.Usagef("--model: %w", err)
		}
		if ref.Scheme == artifact.SchemeHub && f.origin == "" {
			return o, terminal.Usagef("--model %s needs --origin: Hearth pulls from no public hub unless told", f.model)
		}
		o.Ref = ref.String()
	default:
		dir, err := modelDir(f.model)
		if err != nil {
			return o, terminal.Fail(terminal.ExitNotFound, err, "")
		}
		o.Ref = artifact.SchemeDir + "://" + dir
	}
	if err := o.Validate(); err != nil {
		return o, terminal.Fail(terminal.ExitUsage, err, "")
	}
	return o, nil
}

// modelDir gives the absolute path of a directory, free of links, since an
// agent follows none.
func modelDir(path string) (string, error) {
	dir, err := filepath.EvalSymlinks(path)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return "", fmt.Errorf("find model directory: %w", err)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", fmt.Errorf("find model directory %s: want a directory", dir)
	}
	return dir, nil
}

// explain gives the failure of a child a hint about its log.
func explain(err error, kept string) error {
	child, ok := errors.AsType[*fabric.ProcessError](err)
	if !ok {
		return err
	}
	hint := "its whole log is " + child.Log
	if kept == "" {
		hint = "run again with --dir DIR to keep the logs"
	}
	return terminal.Fail(terminal.ExitFailure, err, hint)
}

// runCheck runs the scenario and writes its one line.
func runCheck(ctx context.Context, out io.Writer, options check.Options) error {
	result, err := check.Run(ctx, options)
	if err != nil && len(result.Steps) == 0 {
		result.Steps = append(result.Steps, check.Step{Name: "set-up", Error: err.Error(), Figures: map[string]any{}})
	}
	result.OK = result.OK && err == nil
	line, encodeErr := json.Marshal(result)
	if encodeErr != nil {
		return fmt.Errorf("encode result: %w", errors.Join(encodeErr, err))
	}
	fmt.Fprintf(out, "%s\n", line)
	if err != nil {
		return err
	}
	if !result.OK {
		return errors.New("check the main job: a step did not hold")
	}
	return nil
}
