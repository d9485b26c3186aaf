package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

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

// envRuntime names the directory of the default sockets where it is not
// identity.RuntimeDir.
const envRuntime = "HEARTH_RUNTIME_DIR"

// Environment variables for the flags --tls-cert, --tls-key and --tls-ca.
const (
	envCert = "HEARTH_TLS_CERT"
	envKey  = "HEARTH_TLS_KEY"
	envCA   = "HEARTH_TLS_CA"
)

// target holds the flags that say which agent or router a command speaks to.
type target struct {
	addr   string
	socket string
	node   string
	tls    identity.Files
	notes  io.Writer // for a person: which of several was taken
	noUp   bool      // whether a running 'hearth up' is left alone
	up     *upstate.State
}

// place is one address to speak to: a unix socket's path or an http base URL.
type place struct {
	node   string // where known
	socket string
	url    string
	origin string // where the address came from, for errors
	tls    identity.Files
}

// client gives the caller's side of mTLS towards a role, nil without certificates.
func (p place) client(role identity.Role) (*tls.Config, error) {
	if p.url == "" || p.tls.Cert == "" {
		return nil, nil //nolint:nilnil // no certificates is an answer
	}
	config, err := identity.ClientTLS(p.tls, role)
	return config, terminal.Fail(terminal.ExitUsage, err, "--tls-cert, --tls-key and --tls-ca want PEM files")
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
	command.Flags().StringVar(&t.tls.Cert, "tls-cert", "", "own certificate, for an admin listener that is not on loopback (default $"+envCert+")")
	command.Flags().StringVar(&t.tls.Key, "tls-key", "", "key of --tls-cert (default $"+envKey+")")
	command.Flags().StringVar(&t.tls.CA, "tls-ca", "", "authority of the other side's certificate (default $"+envCA+")")
	return command
}

func (t *target) nodeFlag(command *cobra.Command) *cobra.Command {
	command.Flags().StringVar(&t.node, "node", "", "node, where 'hearth up' runs several")
	return command
}

func defaultSocket(what string) string {
	return filepath.Join(cmp.Or(os.Getenv(envRuntime), identity.RuntimeDir), what+".sock")
}

// explicit gives the place that flags or the environment name, if they do.
func (t *target) explicit(env string) (place, bool, error) {
	files := identity.Files{
		Cert: cmp.Or(t.tls.Cert, os.Getenv(envCert)), Key: cmp.Or(t.tls.Key, os.Getenv(envKey)), CA: cmp.Or(t.tls.CA, os.Getenv(envCA)),
	}
	if set := files.Cert != ""; set != (files.Key != "") || set != (files.CA != "") {
		return place{}, true, terminal.Usagef("want all of --tls-cert, --tls-key and --tls-ca, or none")
	}
	switch {
	case t.socket != "":
		return place{socket: t.socket, origin: "--socket"}, true, nil
	case t.addr != "":
		p, err := parsePlace(t.addr, "--addr", files)
		return p, true, err
	case os.Getenv(env) != "":
		p, err := parsePlace(os.Getenv(env), "$"+env, files)
		return p, true, err
	}
	return place{}, false, nil
}

// parsePlace reads an address: http://host:port, https://host:port, host:port,
// unix:///path or an absolute path. With certificates host:port is https.
func parsePlace(text, origin string, files identity.Files) (place, error) {
	if path, ok := strings.CutPrefix(text, "unix://"); ok {
		text = path
	}
	scheme := "http://"
	if files.Cert != "" {
		scheme = "https://"
	}
	switch {
	case strings.HasPrefix(text, "/"):
		return place{socket: text, origin: origin}, nil
	case strings.HasPrefix(text, "http://"), strings.HasPrefix(text, "https://"):
		return place{url: strings.TrimRight(text, "/"), origin: origin, tls: files}, nil
	case strings.Contains(text, "://") || !strings.Contains(text, ":"):
		return place{}, terminal.Usagef("%s %q is no address; want http://host:port, host:port or unix:///path", origin, text)
	}
	return place{url: scheme + text, origin: origin, tls: files}, nil
}

// agents gives the agents to ask: the one that is named, else this node's, else
// those of a running `hearth up` (only --node's, if given). changing asks for
// local sockets, which alone take changing calls.
func (t *target) agents(ctx context.Context, changing bool) ([]place, error) {
	if p, ok, err := t.explicit(envAgent); ok || err != nil {
		return []place{p}, err
	}
	socket := defaultSocket("agent")
	if _, err := os.Stat(socket); err == nil {
		return []place{{socket: socket, origin: "default"}}, nil
	}
	state, err := t.readUp(ctx)
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
func (t *target) agent(ctx context.Context, changing bool) (place, error) {
	places, err := t.agents(ctx, changing)
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
func (t *target) router(ctx context.Context) (place, error) {
	if p, ok, err := t.explicit(envRouter); ok || err != nil {
		return p, err
	}
	socket := defaultSocket("router")
	if _, err := os.Stat(socket); err == nil {
		return place{socket: socket, origin: "default"}, nil
	}
	state, err := t.readUp(ctx)
	if err != nil {
		return place{}, t.nothing("router", envRouter, err)
	}
	return place{url: state.RouterAdmin, origin: "hearth up"}, nil
}

// errStale says that a `hearth up` left its file behind.
var errStale = errors.New("a 'hearth up' ended without cleaning up")

// readUp gives the running 'hearth up', the newest of several. One that was
// killed may leave its file, and its process id to another process: where
// nobody answers at any of its addresses it is errStale.
func (t *target) readUp(ctx context.Context) (*upstate.State, error) {
	if t.noUp {
		return nil, os.ErrNotExist
	}
	if t.up != nil {
		return t.up, nil
	}
	states, err := upstate.Read()
	if err != nil {
		return nil, err
	}
	stale := states[0].PID
	states = slices.DeleteFunc(states, func(s upstate.State) bool { return !answersAnywhere(ctx, s) })
	if len(states) == 0 {
		return nil, fmt.Errorf("%w: nothing answers at the addresses in %s", errStale, upstate.Path(stale))
	}
	t.up = &states[0]
	if len(states) > 1 && t.notes != nil {
		fmt.Fprintf(t.notes, "%d 'hearth up' are running; this is about the newest, process %d with its router at %s\n", len(states), t.up.PID, t.up.Router)
	}
	return t.up, nil
}

// answersAnywhere reports whether something listens at an address of a
// 'hearth up', or may do so: its silence is for the caller to explain.
func answersAnywhere(ctx context.Context, state upstate.State) bool {
	addresses := []string{state.RouterAdmin}
	for _, agent := range state.Agents {
		addresses = append(addresses, agent.Admin)
	}
	dialer := net.Dialer{Timeout: time.Second}
	for _, address := range addresses {
		u, err := url.Parse(address)
		if err != nil || u.Host == "" {
			continue
		}
		conn, err := dialer.DialContext(ctx, "tcp", u.Host)
		if err == nil {
			_ = conn.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return true
		}
	}
	return false
}

// here reports whether flags, the environment or the default socket say which
// agent or router is meant, and how they do.
func (t *target) here(what, env string) (string, bool) {
	if p, named, _ := t.explicit(env); named {
		return cmp.Or(p.origin, "$"+env) + " names the " + what, true
	}
	_, err := os.Stat(defaultSocket(what))
	return "the " + what + " of this machine runs", err == nil
}

func (t *target) nothing(what, env string, cause error) error {
	err := fmt.Errorf("find the %s: no %s here and no 'hearth up' running", what, defaultSocket(what))
	if !errors.Is(cause, os.ErrNotExist) {
		err = fmt.Errorf("find the %s: %w", what, cause)
	}
	return terminal.Fail(terminal.ExitUnreachable, err,
		fmt.Sprintf("is the %s running? name it with --addr, --socket or $%s, or start 'hearth up'", what, env))
}
