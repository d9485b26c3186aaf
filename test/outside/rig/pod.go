package rig

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Pod is how a container sees the node: a view of the weight cache mounted
// read-only, a user that owns nothing, and no more than that. With root's
// rights it is a private mount namespace and uid 65534; without them it is the
// view's own path and this user.
type Pod struct {
	View    string // the view as the pod sees it
	Home    string // the only folder it can write to
	venv    string
	scripts string
	rig     *Rig
	mounts  [][2]string // from, to
}

// podUID is nobody on most systems: no file of the cache belongs to it.
const podUID = 65534

// NewPod prepares a pod over a view's directory. It starts nothing.
func (r *Rig) NewPod(view string) (*Pod, error) {
	venv := filepath.Dir(filepath.Dir(r.Deps.Python))
	scripts := filepath.Join(r.Root, "test", "outside", "testdata")
	base, err := os.MkdirTemp(r.Dir, "pod-")
	if err != nil {
		return nil, fmt.Errorf("make pod: %w", err)
	}
	p := &Pod{rig: r, View: view, Home: filepath.Join(base, "home"), venv: venv, scripts: scripts}
	if err := os.Mkdir(p.Home, 0o755); err != nil {
		return nil, fmt.Errorf("make pod: %w", err)
	}
	if os.Geteuid() != 0 {
		return p, nil
	}
	for _, dir := range []string{r.Dir, base} {
		if err := os.Chmod(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make pod: %w", err)
		}
	}
	if err := os.Chown(p.Home, podUID, podUID); err != nil {
		return nil, fmt.Errorf("make pod: %w", err)
	}
	for _, m := range []struct {
		name string
		path *string
	}{{"view", &p.View}, {"venv", &p.venv}, {"scripts", &p.scripts}} {
		to := filepath.Join(base, m.name)
		if err := os.Mkdir(to, 0o755); err != nil {
			return nil, fmt.Errorf("make pod: %w", err)
		}
		p.mounts = append(p.mounts, [2]string{*m.path, to})
		*m.path = to
	}
	return p, nil
}

// Python is a command that runs a script of testdata in the pod.
func (p *Pod) Python(name, script string, args []string, env ...string) Command {
	return p.command(name, filepath.Join(p.venv, "bin", "python"), append([]string{filepath.Join(p.scripts, script)}, args...), env)
}

// LlamaServer is a command that runs llama-server in the pod.
func (p *Pod) LlamaServer(name string, args []string, env ...string) (Command, error) {
	inside, err := filepath.Rel(filepath.Dir(filepath.Dir(p.rig.Deps.Python)), p.rig.Deps.LlamaServer)
	if err != nil {
		return Command{}, fmt.Errorf("find llama-server in the pod: %w", err)
	}
	return p.command(name, filepath.Join(p.venv, inside), args, env), nil
}

func (p *Pod) command(name, path string, args, env []string) Command {
	c := Command{Name: name, Path: path, Args: args, Dir: p.Home, Env: append([]string{"HOME=" + p.Home}, env...)}
	if len(p.mounts) == 0 {
		return c
	}
	// The shell replaces itself, so that the program is what is ended.
	var script strings.Builder
	script.WriteString("set -e\n")
	for _, m := range p.mounts {
		from, to := quote(m[0]), quote(m[1])
		fmt.Fprintf(&script, "mount --bind %s %s\nmount -o remount,bind,ro %s\n", from, to, to)
	}
	fmt.Fprintf(&script, "exec setpriv --reuid %d --regid %d --clear-groups -- \"$0\" \"$@\"\n", podUID, podUID)
	c.Args = append([]string{"--mount", "--propagation", "private", "--", "/bin/sh", "-c", script.String(), path}, args...)
	c.Path, c.Dir = unshare(), "/"
	return c
}

// unshare is a program of util-linux, which every Linux has.
func unshare() string {
	if path, err := exec.LookPath("unshare"); err == nil {
		return path
	}
	return "/usr/bin/unshare"
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
