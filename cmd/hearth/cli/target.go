package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/identity"
)

// Environment variables that name an address when no flag does.
const (
	envAgent  = "HEARTH_AGENT"
	envRouter = "HEARTH_ROUTER"
)

// target holds the flags that say which agent or router a command speaks to.
type target struct {
	addr   string
	socket string
	node   string
}

// place is one address to speak to: a unix socket's path or an http base URL.
type place struct {
	node   string // where known
	socket string
	url    string
	origin string // where the address came from, for errors
}

func (p place) String() string {
	if p.socket != "" {
		return p.socket
	}
	return p.url
}

func (t *target) addrFlags(command *cobra.Command, what, env string) *cobra.Command {
	command.Flags().StringVar(&t.addr, "addr", "", "address of the "+what+"'s admin listener, http://host:port (default $"+env+")")
	command.Flags().StringVar(&t.socket, "socket", "", "path of the "+what+"'s local socket (default "+defaultSocket(what)+")")
	command.MarkFlagsMutuallyExclusive("addr", "socket")
	return command
}

func (t *target) nodeFlag(command *cobra.Command) *cobra.Command {
	command.Flags().StringVar(&t.node, "node", "", "node, where 'hearth up' runs several")
	return command
}

func defaultSocket(what string) string {
	return filepath.Join(identity.RuntimeDir, what+".sock")
}

// explicit gives the place that flags or the environment name, if they do.
func (t *target) explicit(env string) (place, bool, error) {
	switch {
	case t.socket != "":
		return place{socket: t.socket, origin: "--socket"}, true, nil
	case t.addr != "":
		p, err := parsePlace(t.addr, "--addr")
		return p, true, err
	case os.Getenv(env) != "":
		p, err := parsePlace(os.Getenv(env), "$"+env)
		return p, true, err
	}
	return place{}, false, nil
}

// parsePlace reads an address: http://host:port, host:port, unix:///path or an
// absolute path.
func parsePlace(text, origin string) (place, error) {
	if path, ok := strings.CutPrefix(text, "unix://"); ok {
		text = path
	}
	switch {
	case strings.HasPrefix(text, "/"):
		return place{socket: text, origin: origin}, nil
	case strings.HasPrefix(text, "http://"), strings.HasPrefix(text, "https://"):
		return place{url: strings.TrimRight(text, "/"), origin: origin}, nil
	case strings.Contains(text, "://") || !strings.Contains(text, ":"):
		return place{}, terminal.Usagef("%s %q is no address; want http://host:port, host:port or unix:///path", origin, text)
	}
	return place{url: "http://" + text, origin: origin}, nil
}

// agents gives the agents to ask: the one that is named, else this node's, else
// those of a running `hearth up` (only --node's, if given). changing asks for
// local sockets, which alone take changing calls.
func (t *target) agents(changing bool) ([]place, error) {
	if p, ok, err := t.explicit(envAgent); ok || err != nil {
		return []place{p}, err
	}
	socket := defaultSocket("agent")
	if _, err := os.Stat(socket); err == nil {
		return []place{{socket: socket, origin: "default"}}, nil
	}
	state, err := readUp()
	if err != nil {
		return nil, t.nothing("agent", envAgent, err)
	}
	var found []place
	var names []string
	for _, agent := range state.Agents {
		names = append(names, agent.Node)
		if t.node != "" && t.node != agent.Node {
			continue
		}
		p := place{node: agent.Node, socket: agent.Socket, origin: "hearth up"}
		if !changing && agent.Admin != "" {
			p = place{node: agent.Node, url: agent.Admin, origin: "hearth up"}
		}
		found = append(found, p)
	}
	if len(found) == 0 {
		return nil, terminal.Fail(terminal.ExitNotFound, fmt.Errorf("find node %q: 'hearth up' runs %s", t.node, strings.Join(names, ", ")), "")
	}
	return found, nil
}

// agent gives the one agent that a command needs.
func (t *target) agent(changing bool) (place, error) {
	places, err := t.agents(changing)
	if err != nil {
		return place{}, err
	}
	if len(places) > 1 {
		var names []string
		for _, p := range places {
			names = append(names, p.node)
		}
		return place{}, terminal.Fail(terminal.ExitUsage, fmt.Errorf("several nodes are running: %s", strings.Join(names, ", ")), "say which with --node")
	}
	return places[0], nil
}

// router gives the router to ask: the one that is named, else this machine's,
// else that of a running `hearth up`.
func (t *target) router() (place, error) {
	if p, ok, err := t.explicit(envRouter); ok || err != nil {
		return p, err
	}
	socket := defaultSocket("router")
	if _, err := os.Stat(socket); err == nil {
		return place{socket: socket, origin: "default"}, nil
	}
	state, err := readUp()
	if err != nil {
		return place{}, t.nothing("router", envRouter, err)
	}
	return place{url: state.RouterAdmin, origin: "hearth up"}, nil
}

func readUp() (*upstate.State, error) {
	state, err := upstate.Read()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if state == nil {
		return nil, os.ErrNotExist
	}
	return state, nil
}

func (t *target) nothing(what, env string, cause error) error {
	err := fmt.Errorf("find the %s: no %s here and no 'hearth up' running", what, defaultSocket(what))
	if !errors.Is(cause, os.ErrNotExist) {
		err = fmt.Errorf("find the %s: %w", what, cause)
	}
	return terminal.Fail(terminal.ExitUnreachable, err,
		fmt.Sprintf("is the %s running? name it with --addr, --socket or $%s, or start 'hearth up'", what, env))
}
