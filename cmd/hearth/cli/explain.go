package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	routeradmin "github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/pool"
)

// maxRequest bounds the request body that explain reads, in bytes: what the
// router takes.
const maxRequest = 32 << 20

func (a *app) explain() *cobra.Command {
	var model, file string
	command := &cobra.Command{
		Use:   "explain [PROMPT]",
		Short: "Say where a request would go, and why",
		Long: `Explain asks the router where a chat request with this prompt would go now: which
target, which endpoint, for which reason and at which cost next to the others.
Nothing is sent to an engine and nothing is reserved. --request reads a whole
request body instead ("-" is standard input).

The cost is the time that the router expects, in these parts: PREFILL of the
prompt's tokens that are not warm, BACKLOG of such tokens before it, DECODE beside
what runs, QUEUE for a slot, and OTHER: a prefix that is not there, little memory
left, a degraded device. A suspended endpoint did not answer the router lately.`,
		Example: `  hearth explain "Tell me a story"
  hearth explain --model llama --request body.json --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			if (len(args) == 1) == (file != "") {
				return terminal.Usagef("want a prompt or --request, one of the two")
			}
			var body []byte
			if file != "" {
				var err error
				if body, err = a.readRequest(file); err != nil {
					return err
				}
			}
			p, err := a.router(command.Context())
			if err != nil {
				return err
			}
			explanation, err := onRouter(command.Context(), p, func(ctx context.Context, c *routeradmin.Client) (routeradmin.Explanation, error) {
				if file == "" {
					var err error
					if body, err = chatRequest(ctx, c, args[0], model); err != nil {
						return routeradmin.Explanation{}, err
					}
				}
				return c.Explain(ctx, body)
			})
			if err != nil {
				return err
			}
			return a.showExplanation(explanation)
		},
	}
	command.Flags().StringVar(&model, "model", "", "logical model (default: the only one)")
	command.Flags().StringVar(&file, "request", "", "file that holds the request body")
	command.MarkFlagsMutuallyExclusive("model", "request")
	return a.jsonFlag(a.addrFlags(command, "router", envRouter))
}

// readRequest reads a request body from a file, or from standard input for "-".
func (a *app) readRequest(file string) ([]byte, error) {
	in := a.In
	if file != "-" {
		f, err := os.Open(file)
		if errors.Is(err, os.ErrNotExist) {
			return nil, terminal.Fail(terminal.ExitNotFound, err, "")
		}
		if err != nil {
			return nil, fmt.Errorf("read request: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	body, err := io.ReadAll(io.LimitReader(in, maxRequest+1))
	if err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	if len(body) > maxRequest {
		return nil, terminal.Usagef("the request is longer than the %d bytes the router explains", maxRequest)
	}
	return body, nil
}

// chatRequest makes a chat request of a prompt. An empty model is the router's
// only one.
func chatRequest(ctx context.Context, c *routeradmin.Client, prompt, model string) ([]byte, error) {
	if model == "" {
		models, err := c.Models(ctx)
		if err != nil {
			return nil, err
		}
		if len(models) == 0 {
			return nil, terminal.Fail(terminal.ExitNotFound, errors.New("the router knows no model"), "list models: with their targets in its configuration")
		}
		if len(models) != 1 {
			var names []string
			for _, m := range models {
				names = append(names, m.Name)
			}
			return nil, terminal.Fail(terminal.ExitUsage, fmt.Errorf("the router knows %d models: %s", len(models), strings.Join(names, ", ")), "say which with --model")
		}
		model = models[0].Name
	}
	return json.Marshal(map[string]any{
		"model":    model,
		"messages": []map[string]string{{"role": "user", "content": prompt}},
	})
}

func (a *app) showExplanation(e routeradmin.Explanation) error {
	var failure error
	if e.Error != "" {
		failure = terminal.Fail(terminal.ExitNotFound, errors.New(e.Error), "'hearth status' shows models and endpoints")
	}
	if a.json {
		return errors.Join(terminal.JSON(a.Out, e), failure)
	}
	if e.Chosen != "" {
		fmt.Fprintf(a.Out, "%s goes to %s in pool %s as %s: %s", terminal.Plain(e.Model), terminal.Plain(e.Chosen), e.Pool, terminal.Plain(e.Served), e.Reason)
		if e.Credit > 0 {
			fmt.Fprintf(a.Out, ", about %d prompt tokens are warm there", e.Credit)
		}
		fmt.Fprintln(a.Out)
		if e.Alarm {
			fmt.Fprintln(a.Out, "alarm: no endpoint of the pool is fit; this is the least bad")
		}
	}
	for _, t := range e.Targets {
		fmt.Fprintf(a.Out, "\ntarget %s in pool %s, weight %d, artifact ready: %s", terminal.Plain(t.ServedModel), t.Pool, t.Weight, yesNo(t.Ready))
		if t.Skipped != "" {
			fmt.Fprintf(a.Out, ", not taken: %s", terminal.Plain(t.Skipped))
		}
		fmt.Fprintln(a.Out)
		if err := a.showCandidates(t); err != nil {
			return err
		}
	}
	return failure
}

// stateOf names the state of a candidate as `hearth status` does.
func stateOf(tier string) string {
	switch tier {
	case "usable":
		return "serving"
	case "both":
		return "suspended, unhealthy"
	}
	return tier
}

func (a *app) showCandidates(t pool.TargetExplanation) error {
	seconds := func(s float64) string { return strconv.FormatFloat(s*1000, 'f', 1, 64) + " ms" }
	var rows [][]string
	for _, c := range t.Candidates {
		mark := ""
		if c.Chosen {
			mark = "*"
		}
		rows = append(rows, []string{
			mark, c.ID, stateOf(c.Tier), strconv.Itoa(c.CreditTokens), seconds(c.Cost), seconds(c.Prefill), seconds(c.Backlog), seconds(c.Decode), seconds(c.Queue),
			seconds(c.Memory + c.Sticky + c.Handicap),
		})
	}
	if len(rows) == 0 {
		return nil
	}
	return terminal.Table(a.Out, []string{"", "ENDPOINT", "STATE", "WARM TOKENS", "COST", "PREFILL", "BACKLOG", "DECODE", "QUEUE", "OTHER"}, rows)
}
