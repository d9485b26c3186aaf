package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/hearth-dev/hearth/cmd/hearth/bench"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/up"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
)

// envLog names the log level of an agent or a router.
const envLog = "HEARTH_LOG"

func (a *app) runCommands() []*cobra.Command {
	return []*cobra.Command{up.Command(), a.agentCommand(), a.routerCommand(), up.EngineSimCommand(), up.HubSimCommand(), bench.Command()}
}

func (a *app) askCommands() []*cobra.Command {
	return []*cobra.Command{a.status(), a.models(), a.nodes(), a.devices(), a.claims(), a.claim(), a.kv(), a.network(), a.scaleOuts(), a.inject(), a.explain()}
}

// components are the kinds of configuration that `hearth config` knows.
var components = []component{
	{
		name: "agent", kind: nodeagent.Kind, fresh: func() validator { c := nodeagent.Default(); return &c },
		setNode: func(config validator, node string) {
			if c, ok := config.(*nodeagent.Config); ok {
				c.Node = node
			}
		},
	},
	{name: "router", kind: router.Kind, fresh: func() validator { c := router.Default(); return &c }},
}

func (a *app) agentCommand() *cobra.Command {
	var file, node, role string
	command := &cobra.Command{
		Use:   "agent --config FILE --node NAME",
		Short: "Run a node's agent",
		Long: `Agent runs in the foreground until SIGINT or SIGTERM. It logs text on a terminal
and JSON lines otherwise, at the level in $HEARTH_LOG (debug, info, warn or error).
--node stands over the node's name in the file, and --role over its roles: with
it one file serves a control and a data process of the same node. The file is read
again when it changes: KV budgets and tenants change at once, all else at a start.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			read := func() (*nodeagent.Config, error) {
				config, err := load[*nodeagent.Config](file, "agent", node)
				if err == nil && role != "" {
					config.Roles = []string{role}
				}
				return config, err
			}
			config, err := read()
			if err != nil {
				return err
			}
			log := terminal.Logger(a.Err, os.Getenv(envLog))
			warn(log, advice(config))
			if config.Kubernetes.Enabled {
				klog.SetSlogLogger(log) // what Kubernetes' own libraries say
			}
			agent, err := nodeagent.New(*config, nodeagent.Options{
				Version: readBuild().Version, Log: log, ConfigFile: file,
				Load: func() (nodeagent.Config, error) {
					config, err := read()
					if err != nil {
						return nodeagent.Config{}, err
					}
					return *config, nil
				},
			})
			if err == nil {
				err = untilStopped(command.Context(), agent.Run)
			}
			settings := []setting{
				{"weights.dir", config.Weights.Dir},
				{"weights.viewsDir", config.Weights.ViewsDir},
				{"health.stateDir", config.Health.StateDir},
				{"kubernetes.claimsDir", config.Kubernetes.ClaimsDir},
				{"kv.dir", config.KV.Dir},
				{"listen.socket", config.Listen.Socket},
				{"listen.dataSocket", config.Listen.DataSocket},
			}
			for i, drive := range config.KV.Drives {
				settings = append(settings, setting{fmt.Sprintf("kv.drives[%d]", i), drive})
			}
			for i, t := range config.KV.Tenants {
				settings = append(settings, setting{fmt.Sprintf("kv.tenants[%d].socket", i), t.Socket})
			}
			return hinted(err, settings)
		},
	}
	configFlag(command, &file)
	command.Flags().StringVar(&node, "node", "", "this node's name, unique among the nodes a router knows")
	command.Flags().StringVar(&role, "role", "", "run one role only: control or data")
	return command
}

func (a *app) routerCommand() *cobra.Command {
	var file string
	command := &cobra.Command{
		Use:   "router --config FILE",
		Short: "Run the cluster's router",
		Long: `Router runs in the foreground until SIGINT or SIGTERM, then lets streams finish.
It logs text on a terminal and JSON lines otherwise, at the level in $HEARTH_LOG
(debug, info, warn or error). The file is read again when it changes.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			config, err := load[*router.Config](file, "router", "")
			if err != nil {
				return err
			}
			log := terminal.Logger(a.Err, os.Getenv(envLog))
			warn(log, advice(config))
			if config.Kubernetes.Enabled {
				klog.SetSlogLogger(log) // what Kubernetes' own libraries say
			}
			r, err := router.New(*config, router.Options{ConfigFile: file, Version: readBuild().Version, Log: log})
			if err == nil {
				err = untilStopped(command.Context(), r.Run)
			}
			return hinted(err, []setting{{"metering.file", config.Metering.File}, {"listen.socket", config.Listen.Socket}})
		},
	}
	configFlag(command, &file)
	return command
}

// warn logs at the start what would otherwise show with the first caller.
func warn(log *slog.Logger, odd []string) {
	for _, what := range odd {
		log.Warn("odd configuration", slog.String("what", what))
	}
}

func configFlag(command *cobra.Command, file *string) {
	command.Flags().StringVar(file, "config", "", "configuration file (required)")
	_ = command.MarkFlagRequired("config") // the flag exists
	_ = command.MarkFlagFilename("config", "yaml", "yml")
}

// load reads the configuration of the component called name.
func load[T validator](file, name, node string) (T, error) {
	var none T
	c, err := componentNamed(name)
	if err != nil {
		return none, err
	}
	config, err := c.load(file, node)
	if err != nil {
		return none, err
	}
	typed, ok := config.(T)
	if !ok {
		return none, fmt.Errorf("read %s: holds a %T", file, config)
	}
	return typed, nil
}

// untilStopped runs a component. Being told to stop is not a failure.
func untilStopped(ctx context.Context, run func(context.Context) error) error {
	err := run(ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
