package bpf

import (
	"encoding/binary"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// raw is struct row of c/netattr.bpf.c, as the kernel writes it.
func raw(received, transmitted uint64, retransmitted, srtt uint32) []byte {
	n := binary.NativeEndian
	b := n.AppendUint64(nil, 77)
	b = n.AppendUint64(n.AppendUint64(b, received), transmitted)
	b = n.AppendUint32(n.AppendUint32(b, retransmitted), srtt)
	return append(b, byte(traffic.Serving), byte(traffic.OffNode), 0, 0, 0, 0, 0, 0)
}

func TestARowIsReadAsTheProgramWritesIt(t *testing.T) {
	t.Parallel()
	b := raw(1<<40, 3, 2, 1500)
	if len(b) != rowSize {
		t.Fatalf("a row has %d bytes, want %d", len(b), rowSize)
	}
	want := Row{
		Cgroup: 77, Received: 1 << 40, Transmitted: 3, Retransmitted: 2, RTT: 1500 * time.Microsecond,
		Class: traffic.Serving, Locality: traffic.OffNode,
	}
	if got := rowOf(b); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestARowOfLessThanNothingIsNothing(t *testing.T) {
	t.Parallel()
	if got := rowOf(raw(^uint64(0), ^uint64(1447), 0, 0)); got.Received != 0 || got.Transmitted != 0 {
		t.Errorf("%+v, want no bytes", got)
	}
}

// pausing says EAGAIN before each byte, as the kernel does amid a long walk.
type pausing struct {
	left   int
	paused bool
}

func (p *pausing) Read(b []byte) (int, error) {
	p.paused = !p.paused
	switch {
	case p.paused:
		return 0, unix.EAGAIN
	case p.left == 0:
		return 0, io.EOF
	}
	p.left--
	return copy(b, "x"), nil
}

func TestAWalkGoesOnWhereTheKernelPauses(t *testing.T) {
	t.Parallel()
	n, err := io.Copy(io.Discard, patient{&pausing{left: 9}})
	if n != 9 || err != nil {
		t.Errorf("read %d bytes, %v; want 9", n, err)
	}
}

func TestWalkingWithoutTheProgramIsAnError(t *testing.T) {
	t.Parallel()
	p := &Probe{maps: netattrMaps{Acct: new(ebpf.Map)}}
	if err := p.Walk(nil); !errors.Is(err, errNoWalk) {
		t.Errorf("Walk: %v, want %v", err, errNoWalk)
	}
}
