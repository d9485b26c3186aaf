package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/configfile"
)

// component is one kind of configuration file.
type component struct {
	name string
	kind string
	// fresh gives a new configuration that holds the defaults.
	fresh func() validator
	// setNode gives a read configuration the node's name; nil where it has none.
	setNode func(config validator, node string)
}

// validator is what every component's configuration is.
type validator interface{ Validate() error }

// load reads and validates the file of a component. node is the name that a
// flag gave, or empty.
func (c component) load(path, node string) (validator, error) {
	config := c.fresh()
	if err := configfile.Load(path, c.kind, config); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, terminal.Fail(terminal.ExitNotFound, err, fmt.Sprintf("'hearth config default %s' prints one to start from", c.name))
		}
		return nil, err
	}
	if c.setNode != nil && node != "" {
		c.setNode(config, node)
	}
	if err := config.Validate(); err != nil {
		err = fmt.Errorf("check %s: %w", path, err)
		if c.setNode != nil && node == "" && strings.Contains(err.Error(), `node: is ""`) {
			return nil, terminal.Fail(terminal.ExitFailure, err, "a file for every node leaves it out; give it with --node NAME")
		}
		return nil, err
	}
	return config, nil
}

func componentNamed(name string) (component, error) {
	var names []string
	for _, c := range components {
		if c.name == name {
			return c, nil
		}
		names = append(names, c.name)
	}
	return component{}, terminal.Usagef("no component %q; want %s", name, strings.Join(names, " or "))
}

func (a *app) config() *cobra.Command {
	command := &cobra.Command{Use: "config", Short: "Check a configuration file, or print the defaults"}
	var node string
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Read and validate a configuration file of any kind",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := componentOf(args[0])
			if err != nil {
				return err
			}
			config, err := c.load(args[0], node)
			if err != nil {
				return err
			}
			for _, odd := range advice(config) {
				fmt.Fprintf(a.Err, "warning: %s\n", odd)
			}
			fmt.Fprintf(a.Out, "%s: a valid %s\n", args[0], c.kind)
			return nil
		},
	}
	check.Flags().StringVar(&node, "node", "", "node name that 'hearth agent --node' will give")
	command.AddCommand(check,
		&cobra.Command{
			Use:       "default agent|router",
			Short:     "Print a component's default configuration",
			Args:      cobra.ExactArgs(1),
			ValidArgs: []string{"agent", "router"},
			RunE: func(_ *cobra.Command, args []string) error {
				c, err := componentNamed(args[0])
				if err != nil {
					return err
				}
				text, err := configfile.Marshal(c.fresh())
				if err != nil {
					return err
				}
				fmt.Fprintf(a.Out, "apiVersion: %s\nkind: %s\n%s", configfile.APIVersion, c.kind, text)
				return nil
			},
		},
	)
	return command
}

// componentOf finds out which component a file is for by its kind.
func componentOf(path string) (component, error) {
	file, err := os.Open(path)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return component{}, terminal.Fail(terminal.ExitNotFound, err, "")
		}
		return component{}, err
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, configfile.MaxSize+1))
	if err != nil {
		return component{}, fmt.Errorf("read configuration %s: %w", path, err)
	}
	kind := kindOf(text)
	var kinds []string
	for _, c := range components {
		if c.kind == kind {
			return c, nil
		}
		kinds = append(kinds, c.kind)
	}
	if kind == "" {
		// Reading it as any kind gives the error with its place.
		if err := configfile.Parse(path, text, kinds[0], components[0].fresh()); err != nil {
			return component{}, err
		}
	}
	return component{}, fmt.Errorf("%s: %w: kind is %q, want %s", path, configfile.ErrInvalid, kind, strings.Join(kinds, " or "))
}

// kindOf reads the kind of a file that may be broken elsewhere: the first line
// that sets it at the left margin.
func kindOf(text []byte) string {
	for line := range strings.Lines(string(text)) {
		value, ok := strings.CutPrefix(line, "kind:")
		if !ok {
			continue
		}
		var kind string
		if yaml.Unmarshal([]byte(value), &kind) == nil {
			return kind
		}
	}
	return ""
}
