package up

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

func TestEngineSimStopsAtADirectoryThatIsNoModel(t *testing.T) {
	t.Parallel()
	model := filepath.Join(t.TempDir(), "model")
	if err := hub.WriteModel(model, hub.ModelOptions{Size: 512 * units.KiB, Shards: 2}); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"config.json":                      {"--model", t.TempDir()},
		"artifact digest is":               {"--model", model, "--expect-digest", strings.Repeat("0", 64)},
		"required flag(s) \"model\"":       {},
		"hold no block":                    {"--model", model, "--kv-tokens", "8"},
		"unknown command \"extra\" for":    {"--model", model, "extra"},
		"invalid argument \"fast\" for \"": {"--model", model, "--speedup", "fast"},
	} {
		c := EngineSimCommand()
		c.SetArgs(args)
		c.SetOut(&bytes.Buffer{})
		c.SetErr(&bytes.Buffer{})
		c.SilenceErrors, c.SilenceUsage = true, true
		if err := c.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("engine-sim %q: got %v, want an error with %q", args, err, want)
		}
	}
}

func TestUpRefusesFlagsThatContradictEachOther(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"--check runs its own":   {"--check", "--model", "hub://a/b", "--origin", "http://127.0.0.1:1"},
		"needs --origin":         {"--model", "hub://a/b"},
		"--origin without":       {"--origin", "http://127.0.0.1:1"},
		"find model directory":   {"--model", filepath.Join(t.TempDir(), "none")},
		"{port}":                 {"--model", t.TempDir(), "--engine", "vllm serve {model_dir}"},
		"--nodes 0":              {"--model", t.TempDir(), "--nodes", "0"},
		"--size: parse byte cou": {"--size", "much"},
	} {
		c := Command()
		c.SetArgs(args)
		c.SetOut(&bytes.Buffer{})
		c.SetErr(&bytes.Buffer{})
		c.SilenceErrors, c.SilenceUsage = true, true
		if err := c.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("up %q: got %v, want an error with %q", args, err, want)
		}
	}
}
