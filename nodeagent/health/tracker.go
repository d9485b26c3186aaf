// Package health owns what a node believes of its devices. Facts come in, a
// pure function folds them into conditions, and readers (the report, the
// admin listener, later the kubelet and the slice publisher) take snapshots.
// The Tracker is the only writer. The package never looks at a device itself,
// never talks to a driver, and decides nothing about requests or pods.
package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/durable"
)

// ErrUnknownDevice says that a fact names a device the node does not have.
var ErrUnknownDevice = errors.New("unknown device")

// Options are what a Tracker needs.
type Options struct {
	// Devices are the node's devices, at most 256.
	Devices []device.Device
	// Table says what XIDs mean.
	Table Table
	// Path is the state file; empty keeps state in memory only.
	Path string
	// FS is the file system of the state file; nil is durable.OS.
	FS durable.FS
	// BootID identifies this boot of the node; empty where unknown. A state
	// file of another boot counts as a boot fact.
	BootID string
	// Log receives changes of conditions; nil discards.
	Log *slog.Logger
	// Now is the clock of conditions; nil is time.Now.
	Now func() time.Time
}

// Tracker folds facts into conditions and keeps them across restarts.
type Tracker struct {
	opts  Options
	facts chan request

	// quarantined is the name a malformed state file was given, empty if none was.
	quarantined string

	states map[device.ID]state // owned by Run (by New before)

	mu       sync.Mutex
	snapshot device.Snapshot
	counts   map[device.ID]map[int]uint64
	readers  map[chan struct{}]struct{}
}

type request struct {
	fact device.Fact
	done chan error
}

// New reads the state file and makes a Tracker. A malformed file is renamed
// with the suffix ".bad" and reported by Quarantined; a newer one is an error
// (ErrNewer) and stays.
func New(opts Options) (*Tracker, error) {
	if opts.FS == nil {
		opts.FS = durable.OS
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if len(opts.Devices) > maxDevices {
		return nil, fmt.Errorf("make health tracker: %d devices, at most %d are allowed", len(opts.Devices), maxDevices)
	}
	t := &Tracker{opts: opts, facts: make(chan request), readers: map[chan struct{}]struct{}{}}
	old := stored{Devices: map[device.ID]state{}}
	if opts.Path != "" {
		t.sweep()
		var err error
		old, err = load(opts.FS, opts.Path)
		if errors.Is(err, errBad) {
			if t.quarantined, err = t.quarantine(err); err != nil {
				return nil, err
			}
			old = stored{Devices: map[device.ID]state{}}
		}
		if err != nil {
			return nil, fmt.Errorf("make health tracker: %w", err)
		}
	}
	t.states = old.Devices
	now := opts.Now()
	for id, s := range t.states {
		kind := device.FactTime
		if opts.BootID != "" && old.BootID != "" && old.BootID != opts.BootID {
			kind = device.FactBoot
		}
		t.states[id], _ = next(opts.Table, s, device.Fact{Device: id, Kind: kind}, now)
	}
	t.publish()
	return t, nil
}

// sweep removes what an interrupted save left beside the state file.
func (t *Tracker) sweep() {
	dir := filepath.Dir(t.opts.Path)
	// What cannot be listed or removed costs room, never truth.
	entries, _ := t.opts.FS.ReadDir(dir)
	for _, e := range entries {
		if durable.IsTemp(e.Name()) {
			_ = t.opts.FS.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

func (t *Tracker) quarantine(cause error) (string, error) {
	bad := t.opts.Path + ".bad"
	if err := t.opts.FS.Rename(t.opts.Path, bad); err != nil {
		return "", fmt.Errorf("quarantine health state: %w", err)
	}
	t.opts.Log.Error("health state quarantined", slog.String("file", bad), slog.Any("error", cause))
	return bad, nil
}

// Quarantined is the name under which a malformed state file was kept, empty
// where there was none. Conditions of before are unknown then.
func (t *Tracker) Quarantined() string { return t.quarantined }

// Run applies facts until ctx is done and then returns nil.
func (t *Tracker) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(t.untilWake())
		select {
		case <-ctx.Done():
			return nil
		case r := <-t.facts:
			r.done <- t.apply(r.fact)
		case <-timer.C:
			for id := range t.states {
				if err := t.apply(device.Fact{Device: id, Kind: device.FactTime}); err != nil {
					t.opts.Log.Error("health state not saved", slog.Any("error", err))
				}
			}
		}
	}
}

// untilWake is the time until the passing of time changes a state, at most an hour.
func (t *Tracker) untilWake() time.Duration {
	wait := time.Hour
	for _, s := range t.states {
		if at := wake(s); !at.IsZero() {
			wait = min(wait, at.Sub(t.opts.Now()))
		}
	}
	return max(wait, 0)
}

// Apply hands a fact to Run and waits until it is folded, saved and visible.
// Errors are ErrUnknownDevice, ctx's, or of the state file; in the last case
// the fact counts and a restart may forget it.
func (t *Tracker) Apply(ctx context.Context, fact device.Fact) error {
	r := request{fact: fact, done: make(chan error, 1)}
	select {
	case t.facts <- r:
		return <-r.done
	case <-ctx.Done():
		return fmt.Errorf("apply fact: %w", context.Cause(ctx))
	}
}

func (t *Tracker) apply(fact device.Fact) error {
	if fact.Kind != device.FactTime && !t.known(fact.Device) {
		return fmt.Errorf("apply fact: %w: %q", ErrUnknownDevice, fact.Device)
	}
	after, changed := next(t.opts.Table, t.states[fact.Device], fact, t.opts.Now())
	t.states[fact.Device] = after
	var err error
	if t.opts.Path != "" && (changed || fact.Kind != device.FactTime) {
		err = save(t.opts.FS, t.opts.Path, t.opts.BootID, t.states)
	}
	if changed {
		t.opts.Log.Info("device conditions changed", slog.String("device", string(fact.Device)),
			slog.String("fact", string(fact.Kind)), slog.Int("code", fact.Code), slog.String("source", fact.Source),
			slog.String("health", device.Fold(after.conditions()).String()), slog.String("conditions", names(after.conditions())))
	}
	t.publish()
	if changed {
		t.signal()
	}
	return err
}

func (t *Tracker) known(id device.ID) bool {
	return slices.ContainsFunc(t.opts.Devices, func(d device.Device) bool { return d.ID == id })
}

// publish makes the states visible.
func (t *Tracker) publish() {
	snapshot := make(device.Snapshot, 0, len(t.opts.Devices))
	counts := map[device.ID]map[int]uint64{}
	for _, d := range t.opts.Devices {
		conditions := t.states[d.ID].conditions()
		snapshot = append(snapshot, device.State{Device: d, Health: device.Fold(conditions), Conditions: conditions})
		counts[d.ID] = t.states[d.ID].Counts
	}
	slices.SortFunc(snapshot, func(a, b device.State) int { return strings.Compare(string(a.Device.ID), string(b.Device.ID)) })
	t.mu.Lock()
	defer t.mu.Unlock()
	t.snapshot, t.counts = snapshot, counts
}

func (t *Tracker) signal() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for reader := range t.readers {
		select {
		case reader <- struct{}{}:
		default:
		}
	}
}

// Snapshot is the present state of all devices.
func (t *Tracker) Snapshot() device.Snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.snapshot
}

// Counts gives the XIDs seen, by device and code, since the state file began.
// The maps are read-only.
func (t *Tracker) Counts() map[device.ID]map[int]uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts
}

// Subscribe gives a channel that holds a signal after the snapshot changed,
// and the func that ends the subscription. Signals merge; none is lost.
func (t *Tracker) Subscribe() (<-chan struct{}, func()) {
	reader := make(chan struct{}, 1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.readers[reader] = struct{}{}
	return reader, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.readers, reader)
	}
}

func names(conditions []device.Condition) string {
	list := make([]string, len(conditions))
	for i, c := range conditions {
		list[i] = c.Key + "=" + c.Value
	}
	return strings.Join(list, " ")
}
