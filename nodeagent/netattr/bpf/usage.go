package bpf

import (
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
)

// Usage is what a Probe takes of the kernel.
type Usage struct {
	// Programs are those that are loaded, by name, with what they took since then
	// while somebody had the kernel's statistics on. A Probe never turns them on.
	Programs map[string]ProgramUsage
	// Maps are bytes of memory by the maps' names, as the kernel tells them: what
	// lies with each socket is not in them.
	Maps map[string]uint64
}

// ProgramUsage is what one program took.
type ProgramUsage struct {
	Runs uint64
	Time time.Duration
}

// Usage reads what programs and maps take.
func (p *Probe) Usage() (Usage, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return Usage{}, fmt.Errorf("read usage of network programs: %w", os.ErrClosed)
	}
	usage := Usage{Programs: map[string]ProgramUsage{}, Maps: map[string]uint64{}}
	for _, program := range p.progs {
		about, err := program.Info()
		if err != nil {
			return Usage{}, fmt.Errorf("read usage of network programs: %w", explain(err))
		}
		stats, err := program.Stats()
		if err != nil {
			return Usage{}, fmt.Errorf("read usage of network programs: %w", explain(err))
		}
		of := usage.Programs[about.Name] // it may be there more than once
		usage.Programs[about.Name] = ProgramUsage{Runs: of.Runs + stats.RunCount, Time: of.Time + stats.Runtime}
	}
	for _, m := range []*ebpf.Map{p.maps.Socks, p.maps.Acct, p.maps.Ports, p.maps.Ranges, p.maps.Here, p.maps.Accepted, p.maps.Status} {
		about, err := m.Info()
		if err != nil {
			return Usage{}, fmt.Errorf("read usage of network maps: %w", explain(err))
		}
		usage.Maps[about.Name], _ = about.Memlock()
	}
	return usage, nil
}
