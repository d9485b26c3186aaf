package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	routeradmin "github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// askTimeout bounds one reading call.
const askTimeout = 10 * time.Second

// maxAsked bounds how many agents are asked at once.
const maxAsked = 8

// onAgent makes calls to one agent and explains their errors.
func onAgent[T any](ctx context.Context, p place, call func(context.Context, *admin.Client) (T, error)) (T, error) {
	var none T
	config, err := p.client(identity.RoleAgent)
	if err != nil {
		return none, err
	}
	client, err := admin.NewTLSClient(p.String(), config)
	if err != nil {
		return none, terminal.Fail(terminal.ExitUsage, err, "want http://host:port or the path of a socket")
	}
	defer client.Close()
	answer, err := call(ctx, client)
	if err != nil {
		return none, agentError(err, p)
	}
	return answer, nil
}

// answer is what one agent said, or why it said nothing.
type answer[T any] struct {
	place place
	value T
	err   error
}

// onAgents asks every agent the same, at most maxAsked at once, and gives the
// answers in the agents' order. The error is that of the first agent that
// failed; the other answers stand.
func onAgents[T any](ctx context.Context, places []place, call func(context.Context, *admin.Client) (T, error)) ([]answer[T], error) {
	answers := make([]answer[T], len(places))
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for i, p := range places {
		group.Go(func() error {
			value, err := onAgent(ctx, p, call)
			answers[i] = answer[T]{place: p, value: value, err: err}
			return err
		})
	}
	return answers, group.Wait()
}

// agentError gives an agent's error an exit status and a hint.
func agentError(err error, p place) error {
	if said, ok := errors.AsType[*admin.Error](err); ok && said.Code == "" {
		// A router's admin listener refuses an agent's calls without a code.
		err = fmt.Errorf("call agent at %s: %w", p, admin.ErrNotAdmin)
	} else if ok {
		code := terminal.ExitFailure
		hint := said.Hint
		switch said.Code {
		case admin.CodeBadRequest:
			code = terminal.ExitUsage
		case admin.CodeUnknownRef, admin.CodeUnknownDevice, admin.CodeUnknownTenant, admin.CodeUnknownBlock, admin.CodeNotFound:
			code = terminal.ExitNotFound
		case admin.CodeNotAllowed, admin.CodeInjectDisabled, admin.CodeLeased:
			code = terminal.ExitRefused
		case admin.CodeReadOnly:
			code = terminal.ExitRefused
			if hint == "" {
				hint = "changing calls are taken on the agent's local socket only; use --socket"
			}
		}
		if p.node != "" {
			err = fmt.Errorf("%s: %w", p.node, errors.New(said.Message))
		} else {
			err = errors.New(said.Message)
		}
		return terminal.Fail(code, err, hint)
	}
	if errors.Is(err, admin.ErrCut) {
		return terminal.Fail(terminal.ExitUnreachable, err, "the pull may go on; see 'hearth models list'")
	}
	return unreachable("agent", err)
}

// adminDefaults are the addresses of admin listeners that are not configured.
var adminDefaults = map[string]string{
	"agent":  net.JoinHostPort("127.0.0.1", strconv.Itoa(identity.PortAgentAdmin)),
	"router": net.JoinHostPort("127.0.0.1", strconv.Itoa(identity.PortRouterAdmin)),
}

func adminHint(what string) string {
	return fmt.Sprintf("the %s answers on its listen.admin (%s by default) and on its listen.socket", what, adminDefaults[what])
}

// unreachable explains why a connection failed; another error stays as it is.
func unreachable(what string, err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	// A listener that speaks gRPC alone answers an HTTP/1 request with bytes
	// that net/http has no error of its own for.
	if strings.Contains(err.Error(), "malformed HTTP") {
		err = fmt.Errorf("ask the %s: this is not its admin listener, and speaks no HTTP/1", what)
		return terminal.Fail(terminal.ExitUnreachable, err, adminHint(what))
	}
	if errors.Is(err, admin.ErrNotAdmin) || errors.Is(err, routeradmin.ErrNotAdmin) {
		return terminal.Fail(terminal.ExitUnreachable, err, adminHint(what))
	}
	if errors.Is(err, fs.ErrPermission) {
		return terminal.Fail(terminal.ExitRefused, err, "the socket is open to root and the group hearth")
	}
	_, network := errors.AsType[*net.OpError](err)
	if network || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, syscall.ECONNREFUSED) {
		return terminal.Fail(terminal.ExitUnreachable, err, fmt.Sprintf("is the %s running? name it with --addr or --socket", what))
	}
	return err
}

// parseRef reads a ref argument.
func parseRef(text string) (string, error) {
	ref, err := artifact.ParseRef(text)
	if err != nil {
		return "", terminal.Fail(terminal.ExitUsage, err, "for example hub://org/name@main or dir:///models/name")
	}
	return ref.String(), nil
}
