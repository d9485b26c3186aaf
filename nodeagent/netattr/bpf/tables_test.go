package bpf

import (
	"net/netip"
	"structs"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

func TestARangeIsAsTheProgramsCompare(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]netattrRange{
		"10.1.2.3/8":            {Bits: 104, Address: addressOf(0, 0, 0xffff0000, 0x0000000a)},
		"192.0.2.7/32":          {Bits: 128, Address: addressOf(0, 0, 0xffff0000, 0x070200c0)},
		"0.0.0.0/0":             {Bits: 96, Address: addressOf(0, 0, 0xffff0000, 0)},
		"::/0":                  {},
		"2001:db8::ffff:1/32":   {Bits: 32, Address: addressOf(0xb80d0120, 0, 0, 0)},
		"::ffff:198.51.0.0/112": {Bits: 112, Address: addressOf(0, 0, 0xffff0000, 0x000033c6)},
	} {
		if got := rangeOf(netip.MustParsePrefix(text)); got != want {
			t.Errorf("%s is %+v, want %+v", text, got, want)
		}
	}
}

func addressOf(a, b, c, d uint32) (address struct {
	_ structs.HostLayout
	A [4]uint32
},
) {
	address.A = [4]uint32{a, b, c, d}
	return address
}

func TestAKeySurvivesTheKernel(t *testing.T) {
	t.Parallel()
	for _, key := range []Key{
		{},
		{Cgroup: 1 << 40, Flight: 7, Class: traffic.KV, Locality: traffic.SameNode, Transport: traffic.NonTCP},
		{Cgroup: Folded, Class: traffic.Other, Locality: traffic.OffNode},
	} {
		if got := keyOf(key.kernel()); got != key {
			t.Errorf("%+v came back as %+v", key, got)
		}
		if got := keyOf(key.folded()); got != key {
			t.Errorf("folded, %+v came back as %+v", key, got)
		}
	}
}

func TestWhatIsFoldedIntoACgroupThatLivesIsNoKeyThatProgramsWrite(t *testing.T) {
	t.Parallel()
	for key, apart := range map[Key]bool{
		{Cgroup: 5, Class: traffic.Weights}:            true,
		{Cgroup: 5, Flight: 9, Class: traffic.Weights}: false,
		{Cgroup: Folded, Class: traffic.Weights}:       false,
	} {
		if got := key.folded() != key.kernel(); got != apart {
			t.Errorf("%+v is apart: %v, want %v", key, got, apart)
		}
	}
}

func TestCountsTellRepeatsFromPayload(t *testing.T) {
	t.Parallel()
	for in, want := range map[netattrCounts]traffic.Counts{
		{Received: 5, TransmittedAll: 100, Retransmitted: 30, ReceivedHeaders: 1, TransmittedHeaders: 2}: {Received: 5, Transmitted: 70, Retransmitted: 30, ReceivedHeaders: 1, TransmittedHeaders: 2},
		// Read while both moved.
		{TransmittedAll: 10, Retransmitted: 11}: {Retransmitted: 11},
	} {
		if got := countsOf(in); got != want {
			t.Errorf("%+v are %+v, want %+v", in, got, want)
		}
	}
}

func TestAKeyThatBeginsWithAFINHasReceivedNothing(t *testing.T) {
	t.Parallel()
	if got := countsOf(netattrCounts{Received: ^uint64(0), ReceivedHeaders: 66}); got != (traffic.Counts{ReceivedHeaders: 66}) {
		t.Errorf("counts are %+v", got)
	}
}
