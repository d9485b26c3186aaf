package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// layout names the types and meanings of the maps. Programs of one layout may
// run at the same time over the same maps; a change of a map's key, value or
// meaning is a new layout.
const layout = "v1"

// bpfMagic is the type of a BPF file system, BPF_FS_MAGIC of statfs(2).
const bpfMagic = 0xcafe4a11

// openMaps makes the maps, or takes those that are pinned.
func (p *Probe) openMaps(spec *ebpf.CollectionSpec) error {
	wanted := p.opts.Pins != ""
	err := p.preparePins()
	sensor := Sensor{Name: SensorPins, Wanted: wanted, On: wanted && err == nil}
	switch {
	case !wanted:
		sensor.Reason = "not asked for"
	case err != nil:
		sensor.Reason = explain(err).Error()
	}
	load := func() error {
		maps := spec.Copy()
		maps.Programs = nil
		for _, m := range maps.Maps {
			m.Pinning = ebpf.PinNone
			if p.pins != "" && m.Name != ".rodata" {
				m.Pinning = ebpf.PinByName
			}
		}
		return maps.LoadAndAssign(&p.maps, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: p.pins}})
	}
	err = load()
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		// A build of the same layout made them otherwise: that build was never
		// released. What it counted is lost, and nothing else.
		p.log.Warn("pinned maps are of another kind and are made anew", slog.String("pins", p.pins), slog.Any("error", err))
		if err := os.RemoveAll(p.pins); err != nil {
			return fmt.Errorf("remove pinned maps: %w", err)
		}
		p.kept = false
		if err := os.MkdirAll(p.pins, 0o700); err != nil {
			return fmt.Errorf("make folder for pinned maps: %w", err)
		}
		err = load()
	}
	if err != nil && p.pins != "" {
		// The file system of pins may forbid what the kernel allows.
		sensor.On, sensor.Reason = false, explain(err).Error()
		p.pins = ""
		err = load()
	}
	if err != nil {
		return err
	}
	p.sensors = append(p.sensors, sensor)
	return p.openDecided()
}

// preparePins makes the folder of this layout and scope.
func (p *Probe) preparePins() error {
	if p.opts.Pins == "" {
		return nil
	}
	var fs unix.Statfs_t
	at := p.opts.Pins
	for unix.Statfs(at, &fs) != nil && at != filepath.Dir(at) {
		at = filepath.Dir(at)
	}
	if fs.Type != bpfMagic {
		return fmt.Errorf("%s is not on a BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf), and in a container the node's", p.opts.Pins)
	}
	of := p.opts.Layout
	if of == "" {
		of = layout
	}
	dir := filepath.Join(p.opts.Pins, fmt.Sprintf("%s-cgroup-%d", of, p.opts.Scope))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make folder for pinned maps: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, netattrMapAcct)); err == nil {
		p.kept = true
	}
	p.pins = dir
	return nil
}

// keep pins a link in place of the one of the agent before, which ends with
// that: until then both count, and what one counted the other does not.
func (p *Probe) keep(name string, l link.Link) error {
	if p.pins == "" {
		return nil
	}
	path := filepath.Join(p.pins, "link_"+name)
	next := path + "_next" // a BPF file system takes no dots
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	if err := l.Pin(next); err != nil {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("pin %s: %w", name, err)
	}
	return nil
}

// pinned reports whether what was pinned is still there.
func (p *Probe) pinned() bool {
	_, err := os.Lstat(filepath.Join(p.pins, netattrMapAcct))
	return !errors.Is(err, fs.ErrNotExist)
}

// errShared says that another agent has the pinned maps as well.
var errShared = errors.New("another agent on this machine folds the pinned counts")

// own makes sure that no other process folds the counts of the same pins. A lock
// of the folder ends with the process that has it.
func (p *Probe) own() error {
	if p.pins == "" || p.owned != nil {
		return nil
	}
	dir, err := os.Open(p.pins)
	if err != nil {
		return fmt.Errorf("lock pins: %w", err)
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = dir.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return errShared
		}
		return fmt.Errorf("lock pins: %w", err)
	}
	p.owned = dir
	return nil
}

// Unpin removes everything that agents of any version pinned below a folder, so
// that their programs end with the last process that has them.
// What others have in the folder stays, and then the folder does.
func Unpin(pins string) error {
	ours, err := fs.Glob(os.DirFS(pins), "*-cgroup-*")
	if err != nil {
		return fmt.Errorf("remove pinned programs: %w", err)
	}
	for _, name := range ours {
		if err := os.RemoveAll(filepath.Join(pins, name)); err != nil {
			return fmt.Errorf("remove pinned programs: %w", err)
		}
	}
	_ = os.Remove(pins)
	return nil
}
