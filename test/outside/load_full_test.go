//go:build outside

package outside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// loadClients finds the venv that scripts/outside-deps-load made.
func loadClients(ctx context.Context, t *testing.T, r *rig.Rig) string {
	t.Helper()
	out, err := exec.CommandContext(ctx, filepath.Join(r.Root, "scripts", "outside-deps-load"), "--print").Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		t.Fatal(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// usageRecord is what these tests read of a line of the usage file.
type usageRecord struct {
	RequestID  string `json:"requestId"`
	Path       string `json:"path"`
	Prompt     int    `json:"promptTokens"`
	Completion int    `json:"completionTokens"`
	Estimated  bool   `json:"estimated"`
	Outcome    string `json:"outcome"`
	Endpoint   string `json:"endpoint"`
	Stream     bool   `json:"stream"`
}

// usageRecords waits for n lines of the router's usage file.
func usageRecords(ctx context.Context, t *testing.T, router *rig.Router, n int) []usageRecord {
	t.Helper()
	var found []usageRecord
	err := rig.Until(ctx, fmt.Sprintf("%d usage records", n), func(context.Context) (bool, error) {
		text, err := os.ReadFile(router.Usage)
		if err != nil {
			return false, err
		}
		found = nil
		for line := range bytes.Lines(text) {
			var u usageRecord
			if err := json.Unmarshal(line, &u); err != nil {
				return false, err
			}
			found = append(found, u)
		}
		return len(found) >= n, fmt.Errorf("%d so far", len(found))
	}, router.Process)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != n {
		t.Errorf("%d usage records, want %d", len(found), n)
	}
	return found
}

func startSimRouter(ctx context.Context, t *testing.T, r *rig.Rig) *rig.Router {
	t.Helper()
	router, err := r.StartRouter(ctx, logical(simEngines(ctx, t, r, 2)...))
	if err != nil {
		t.Fatal(err)
	}
	return router
}

func TestFullAiperfProfilesTheRouterWithoutAFailedRequest(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	venv := loadClients(ctx, t, r)
	router := startSimRouter(ctx, t, r)
	tokenizer := filepath.Join(r.Dir, "tokenizer")
	writeModel(t, tokenizer, hub.ModelOptions{Size: units.MiB, Shards: 1})
	const requests, warmup = 48, 4
	for i, stream := range []bool{true, false} {
		name := fmt.Sprintf("aiperf-%d", i)
		args := []string{
			"profile", "--model", "chat-large", "--url", router.URL, "--endpoint-type", "chat", "--tokenizer", tokenizer,
			"--isl", "200", "--osl", "16", "--concurrency", "8", "--request-count", fmt.Sprint(requests),
			"--warmup-request-count", fmt.Sprint(warmup), "--ui", "none", "--artifact-dir", filepath.Join(r.Dir, name),
		}
		if stream {
			args = append(args, "--streaming")
		}
		if _, err := r.Run(ctx, rig.Command{
			Name: name, Path: filepath.Join(venv, "bin", "aiperf"), Args: args,
			// The tokenizer is a folder, and nothing may be asked of a hub.
			Env: []string{"HF_ENDPOINT=http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY=1", "MPLBACKEND=agg"},
		}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(r.Dir, name, "profile_export_aiperf.json"))
		if err != nil {
			t.Fatal(err)
		}
		var report struct {
			Requests struct{ Avg float64 }  `json:"request_count"`
			Errors   *struct{ Avg float64 } `json:"error_request_count"`
			Output   struct{ Avg float64 }  `json:"output_sequence_length"`
		}
		if err := json.Unmarshal(text, &report); err != nil {
			t.Fatal(err)
		}
		if report.Requests.Avg != requests || report.Errors != nil && report.Errors.Avg != 0 {
			t.Errorf("streams %t: aiperf counts %v requests of %d, errors %v", stream, report.Requests.Avg, requests, report.Errors)
		}
		for _, u := range usageRecords(ctx, t, router, (i+1)*(requests+warmup))[i*(requests+warmup):] {
			if u.Outcome != "ok" || u.Estimated || u.Completion == 0 || u.Prompt == 0 || u.Stream != stream || u.Path != "/v1/chat/completions" {
				t.Errorf("streams %t: a request is recorded as %+v", stream, u)
			}
		}
	}
}

func TestFullTheRequestFunctionsOfVLLMsBenchSucceedThroughTheRouter(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	venv := loadClients(ctx, t, r)
	router := startSimRouter(ctx, t, r)
	type call struct {
		Kind  string `json:"kind"`
		Path  string `json:"path"`
		Model string `json:"model"`
		N     int    `json:"n"`
	}
	calls := []call{
		{"openai-chat", "/v1/chat/completions", "chat-large", 16},
		{"openai", "/v1/completions", "chat-large", 16},
		{"openai-embeddings", "/v1/embeddings", "chat-large", 16},
		{"openai-responses", "/v1/responses", "chat-large", 16},
	}
	text, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	c := pythonCommand(r, "vllm_bench", nil, router.URL, string(text))
	c.Path = filepath.Join(venv, "bin", "python")
	var results [][]struct {
		Success bool
		Error   string
		Text    string  `json:"generated_text"`
		Output  int     `json:"output_tokens"`
		TTFT    float64 `json:"ttft"`
	}
	runJSON(ctx, t, r, c, &results)
	total := 0
	for i, outputs := range results {
		total += calls[i].N
		generates := calls[i].Kind != "openai-embeddings"
		for _, o := range outputs {
			if !o.Success || generates && (o.Output != 16 || o.Text == "" || o.TTFT <= 0) {
				t.Errorf("%s: %+v", calls[i].Kind, o)
			}
		}
		if len(outputs) != calls[i].N {
			t.Errorf("%s: %d results", calls[i].Kind, len(outputs))
		}
	}
	recorded := map[string]int{}
	for _, u := range usageRecords(ctx, t, router, total) {
		if u.Outcome != "ok" || u.Estimated || u.Prompt == 0 || u.Completion != 16 && u.Path != "/v1/embeddings" {
			t.Errorf("a request is recorded as %+v", u)
		}
		recorded[u.Path]++
	}
	for _, c := range calls {
		if recorded[c.Path] != c.N {
			t.Errorf("%s: %d usage records for %d requests", c.Path, recorded[c.Path], c.N)
		}
	}
}
