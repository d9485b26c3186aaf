package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// LlamaAlias is the name under which every llama-server of a Rig serves.
const LlamaAlias = "smollm2"

// GGUFRepo is the repository that WriteGGUFRepo makes.
const GGUFRepo = "hearth-demo/SmolLM2-135M-Instruct-GGUF"

// Llama is a running llama-server.
type Llama struct {
	*Process
	URL string // http://127.0.0.1:port
}

// WriteGGUFRepo lays the pinned GGUF out below an origin's root as GGUFRepo.
func (r *Rig) WriteGGUFRepo(root string) error {
	dir := filepath.Join(root, filepath.FromSlash(GGUFRepo))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write gguf repository: %w", err)
	}
	to := filepath.Join(dir, filepath.Base(r.Deps.GGUF))
	if err := os.Link(r.Deps.GGUF, to); err != nil {
		if err := copyFile(r.Deps.GGUF, to); err != nil {
			return fmt.Errorf("write gguf repository: %w", err)
		}
	}
	readme := "---\nlicense: apache-2.0\n---\n# SmolLM2-135M-Instruct, quantised to Q4_1\n"
	if err := os.WriteFile(filepath.Join(dir, "README.md"), []byte(readme), 0o644); err != nil {
		return fmt.Errorf("write gguf repository: %w", err)
	}
	return nil
}

// LlamaOptions describe a llama-server.
type LlamaOptions struct {
	Name   string
	Addr   string   // host:port to listen on; empty takes a free one
	Source []string // where the model is: -hf or -m and what follows
	Env    []string
	Pod    *Pod // where it runs; nil is this machine
}

// StartLlama starts llama-server on one thread (two that share a busy core
// wait for each other) with room for two conversations of 2,048
// tokens and waits until it has generated one token. Where the processor lacks
// what the build needs, the error says so.
func (r *Rig) StartLlama(ctx context.Context, opts LlamaOptions) (*Llama, error) {
	addr := opts.Addr
	if addr == "" {
		var err error
		if addr, err = FreeAddr(ctx); err != nil {
			return nil, err
		}
	}
	_, port, _ := strings.Cut(addr, ":")
	args := append(slices.Clip(opts.Source),
		"--alias", LlamaAlias, "--host", "127.0.0.1", "--port", port, "--device", "none", "--no-webui",
		"--metrics", "--slots", "-t", "1", "-np", "2", "-c", "4096")
	c := Command{Name: opts.Name, Path: r.Deps.LlamaServer, Args: args, Env: opts.Env}
	if opts.Pod != nil {
		var err error
		if c, err = opts.Pod.LlamaServer(opts.Name, args, opts.Env...); err != nil {
			return nil, err
		}
	}
	p, err := r.Start(c)
	if err != nil {
		return nil, err
	}
	l := &Llama{Process: p, URL: "http://" + addr}
	err = Until(ctx, opts.Name+" to load the model", func(ctx context.Context) (bool, error) {
		return Answers(ctx, l.URL+"/health")
	}, p)
	if err != nil {
		if strings.Contains(err.Error(), "illegal instruction") {
			err = fmt.Errorf("%w\nthis build of llama-server needs a processor with AVX2 and FMA", err)
		}
		return nil, err
	}
	return l, l.preflight(ctx)
}

// preflight makes the engine generate one token.
func (l *Llama) preflight(ctx context.Context) error {
	var answer struct {
		Tokens int `json:"tokens_predicted"`
	}
	body := `{"prompt":"hello","n_predict":1,"cache_prompt":false}`
	if err := PostJSON(ctx, l.URL+"/completion", body, &answer); err != nil {
		return fmt.Errorf("generate one token with %s: %w: %s", l.Name, err, l.LogTail())
	}
	if answer.Tokens != 1 {
		return fmt.Errorf("generate one token with %s: it says it generated %d", l.Name, answer.Tokens)
	}
	return nil
}

// PostJSON posts a JSON body and decodes the JSON answer.
func PostJSON(ctx context.Context, url, body string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	return doJSON(req, into)
}

// GetJSON decodes the JSON answer of a GET.
func GetJSON(ctx context.Context, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	return doJSON(req, into)
}

func doJSON(req *http.Request, into any) error {
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %s", req.Method, req.URL, resp.Status, text)
	}
	return json.Unmarshal(text, into)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
