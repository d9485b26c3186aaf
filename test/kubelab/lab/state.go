package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/cgroup"
	"github.com/hearth-dev/hearth/test/kubelab/machine"
	"github.com/hearth-dev/hearth/test/kubelab/programs"
)

// stateVersion is that of state.json; a file of another is taken down, not read.
const stateVersion = 1

// state is what state.json in a lab's directory keeps for the next program.
type state struct {
	Version  int       `json:"version"`
	Name     string    `json:"name"`
	Created  time.Time `json:"created"`
	Ready    bool      `json:"ready"` // Up came to its end
	Programs string    `json:"programs"`

	Images        []string            `json:"images"`
	FeatureGates  map[string]bool     `json:"featureGates"`
	RuntimeConfig []string            `json:"runtimeConfig"`
	Args          map[string][]string `json:"args"`

	APIPort  int              `json:"apiPort"`
	Forwards []Forward        `json:"forwards"` // Local is the port that was opened
	Control  *machine.Machine `json:"control"`
	Nodes    []*nodeState     `json:"nodes"` // by index
}

type nodeState struct {
	Name    string           `json:"name"`
	BootID  string           `json:"bootID"`
	Machine *machine.Machine `json:"machine"` // nil while it is off
}

// Lab is a cluster that is up.
type Lab struct {
	state
	dir      string
	programs programs.Programs
	groups   *cgroup.Groups
	api      *api
}

func directory(name string) (string, error) {
	cache, err := programs.Cache()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "labs", name), nil
}

// Open finds a lab that is up.
func Open(name string) (*Lab, error) {
	if name == "" {
		name = "default"
	}
	dir, err := directory(name)
	if err != nil {
		return nil, err
	}
	l := &Lab{dir: dir}
	text, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open lab: none is called %q: %w", name, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	if err := json.Unmarshal(text, &l.state); err != nil {
		return nil, fmt.Errorf("open lab %s: %w", name, err)
	}
	if l.Version != stateVersion || !l.Ready || l.Control == nil || !l.Control.Alive() {
		return nil, fmt.Errorf("open lab %s: it is what a crashed run left; take it down or bring it up anew", name)
	}
	l.programs = programs.Programs{Dir: l.Programs}
	if l.groups, err = openGroups(name); err != nil {
		return nil, err
	}
	if l.api, err = newAPI(l.APIServer(), l.path("control", "pki")); err != nil {
		return nil, err
	}
	return l, nil
}

func openGroups(name string) (*cgroup.Groups, error) { return cgroup.Open("/kubelab-" + name) }

// save writes state.json, whole or not at all.
func (l *Lab) save() error {
	text, err := json.MarshalIndent(l.state, "", "  ")
	if err != nil {
		return fmt.Errorf("write state of lab: %w", err)
	}
	file := l.path("state.json")
	if err := os.WriteFile(file+".new", text, 0o600); err != nil {
		return fmt.Errorf("write state of lab: %w", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("write state of lab: %w", err)
	}
	return nil
}

func (l *Lab) path(elements ...string) string {
	return filepath.Join(append([]string{l.dir}, elements...)...)
}

// List names the labs that have a directory, up or not.
func List() ([]string, error) {
	dir, err := directory("")
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// Down takes a lab down, complete or not: it ends what is in the lab's cgroups
// and removes them and the lab's directory. A lab that is not there is down.
func Down(ctx context.Context, name string) error {
	if name == "" {
		name = "default"
	}
	unlock, err := lock(name)
	if err != nil {
		return err
	}
	defer unlock()
	return takeDown(ctx, name)
}

func takeDown(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("a minute has passed"))
	defer cancel()
	groups, err := openGroups(name)
	if err != nil {
		return err
	}
	if err := groups.Kill(ctx, ""); err != nil {
		return fmt.Errorf("take lab %s down: %w", name, err)
	}
	if err := groups.Remove(ctx, ""); err != nil {
		return fmt.Errorf("take lab %s down: %w", name, err)
	}
	dir, err := directory(name)
	if err != nil {
		return err
	}
	// Machines mount in namespaces that died with them. Should anything be
	// mounted here all the same, what lies below is not the lab's to delete.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("take lab %s down: %w", name, err)
	}
	if strings.Contains(string(mounts), " "+dir+"/") {
		return fmt.Errorf("take lab %s down: something is mounted below %s", name, dir)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("take lab %s down: %w", name, err)
	}
	return nil
}

// lock keeps two programs from bringing up or taking down one lab at a time.
func lock(name string) (unlock func(), err error) {
	dir, err := directory(name)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, fmt.Errorf("lock lab: %w", err)
	}
	file, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock lab: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock lab %s: another program brings it up or takes it down: %w", name, err)
	}
	return func() { file.Close() }, nil
}
