//go:build vllm

package vllm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// How every engine is served.
const (
	base    = "acme/tiny"         // the model, at the hub and as served
	lora    = "acme/tiny-adapter" // an adapter for it, at the hub
	adapted = "tiny-adapted"      // the model with it, as served

	blockTokens = 32   // vLLM's CPU kernels take multiples of it
	blocks      = 512  // of KV cache
	maxTokens   = 2048 // of prompt and answer
	maxRunning  = 4    // requests computed at once: a fifth waits

	readyLimit = 5 * time.Minute
)

// source is where an engine finds its weights.
type source struct {
	model   string   // what `vllm serve` is given
	adapter string   // what the adapter is named by
	folders []string // that it sees, read-only
	env     []string
	user    int
}

// engine is one vLLM process.
type engine struct {
	*rig.Process
	name   string // of the endpoint
	url    string // http://127.0.0.1:port
	source source
	runs   int // how often it was started
}

// start starts the engine and does not wait for it.
func (e *engine) start(r *rig.Rig, root string) error {
	e.runs++
	_, port, _ := strings.Cut(strings.TrimPrefix(e.url, "http://"), ":")
	args := []string{root, "--user", strconv.Itoa(e.source.user)}
	for _, folder := range e.source.folders {
		args = append(args, "--ro", folder)
	}
	for _, setting := range append([]string{
		"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_HOST_IP=127.0.0.1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
		"HF_HUB_DISABLE_TELEMETRY=1", "HF_HUB_DISABLE_UPDATE_CHECK=1", "no_proxy=*",
	}, e.source.env...) {
		args = append(args, "--env", setting)
	}
	args = append(args, "--", "vllm", "serve", e.source.model, "--served-model-name", base,
		"--host", "127.0.0.1", "--port", port, "--enforce-eager",
		"--max-model-len", strconv.Itoa(maxTokens), "--max-num-seqs", strconv.Itoa(maxRunning),
		"--block-size", strconv.Itoa(blockTokens), "--num-gpu-blocks-override", strconv.Itoa(blocks),
		"--enable-prompt-tokens-details", "--enable-lora", "--lora-modules", adapted+"="+e.source.adapter)
	var err error
	e.Process, err = r.Start(rig.Command{
		Name: fmt.Sprintf("%s-%d", e.name, e.runs), Path: filepath.Join(r.Root, "scripts", "vllm-root-exec"), Args: args,
	})
	return err
}

// ready waits until the engine answers.
func (e *engine) ready(ctx context.Context) error {
	return rig.Until(ctx, e.name+" to answer", func(ctx context.Context) (bool, error) {
		return rig.Answers(ctx, e.url+"/health")
	}, e.Process)
}

// findRoot is the folder that scripts/vllm-root built.
func findRoot(ctx context.Context, r *rig.Rig) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(r.Root, "scripts", "vllm-root"), "--print").Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return "", errors.New(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return "", fmt.Errorf("find vLLM: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// counters are samples of an engine's metrics page, by name, added up over labels.
type counters map[string]float64

// Names of vLLM's that the tests read.
const (
	runningNow   = "vllm:num_requests_running"
	waitingNow   = "vllm:num_requests_waiting"
	promptTotal  = "vllm:prompt_tokens_total"
	cachedTotal  = "vllm:prompt_tokens_cached_total"
	outputTotal  = "vllm:generation_tokens_total"
	successTotal = "vllm:request_success_total"
)

// page reads the engine's metrics page.
func (e *engine) page(ctx context.Context) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.url+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	return io.ReadAll(io.LimitReader(resp.Body, 4<<20))
}

func (e *engine) counters(ctx context.Context) (counters, error) {
	page, err := e.page(ctx)
	if err != nil {
		return nil, err
	}
	found := counters{}
	for line := range bytes.Lines(page) {
		text := strings.TrimSpace(string(line))
		end, space := strings.IndexAny(text, "{ "), strings.LastIndexByte(text, ' ')
		if end <= 0 || text[0] == '#' {
			continue
		}
		if value, err := strconv.ParseFloat(text[space+1:], 64); err == nil {
			found[text[:end]] += value
		}
	}
	if _, ok := found[promptTotal]; !ok {
		return nil, fmt.Errorf("read %s/metrics: no %s among %d names", e.url, promptTotal, len(found))
	}
	return found, nil
}

// idle says whether the engine computes nothing and has nothing to do.
func (e *engine) idle(ctx context.Context) (bool, error) {
	c, err := e.counters(ctx)
	return err == nil && c[runningNow] == 0 && c[waitingNow] == 0, err
}
