// Package cdi owns the files through which a container runtime gives containers
// what their claims have: one CDI spec per claim, with one device for each
// allocated result. The driver writes and removes them. The ledger is the
// truth: a file can be made again from its entry at any time, so files are
// replaced atomically and not synced. Only files whose name begins with our
// vendor and class are ever touched.
package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
)

const (
	// Kind is the vendor and class of every device.
	Kind = identity.Domain + "/" + class
	// DefaultDir is where runtimes look for specs that come and go.
	DefaultDir = "/var/run/cdi"

	class  = "claim"
	prefix = identity.Domain + "-" + class + "_"
	suffix = ".json"
	// maxFile bounds a spec as it is read, in bytes.
	maxFile = 1 << 20
)

// Options of Specs.
type Options struct {
	Dir string     // absolute; empty: DefaultDir
	FS  durable.FS // nil: durable.OS
	Log *slog.Logger
}

// Specs are the spec files of a node. It is safe for concurrent use with
// different claims.
type Specs struct {
	dir string
	fs  durable.FS
	log *slog.Logger
}

// New gives the specs of a directory, which the first Write makes.
func New(o Options) *Specs {
	s := &Specs{dir: o.Dir, fs: o.FS, log: o.Log}
	if s.dir == "" {
		s.dir = DefaultDir
	}
	if s.fs == nil {
		s.fs = durable.OS
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// Device is one device of a claim's spec.
type Device struct {
	Name  string
	Edits ledger.Edits
}

// DeviceName is the name of the CDI device of an allocated result. The request
// is as in the allocation; a subrequest's "/" becomes ".".
func DeviceName(uid, request, device, shareID string) string {
	name := uid + "-" + strings.ReplaceAll(request, "/", ".") + "-" + device
	if shareID != "" {
		name += "-" + shareID
	}
	return name
}

// Qualified is a device's name as the kubelet and runtimes want it.
func Qualified(name string) string { return Kind + "=" + name }

// DevicesOf gives the devices of a claim's spec.
func DevicesOf(e ledger.Entry) []Device {
	var devices []Device
	for i := range e.Results {
		if r := &e.Results[i]; r.CDI != "" {
			devices = append(devices, Device{r.CDI, r.Edits})
		}
	}
	return devices
}

// Write makes a claim's spec say what devices have, and reports whether it had
// to. The spec is complete and valid whenever a runtime reads it. A claim
// without devices has no spec, and a device that gives a container nothing is
// an error: CDI knows neither.
func (s *Specs) Write(uid string, devices []Device) (written bool, err error) {
	if len(devices) == 0 {
		return false, s.Remove(uid)
	}
	data, err := render(uid, devices)
	if err != nil {
		return false, err
	}
	if same, err := s.has(uid, data); err == nil && same {
		return false, nil
	}
	if err := s.replace(uid, data); err != nil {
		return false, fmt.Errorf("write CDI spec of claim %s: %w", uid, err)
	}
	return true, nil
}

func (s *Specs) replace(uid string, data []byte) error {
	path := s.path(uid)
	if err := s.fs.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	temp := filepath.Join(s.dir, prefix+uid+tempSuffix)
	f, err := s.fs.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = s.fs.Rename(temp, path)
	}
	if err != nil {
		_ = s.fs.Remove(temp)
	}
	return err
}

// tempSuffix ends the name of a spec that is being written: runtimes read only
// .json and .yaml.
const tempSuffix = ".tmp"

// Matches reports whether a claim's spec says what devices have.
func (s *Specs) Matches(uid string, devices []Device) (bool, error) {
	if len(devices) == 0 {
		return s.absent(uid)
	}
	data, err := render(uid, devices)
	if err != nil {
		return false, err
	}
	return s.has(uid, data)
}

func (s *Specs) absent(uid string) (bool, error) {
	_, err := s.fs.Lstat(s.path(uid))
	switch {
	case missing(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read CDI spec of claim %s: %w", uid, err)
	}
	return false, nil
}

func (s *Specs) has(uid string, data []byte) (bool, error) {
	stored, err := durable.ReadFile(s.fs, s.path(uid), maxFile)
	if missing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read CDI spec of claim %s: %w", uid, err)
	}
	return bytes.Equal(stored, data), nil
}

// Remove takes a claim's spec away; one that is not there is fine.
func (s *Specs) Remove(uid string) error {
	if !plain(uid) {
		return nil
	}
	if err := s.fs.Remove(s.path(uid)); err != nil && !missing(err) {
		return fmt.Errorf("remove CDI spec of claim %s: %w", uid, err)
	}
	return nil
}

// List gives the UIDs of the claims that have a spec.
func (s *Specs) List() ([]string, error) {
	var uids []string
	err := s.each(func(name string) error {
		if uid, ok := strings.CutSuffix(name, suffix); ok {
			uids = append(uids, uid)
		}
		return nil
	})
	return uids, err
}

// Sweep removes the specs of claims that are not to be kept, and what an
// interrupted write left. It gives the UIDs whose specs went.
func (s *Specs) Sweep(keep func(uid string) bool) (removed []string, err error) {
	err = s.each(func(name string) error {
		uid, spec := strings.CutSuffix(name, suffix)
		if spec && keep(uid) || !spec && !strings.HasSuffix(name, tempSuffix) {
			return nil
		}
		if err := s.fs.Remove(filepath.Join(s.dir, prefix+name)); err != nil && !missing(err) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
		if spec {
			s.log.Info("a CDI spec of no claim is removed", slog.String("claim", uid))
			removed = append(removed, uid)
		}
		return nil
	})
	return removed, err
}

// each visits the rest of the name of every file that is ours.
func (s *Specs) each(visit func(name string) error) error {
	entries, err := s.fs.ReadDir(s.dir)
	if err != nil && !missing(err) {
		return fmt.Errorf("list CDI specs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if name, ours := strings.CutPrefix(e.Name(), prefix); ours && e.Type().IsRegular() {
			errs = append(errs, visit(name))
		}
	}
	return errors.Join(errs...)
}

// missing reports whether an error says that a spec is not there: nothing is
// below a file that stands where the folder should, and a folder with something
// in it that stands where the spec should is none.
func missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENOTEMPTY)
}

func (s *Specs) path(uid string) string { return filepath.Join(s.dir, prefix+uid+suffix) }

// plain reports whether a UID can be part of a file's name.
func plain(uid string) bool {
	return uid != "" && !strings.ContainsAny(uid, "/\x00")
}

// render gives the bytes of a claim's spec, after the library has found it to
// be valid.
func render(uid string, devices []Device) ([]byte, error) {
	if !plain(uid) {
		return nil, fmt.Errorf("write CDI spec: uid %q is none", uid)
	}
	raw := &specs.Spec{Kind: Kind}
	for _, d := range devices {
		raw.Devices = append(raw.Devices, specs.Device{Name: d.Name, ContainerEdits: edits(d.Edits)})
	}
	version, err := specs.MinimumRequiredVersion(raw)
	if err != nil {
		return nil, fmt.Errorf("write CDI spec of claim %s: %w", uid, err)
	}
	raw.Version = version
	if err := validate(raw); err != nil {
		return nil, fmt.Errorf("write CDI spec of claim %s: %w", uid, err)
	}
	data, err := json.Marshal(raw)
	if err != nil {
		return nil, fmt.Errorf("write CDI spec of claim %s: %w", uid, err)
	}
	return append(data, '\n'), nil
}

func edits(e ledger.Edits) specs.ContainerEdits {
	out := specs.ContainerEdits{Env: e.Env}
	for _, n := range e.DeviceNodes {
		out.DeviceNodes = append(out.DeviceNodes, &specs.DeviceNode{Path: n.Path, HostPath: n.HostPath})
	}
	for _, m := range e.Mounts {
		out.Mounts = append(out.Mounts, &specs.Mount{HostPath: m.Host, ContainerPath: m.Container, Options: m.Options})
	}
	return out
}

// validate holds a spec to the library's rules. The library validates a whole
// spec only as it reads a file, so its parts are put to it.
func validate(raw *specs.Spec) error {
	if len(raw.Devices) == 0 {
		return errors.New("no devices")
	}
	seen := map[string]bool{}
	for i := range raw.Devices {
		d := &raw.Devices[i]
		if err := parser.ValidateDeviceName(d.Name); err != nil {
			return err
		}
		if seen[d.Name] {
			return fmt.Errorf("device %q twice", d.Name)
		}
		seen[d.Name] = true
		if e := empty(&d.ContainerEdits); e {
			return fmt.Errorf("device %q gives a container nothing", d.Name)
		}
		if err := (&cdilib.ContainerEdits{ContainerEdits: &d.ContainerEdits}).Validate(); err != nil {
			return fmt.Errorf("device %q: %w", d.Name, err)
		}
	}
	return specs.ValidateVersion(raw)
}

// empty reports whether edits change nothing, which the library refuses.
func empty(e *specs.ContainerEdits) bool {
	return len(e.Env)+len(e.DeviceNodes)+len(e.Mounts) == 0
}
