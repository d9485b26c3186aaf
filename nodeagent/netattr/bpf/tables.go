package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Limits of the tables in the kernel.
const (
	MaxPorts  = 4096
	MaxRanges = 4096
	// MaxKeys is how many keys counts have; what comes past it is counted without
	// its cgroup and flight.
	MaxKeys = 16384
)

// Folded is the cgroup of counts whose cgroup is gone.
const Folded = ^uint64(0)

// ended is the flight, in the kernel alone, under which counts lie that were
// folded into a cgroup that lives: the programs go on to write the key without
// flight, and what a reader adds there could undo what they add meanwhile.
const ended = ^uint32(0)

// Key is what counts are kept by.
type Key struct {
	Cgroup    uint64 // inode of the cgroup's directory; 0: not known
	Flight    uint32 // pull that marked the connection; 0: none
	Class     traffic.Class
	Locality  traffic.Locality
	Transport traffic.Transport
}

func (k Key) kernel() netattrKey {
	return netattrKey{Cgroup: k.Cgroup, Flight: k.Flight, Class: uint8(k.Class), Locality: uint8(k.Locality), Transport: uint8(k.Transport)}
}

func keyOf(k netattrKey) Key {
	if k.Flight == ended {
		k.Flight = 0
	}
	return Key{
		Cgroup: k.Cgroup, Flight: k.Flight, Class: traffic.Class(k.Class), Locality: traffic.Locality(k.Locality), Transport: traffic.Transport(k.Transport),
	}
}

// folded is the key that a reader alone writes.
func (k Key) folded() netattrKey {
	to := k.kernel()
	if k.Flight == 0 && k.Cgroup != Folded {
		to.Flight = ended
	}
	return to
}

// countsOf gives what a key says. The byte of a FIN is taken off by whoever sees
// it first, in a key that may have begun since: that has then received -1.
func countsOf(c netattrCounts) traffic.Counts {
	counts := traffic.Counts{
		Received: uint64(max(0, int64(c.Received))), Retransmitted: c.Retransmitted, ReceivedHeaders: c.ReceivedHeaders, TransmittedHeaders: c.TransmittedHeaders,
	}
	if c.TransmittedAll > c.Retransmitted {
		counts.Transmitted = c.TransmittedAll - c.Retransmitted
	}
	return counts
}

// Counts reads all counts. They grow from one read to the next, but for the few
// bytes of a socket that was read while its counters moved.
func (p *Probe) Counts() (map[Key]traffic.Counts, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return nil, fmt.Errorf("read counts: %w", os.ErrClosed)
	}
	// By the key in the kernel: where another process takes a key out meanwhile the
	// kernel begins again, and gives again what it gave.
	raw := map[netattrKey]netattrCounts{}
	for try := 1; ; try++ {
		var key netattrKey
		var value netattrCounts
		it := p.maps.Acct.Iterate()
		for it.Next(&key, &value) {
			raw[key] = value
		}
		err := it.Err()
		if err == nil {
			return sumOf(raw), nil
		}
		if !errors.Is(err, ebpf.ErrIterationAborted) || try == 3 {
			return nil, fmt.Errorf("read counts: %w", explain(err))
		}
		clear(raw)
	}
}

// sumOf gives counts by what their keys mean.
func sumOf(raw map[netattrKey]netattrCounts) map[Key]traffic.Counts {
	all := make(map[Key]traffic.Counts, len(raw))
	for key, value := range raw {
		counts := all[keyOf(key)]
		counts.Add(countsOf(value))
		all[keyOf(key)] = counts
	}
	return all
}

// Fold takes a key out of the kernel and adds its counts to those of another.
// Not safe for concurrent use. Of several processes over the same pins one alone
// folds; the others get an error.
func (p *Probe) Fold(key, into Key) error {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("fold counts: %w", os.ErrClosed)
	}
	if err := p.own(); err != nil {
		return fmt.Errorf("fold counts: %w", err)
	}
	from := []netattrKey{key.kernel()}
	if own := key.folded(); own != from[0] {
		from = append(from, own)
	}
	for _, one := range from {
		if err := p.fold(one, into.folded()); err != nil {
			return fmt.Errorf("fold counts: %w", explain(err))
		}
	}
	return nil
}

func (p *Probe) fold(key, into netattrKey) error {
	var gone, sum netattrCounts
	if key == into {
		return nil
	}
	if err := p.maps.Acct.Lookup(key, &gone); errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	// The place comes first: in a full map another key may take the room of the one
	// that goes.
	if err := p.maps.Acct.Update(into, netattrCounts{}, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return err
	}
	if err := p.maps.Acct.LookupAndDelete(key, &gone); err != nil {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return err
	}
	if err := p.maps.Acct.Lookup(into, &sum); err != nil {
		return err
	}
	sum.Received += gone.Received
	sum.TransmittedAll += gone.TransmittedAll
	sum.Retransmitted += gone.Retransmitted
	sum.ReceivedHeaders += gone.ReceivedHeaders
	sum.TransmittedHeaders += gone.TransmittedHeaders
	return p.maps.Acct.Put(into, sum)
}

// SetPorts replaces the service ports that tell a connection's class.
func (p *Probe) SetPorts(classes map[uint16]traffic.Class) error {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("set ports: %w", os.ErrClosed)
	}
	if len(classes) > MaxPorts {
		return fmt.Errorf("set ports: %d ports, want at most %d", len(classes), MaxPorts)
	}
	want := map[uint32]uint32{}
	for port, class := range classes {
		want[uint32(port)] = uint32(class)
	}
	return replace(p.maps.Ports, want, "ports")
}

// SetRanges replaces the address ranges of other ends that tell a connection's class.
func (p *Probe) SetRanges(classes map[netip.Prefix]traffic.Class) error {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("set ranges: %w", os.ErrClosed)
	}
	if len(classes) > MaxRanges {
		return fmt.Errorf("set ranges: %d ranges, want at most %d", len(classes), MaxRanges)
	}
	want := map[netattrRange]uint32{}
	for prefix, class := range classes {
		want[rangeOf(prefix)] = uint32(class)
	}
	return replace(p.maps.Ranges, want, "ranges")
}

// rangeOf maps IPv4 into IPv6, as the programs compare.
func rangeOf(prefix netip.Prefix) netattrRange {
	prefix = prefix.Masked()
	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += 96
	}
	r := netattrRange{Bits: uint32(bits)}
	of := prefix.Addr().As16()
	for i := range r.Address.A {
		r.Address.A[i] = binary.NativeEndian.Uint32(of[4*i:])
	}
	return r
}

// replace makes a map hold exactly what is wanted.
func replace[K comparable](m *ebpf.Map, want map[K]uint32, what string) error {
	var gone []K
	var key K
	var value uint32
	it := m.Iterate()
	for it.Next(&key, &value) {
		if _, wanted := want[key]; !wanted {
			gone = append(gone, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("set %s: %w", what, explain(err))
	}
	for _, key := range gone {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("set %s: %w", what, explain(err))
		}
	}
	for key, value := range want {
		if err := m.Put(key, value); err != nil {
			return fmt.Errorf("set %s: %w", what, explain(err))
		}
	}
	return nil
}

// Tag says whose a socket is, by its descriptor in this process: before it is
// connected, or bound to listen, whose connections are then alike. Later it is
// refused, and so is a socket of MPTCP: its bytes pass on others.
func (p *Probe) Tag(fd uintptr, class traffic.Class, flight uint32) error {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("mark socket as %s: %w", class, os.ErrClosed)
	}
	if kind, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && kind == unix.IPPROTO_MPTCP {
		return fmt.Errorf("mark socket as %s: %w", class, errMultipath)
	}
	err := p.maps.Socks.Update(uint32(fd), netattrSockState{Class: uint8(class), Flight: flight}, ebpf.UpdateNoExist)
	if err != nil {
		return fmt.Errorf("mark socket as %s: %w", class, explain(err))
	}
	return nil
}

var errMultipath = errors.New("it is one of MPTCP, whose bytes pass on others (turn it off: SetMultipathTCP(false))")

// Status counts what the programs did since the maps were made.
type Status struct {
	Seen      uint64 // connections that began while somebody watched
	Untracked uint64 // connections for which there was no memory
	KeyLost   uint64 // takes whose key had no room, counted without cgroup and flight
	Seeded    uint64 // connections that were there before
	// Missed bounds the begins and ends of connections that neither instance of
	// the program saw since they were attached, as the kernel left both out. Seen
	// above 0 on Linux 7.2 alone.
	Missed uint64
}

// Status reads the counters of the programs.
func (p *Probe) Status() (Status, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return Status{}, fmt.Errorf("read status of network programs: %w", os.ErrClosed)
	}
	var values [4]uint64
	for i := range values {
		if err := p.maps.Status.Lookup(uint32(i), &values[i]); err != nil {
			return Status{}, fmt.Errorf("read status of network programs: %w", explain(err))
		}
	}
	status := Status{Seen: values[0], Untracked: values[1], KeyLost: values[2], Seeded: values[3]}
	for i, instance := range p.instances {
		stats, err := instance.Stats()
		if err != nil {
			return Status{}, fmt.Errorf("read status of network programs: %w", explain(err))
		}
		if i == 0 || stats.RecursionMisses < status.Missed {
			status.Missed = stats.RecursionMisses
		}
	}
	return status, nil
}
