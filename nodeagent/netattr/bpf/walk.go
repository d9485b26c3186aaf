package bpf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cilium/ebpf/link"

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
	if p.walker == nil {
		return fmt.Errorf("walk sockets: %w", errNoWalk)
	}
	in, err := p.walker.Open()
	if err != nil {
		return fmt.Errorf("walk sockets: %w", explain(err))
	}
	defer func() { _ = in.Close() }()
	buffered := bufio.NewReaderSize(in, 64<<10)
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

// rowOf reads struct row of c/netattr.bpf.c.
func rowOf(raw []byte) Row {
	n := binary.NativeEndian
	return Row{
		Cgroup: n.Uint64(raw), Received: n.Uint64(raw[8:]), Transmitted: n.Uint64(raw[16:]), Retransmitted: n.Uint32(raw[24:]),
		RTT: time.Duration(n.Uint32(raw[28:])) * time.Microsecond, Class: traffic.Class(raw[32]), Locality: traffic.Locality(raw[33]),
	}
}

// drain runs an iterator to its end.
func drain(it *link.Iter) error {
	in, err := it.Open()
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	_, err = io.Copy(io.Discard, in)
	return err
}
