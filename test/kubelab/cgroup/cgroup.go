// Package cgroup makes, kills and removes the control groups of a lab, on
// systems with version 1, version 2 or both at once.
//
// It owns every group below the name it is opened with, in every hierarchy, and
// touches no other. The lab puts each process of its machines into such a group
// at birth, so that what a group holds is what the lab has to end: no process is
// ever looked up by its name.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Groups is a tree of groups with one root in every hierarchy.
type Groups struct {
	name    string
	unified string   // where version 2 is mounted
	v1      []string // where the controllers of version 1 are
}

// Open finds the hierarchies. name is the root's path in each of them, "/x/y".
// It makes nothing. The system must have version 2 mounted, beside version 1 or
// alone: only it can tell what a group holds and end it as one.
func Open(name string) (*Groups, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	defer mounts.Close()
	g := &Groups{name: name}
	scanner := bufio.NewScanner(mounts)
	for scanner.Scan() {
		at, kind, ok := parseMount(scanner.Text())
		switch {
		case !ok:
		case kind == "cgroup2" && g.unified == "":
			g.unified = at
		case kind == "cgroup" && !slices.Contains(g.v1, at):
			g.v1 = append(g.v1, at)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	if g.unified == "" {
		return nil, errors.New("find cgroups: version 2 is mounted nowhere")
	}
	return g, nil
}

// parseMount gives mount point and type of a line of mountinfo whose mount
// shows the root of its file system.
func parseMount(line string) (at, kind string, ok bool) {
	before, after, found := strings.Cut(line, " - ")
	fields, kinds := strings.Fields(before), strings.Fields(after)
	if !found || len(fields) < 5 || len(kinds) == 0 || fields[3] != "/" {
		return "", "", false
	}
	return fields[4], kinds[0], true
}

// hierarchies gives every hierarchy's mount point.
func (g *Groups) hierarchies() []string { return append([]string{g.unified}, g.v1...) }

// Path is the path of a group in each hierarchy; "" is the root.
func (g *Groups) Path(group string) string { return filepath.Join(g.name, group) }

// Make makes a group, and those above it, in every hierarchy. One that is there
// stays.
func (g *Groups) Make(group string) error {
	for _, at := range g.hierarchies() {
		dir := at
		for step := range strings.SplitSeq(strings.Trim(g.Path(group), "/"), "/") {
			if at == g.unified {
				delegate(dir)
			}
			dir = filepath.Join(dir, step)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make cgroup: %w", err)
			}
			if err := inheritCPUs(dir); err != nil {
				return fmt.Errorf("make cgroup: %w", err)
			}
		}
	}
	return nil
}

// delegate turns on, for the groups below dir, what controllers dir has. On a
// system where version 1 has the controllers there are none to turn on, and a
// controller that cannot be had is missed, if at all, by the kubelet, which says so.
func delegate(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return
	}
	for name := range strings.FieldsSeq(string(text)) {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0o644)
	}
}

// inheritCPUs gives a new group of the version 1 controller cpuset what the one
// above has; without it no process can enter.
func inheritCPUs(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(string(own)) != "" {
			continue
		}
		if err != nil {
			return err
		}
		above, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(string(above)) == "" {
			continue // version 2, where empty means the same as above
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), above, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Unified is where a group's directory of version 2 is.
func (g *Groups) Unified(group string) string { return filepath.Join(g.unified, g.Path(group)) }

// Directory opens a group's directory of version 2, for a process to be born in.
func (g *Groups) Directory(group string) (*os.File, error) {
	return os.Open(g.Unified(group))
}

// Processes counts the processes in a group and below; a group that is not there has none.
func (g *Groups) Processes(group string) (int, error) {
	count := 0
	err := filepath.WalkDir(filepath.Join(g.unified, g.Path(group)), func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || entry.Name() != "cgroup.procs" {
			return err
		}
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || strings.Contains(fmt.Sprint(err), "no such device") {
			return nil // removed meanwhile
		}
		count += strings.Count(string(text), "\n")
		return err
	})
	return count, err
}

// Kill ends every process in a group and below and waits until they are gone.
func (g *Groups) Kill(ctx context.Context, group string) error {
	dir := filepath.Join(g.unified, g.Path(group))
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0o644)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kill cgroup %s: %w", g.Path(group), err)
		}
		events, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("kill cgroup %s: %w", g.Path(group), err)
		}
		if !strings.Contains(string(events), "populated 1") {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("kill cgroup %s: it still holds processes: %w", g.Path(group), context.Cause(ctx))
		}
	}
}

// Remove removes a group and those below it from every hierarchy. No process
// may be in them; one that is just ending is waited for.
func (g *Groups) Remove(ctx context.Context, group string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var left error
		for _, at := range g.hierarchies() {
			left = errors.Join(left, removeTree(filepath.Join(at, g.Path(group))))
		}
		if left == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup: %w", errors.Join(left, context.Cause(ctx)))
		}
	}
}

// removeTree removes directories from the bottom up; the files of a group go
// with it.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			err = errors.Join(err, removeTree(filepath.Join(dir, entry.Name())))
		}
	}
	if err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Exists reports whether the root is there in any hierarchy.
func (g *Groups) Exists() bool {
	return slices.ContainsFunc(g.hierarchies(), func(at string) bool {
		_, err := os.Stat(filepath.Join(at, g.name))
		return err == nil
	})
}
