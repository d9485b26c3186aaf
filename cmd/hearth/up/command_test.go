package up

import (
	"bytes"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

func TestFlagsThatMakeNoSenseAreRefusedBeforeAnythingIsMade(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"--nodes 0: want 1 to 16":       {"--nodes", "0"},
		"--engines 65: want 1 to 64":    {"--engines", "65"},
		"has no {port}":                 {"--engine", "foo"},
		"want vllm, sglang":             {"--engine", "foo {port}", "--engine-kind", "x"},
		"--size 1: want 1.0 MiB":        {"--size", "1"},
		"--origin without --model":      {"--origin", "http://hub.example"},
		`up takes no argument, and got`: {"foo"},
	} {
		c := Command()
		var out bytes.Buffer
		c.SetArgs(args)
		c.SetOut(&out)
		c.SetErr(&out)
		c.SilenceUsage, c.SilenceErrors = true, true
		err := c.ExecuteContext(t.Context())
		if terminal.CodeOf(err) != terminal.ExitUsage || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("up %v: %v, want a usage error with %q, and nothing said: %s", args, err, want, out.String())
		}
	}
}
