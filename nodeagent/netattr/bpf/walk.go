package bpf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Row is one TCP connection on which payload passed since the walk before.
type Row struct {
	Cgroup        uint64
	Received      uint64 // bytes since the walk before
	Transmitted   uint64
	Retransmitted uint32
	RTT           time.Duration // smoothed, as TCP has it
	Class         traffic.Class
	Locality      traffic.Locality
}

// rowSize is the size of struct row in bytes.
const rowSize = 40

// Walk counts what passed on all sockets of all network namespaces since the
// walk before, and gives those on which something did. each may be nil.
func (p *Probe) Walk(each func(Row)) error {
	p.walking.Lock()
	defer p.walking.Unlock()
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed() {
		return fmt.Errorf("walk sockets: %w", os.ErrClosed)
	}
	if p.walker == nil {
		return fmt.Errorf("walk sockets: %w", errNoWalk)
	}
	in, err := p.walker.Open()
	if err != nil {
		return fmt.Errorf("walk sockets: %w", explain(err))
	}
	defer func() { _ = in.Close() }()
	buffered := bufio.NewReaderSize(patient{in}, 64<<10)
	var raw [rowSize]byte
	for {
		if _, err := io.ReadFull(buffered, raw[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("walk sockets: %w", explain(err))
		}
		if each != nil {
			each(rowOf(raw[:]))
		}
	}
}

var errNoWalk = errors.New("the program that walks them is not loaded")

// rowOf reads struct row of c/netattr.bpf.c. A socket that was read while its
// counters moved may say less than nothing in the walk after; the counts of its
// key make up for it, a row is 0 then.
func rowOf(raw []byte) Row {
	n := binary.NativeEndian
	grown := func(at int) uint64 { return uint64(max(0, int64(n.Uint64(raw[at:])))) }
	return Row{
		Cgroup: n.Uint64(raw), Received: grown(8), Transmitted: grown(16), Retransmitted: n.Uint32(raw[24:]),
		RTT: time.Duration(n.Uint32(raw[28:])) * time.Microsecond, Class: traffic.Class(raw[32]), Locality: traffic.Locality(raw[33]),
	}
}

// patient reads on where the kernel gave up for now: it does after a million
// objects of which nothing is told.
type patient struct{ io.Reader }

// Read reads what is told next.
func (p patient) Read(b []byte) (int, error) {
	for {
		if n, err := p.Reader.Read(b); n > 0 || !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
	}
}

// drain runs an iterator to its end.
func drain(it *link.Iter) error {
	in, err := it.Open()
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	_, err = io.Copy(io.Discard, patient{in})
	return err
}
