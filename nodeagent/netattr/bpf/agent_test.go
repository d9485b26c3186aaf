//go:build root

package bpf

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// Agent is a Probe in a process of its own, for tests that end it or take its
// rights away. Its methods have the form of net/rpc.
type Agent struct {
	probe *Probe
}

// Wish is what an Agent's Probe is opened with.
type Wish struct{ Pins, Datagrams string }

// Open opens the Probe.
func (a *Agent) Open(w Wish, _ *mover.Nothing) (err error) {
	a.probe, err = Open(Options{Pins: w.Pins, Datagrams: w.Datagrams})
	return err
}

// Drop takes all capabilities away from the process but these.
func (a *Agent) Drop(but []uint, _ *mover.Nothing) error {
	var keep uint64
	for _, capability := range but {
		keep |= 1 << capability
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(keep), Permitted: uint32(keep)},
		{Effective: uint32(keep >> 32), Permitted: uint32(keep >> 32)},
	}
	if _, _, err := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0); err != 0 {
		return fmt.Errorf("drop capabilities of all threads, for which cgo has to be off: %w", err)
	}
	return nil
}

// Sensors tells of its sensors.
func (a *Agent) Sensors(_ mover.Nothing, sensors *[]Sensor) error {
	*sensors = a.probe.Sensors()
	return nil
}

// Reading is all counts, as a list.
type Reading struct {
	Keys   []Key
	Counts []traffic.Counts
}

// Read walks and reads the counts.
func (a *Agent) Read(_ mover.Nothing, r *Reading) error {
	if err := a.probe.Walk(func(Row) {}); err != nil {
		return err
	}
	counts, err := a.probe.Counts()
	for key, c := range counts {
		r.Keys, r.Counts = append(r.Keys, key), append(r.Counts, c)
	}
	return errors.Join(err)
}
