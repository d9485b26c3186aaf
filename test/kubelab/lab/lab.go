package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/machine"
	"github.com/hearth-dev/hearth/test/kubelab/programs"
)

// hostPath is the PATH of machines and what runs in them.
const hostPath = "/opt/kubelab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Up brings a lab up and returns when every node is Ready. Programs that are not
// in the cache are built first, which takes many minutes once. After an error
// what was begun is left to be looked at; Down removes it. It needs root.
func Up(ctx context.Context, o Options) (*Lab, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("bring up lab: namespaces and mounts need root")
	}
	source, sourceErr := programs.Source()
	if sourceErr != nil {
		return nil, sourceErr
	}
	cache, err := programs.Cache()
	if err != nil {
		return nil, err
	}
	built, err := programs.Build(ctx, source, cache, o.Log)
	if err != nil {
		return nil, err
	}
	unlock, err := lock(o.Name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := Open(o.Name); err == nil && !o.Replace {
		return nil, fmt.Errorf("bring up lab %s: %w", o.Name, ErrUp)
	}
	if err := takeDown(ctx, o.Name); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Within, fmt.Errorf("%s have passed", o.Within))
	defer cancel()
	l := &Lab{programs: built}
	l.state = state{
		Version: stateVersion, Name: o.Name, Created: time.Now().UTC(), Programs: built.Dir,
		FeatureGates: o.FeatureGates, RuntimeConfig: o.RuntimeConfig, Args: o.Args, Forwards: slices.Clone(o.Forwards),
	}
	for _, image := range o.Images {
		image, err := filepath.Abs(image)
		if err != nil {
			return nil, fmt.Errorf("bring up lab: %w", err)
		}
		l.Images = append(l.Images, image)
	}
	if l.dir, err = directory(o.Name); err != nil {
		return nil, err
	}
	if l.groups, err = openGroups(o.Name); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(l.path("control"), 0o755); err != nil {
		return nil, fmt.Errorf("make lab: %w", err)
	}
	if err := installProgram(ctx, o.Program, source, l.path("kubelab")); err != nil {
		return nil, err
	}
	if err := built.PackPause(ctx, source, l.path("pause.tar")); err != nil {
		return nil, err
	}
	fmt.Fprintln(o.Log, "starting the control plane")
	if err := l.startControl(ctx); err != nil {
		return nil, err
	}
	fmt.Fprintf(o.Log, "starting %d nodes\n", o.Nodes)
	if err := l.addNodes(ctx, o.Nodes); err != nil {
		return nil, err
	}
	l.Ready = true
	return l, l.save()
}

// installProgram puts the program kubelab into the lab, whose machines run it
// also when the original has been built anew.
func installProgram(ctx context.Context, program, source, to string) error {
	if program == "" {
		cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", to, ".")
		cmd.Dir = source
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build kubelab: %w: %s", err, output)
		}
		return nil
	}
	from, err := os.Open(program)
	if err != nil {
		return fmt.Errorf("copy kubelab: %w", err)
	}
	defer from.Close()
	file, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return fmt.Errorf("copy kubelab: %w", err)
	}
	_, err = io.Copy(file, from)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("copy kubelab: %w", err)
	}
	return nil
}

// Kubeconfig is the path of the administrator's kubeconfig for this system.
func (l *Lab) Kubeconfig() string { return l.path("kubeconfig") }

// APIServer is the API server's URL on this system's loopback.
func (l *Lab) APIServer() string {
	return "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(l.APIPort))
}

// Address is the "address:port" on this system's loopback at which a forward of
// Options answers; empty where none has the name.
func (l *Lab) Address(forward string) string {
	for _, f := range l.Forwards {
		if f.Name == forward {
			return net.JoinHostPort("127.0.0.1", strconv.Itoa(f.Local))
		}
	}
	return ""
}

// Dir is the lab's directory.
func (l *Lab) Dir() string { return l.dir }

// Down takes the lab down.
func (l *Lab) Down(ctx context.Context) error { return Down(ctx, l.Name) }

// Kubectl gives a command that runs the lab's own kubectl as administrator.
func (l *Lab) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, l.programs.Path("kubernetes"), append([]string{"kubectl"}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+l.Kubeconfig())
	return cmd
}

func (l *Lab) writeForwards() error {
	text, err := json.Marshal(l.Forwards)
	if err != nil {
		return fmt.Errorf("write forwards: %w", err)
	}
	return writeFiles(l.path("control"), map[string][]byte{"forwards.json": text})
}

// Log gives the path of a process's log on "control" or a node: of kubelet,
// containerd and kube-proxy on a node.
func (l *Lab) Log(machineName, process string) string {
	if machineName == "control" {
		return l.path("control", "logs", process+".log")
	}
	return l.path("nodes", machineName, "logs", process+".log")
}

// anyEnded is an error, with the end of its log, if a process has ended that
// has to run.
func (l *Lab) anyEnded(ctx context.Context, m *machine.Machine, name string, must ...string) error {
	statuses, err := m.Statuses(ctx)
	if err != nil {
		return err
	}
	for _, s := range statuses {
		if slices.Contains(must, s.Name) && !s.Running {
			return fmt.Errorf("%s on %s has ended (%s): %s", s.Name, name, s.Ended, Tail(l.Log(name, s.Name), 15))
		}
	}
	return nil
}

// Tail gives the last lines of a file, to go with an error.
func Tail(file string, lines int) string {
	const most = 64 << 10
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return "it has no log"
	}
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return "the end of " + file + ":\n  " + strings.Join(all[max(0, len(all)-lines):], "\n  ")
}
