package bpf

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// decidedSpec is the map of classes that the reader decided by cgroup. No program
// knows it: it lies with the counts so that a later reader counts what passed
// before it under the same classes.
func decidedSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "decided", Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: MaxKeys}
}

// openDecided makes the map, or takes the one that is pinned.
func (p *Probe) openDecided() (err error) {
	spec := decidedSpec()
	if p.pins != "" {
		spec.Pinning = ebpf.PinByName
		if p.decided, err = ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: p.pins}); err == nil {
			return nil
		}
		spec.Pinning = ebpf.PinNone
	}
	p.decided, err = ebpf.NewMap(spec)
	return err
}

// Decided gives the classes that Decide keeps, by cgroup.
func (p *Probe) Decided() (map[uint64]traffic.Class, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return nil, fmt.Errorf("read decided classes: %w", os.ErrClosed)
	}
	all := map[uint64]traffic.Class{}
	var cgroup uint64
	var class uint32
	it := p.decided.Iterate()
	for it.Next(&cgroup, &class) {
		all[cgroup] = traffic.Class(class)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read decided classes: %w", explain(err))
	}
	return all, nil
}

// Decide keeps the class of what a cgroup's counts leave open, as long as the
// counts are kept; ByCgroup forgets it. It fails where there is no more room.
func (p *Probe) Decide(cgroup uint64, class traffic.Class) error {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("keep decided class: %w", os.ErrClosed)
	}
	if class == traffic.ByCgroup {
		if err := p.decided.Delete(cgroup); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget decided class: %w", explain(err))
		}
		return nil
	}
	if err := p.decided.Put(cgroup, uint32(class)); err != nil {
		return fmt.Errorf("keep decided class: %w", explain(err))
	}
	return nil
}
