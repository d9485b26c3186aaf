package nic

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// eth is a reading of a node with one network device.
func eth(index int, address string, received uint64) Devices {
	return Devices{Net: []Device{{Name: "eth0", Index: index, Address: address, Counters: Counters{ReceivedBytes: received}}}}
}

// port is a reading of a node with one RDMA port.
func port(guid string, received uint64) Devices {
	return Devices{Ports: []Port{{Device: "mlx5_0", Number: 1, GUID: guid, Counters: Counters{ReceivedBytes: received}}}}
}

func TestTotalsGrowByWhatPassed(t *testing.T) {
	t.Parallel()
	const full = math.MaxUint32
	none := Devices{}
	for name, c := range map[string]struct {
		readings []Devices
		want     uint64
	}{
		"from the first reading on":           {[]Devices{eth(2, "a", 5_000), eth(2, "a", 5_000), eth(2, "a", 5_700)}, 700},
		"a driver that began anew":            {[]Devices{eth(2, "a", 5_000), eth(2, "a", 300), eth(2, "a", 400)}, 400},
		"a counter of 32 bits that wrapped":   {[]Devices{eth(2, "a", full-99), eth(2, "a", 50)}, 150},
		"no wrap from the middle":             {[]Devices{eth(2, "a", full/2), eth(2, "a", 50)}, 50},
		"no wrap of what was wider before":    {[]Devices{eth(2, "a", full+1), eth(2, "a", full-99), eth(2, "a", 50)}, 50},
		"no wrap of 64 bits":                  {[]Devices{eth(2, "a", 1<<40), eth(2, "a", 50)}, 50},
		"a small step back":                   {[]Devices{eth(2, "a", 1<<40), eth(2, "a", 1<<40-9), eth(2, "a", 1<<40+1)}, 1},
		"another device of the name":          {[]Devices{eth(2, "a", 10), eth(2, "a", 20), eth(3, "a", 90_000), eth(3, "a", 90_001)}, 11},
		"another card in the name's place":    {[]Devices{eth(2, "a", 10), eth(2, "b", 90_000), eth(2, "b", 90_001)}, 1},
		"a device that was away":              {[]Devices{eth(2, "a", 10), eth(2, "a", 15), none, eth(2, "a", 90_000), eth(2, "a", 90_001)}, 6},
		"a device that comes late":            {[]Devices{none, eth(2, "a", 90_000), eth(2, "a", 90_001)}, 1},
		"a port":                              {[]Devices{port("a", 400), port("a", 1_400)}, 1_000},
		"a port whose counters were set to 0": {[]Devices{port("a", 400), port("a", 1_400), port("a", 8)}, 1_008},
		"a port's counters never wrap":        {[]Devices{port("a", full-99), port("a", 50)}, 50},
		"another card in the port's place":    {[]Devices{port("a", 400), port("b", 90_000), port("b", 90_008)}, 8},
	} {
		var m Meter
		var got Totals
		for _, r := range c.readings {
			got = m.Update(r)
		}
		if n := got.Net[ReceivedBytes] + got.RDMA[ReceivedBytes]; n != c.want {
			t.Errorf("%s: %d, want %d", name, n, c.want)
		}
		if n := got.Devices["eth0"][ReceivedBytes] + got.Ports["mlx5_0/1"][ReceivedBytes]; n != c.want {
			t.Errorf("%s: %d by device, want %d", name, n, c.want)
		}
	}
}

func TestAValueThatIsMissingOnceCostsNothing(t *testing.T) {
	t.Parallel()
	var m Meter
	m.Update(eth(2, "a", 100))
	without := eth(2, "a", 0)
	without.Net[0].Counters = Counters{}
	if got := m.Update(without).Net[ReceivedBytes]; got != 0 {
		t.Errorf("%d while the value is missing", got)
	}
	if got := m.Update(eth(2, "a", 170)).Net[ReceivedBytes]; got != 70 {
		t.Errorf("%d after it was missing", got)
	}
}

func TestTotalsThatWereGivenDoNotChange(t *testing.T) {
	t.Parallel()
	var m Meter
	m.Update(eth(2, "a", 100))
	got := m.Update(eth(2, "a", 110))
	m.Update(eth(2, "a", 1_000))
	want := Totals{
		Devices: map[string]Counters{"eth0": {ReceivedBytes: 10}}, Ports: map[string]Counters{},
		Net: Counters{ReceivedBytes: 10}, RDMA: Counters{},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestDevicesThatComeAndGoKeepTheBoundAndStayInTheSum(t *testing.T) {
	t.Parallel()
	var m Meter
	for i := range 5_000 {
		r := eth(i+1, "a", 0)
		r.Net[0].Name = fmt.Sprintf("veth%d", i)
		m.Update(r)
		r.Net[0].Counters = Counters{ReceivedBytes: 3}
		got := m.Update(r)
		if len(got.Devices) > maxGone+1 || got.Net[ReceivedBytes] != uint64(3*(i+1)) {
			t.Fatalf("after %d devices: %d have totals, the sum is %d", i+1, len(got.Devices), got.Net[ReceivedBytes])
		}
	}
}

func TestNoTotalGoesBackwardsWhateverIsRead(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		var m Meter
		var last Totals
		for range 200 {
			var d Devices
			for _, name := range []string{"a", "b", "c"} {
				if random.IntN(4) == 0 {
					continue
				}
				d.Net = append(d.Net, Device{Name: name, Index: random.IntN(2), Counters: Counters{ReceivedBytes: random.Uint64() >> random.IntN(64) >> 20}})
				d.Ports = append(d.Ports, Port{Device: name, Counters: Counters{TransmittedBytes: random.Uint64() >> random.IntN(64) >> 20}})
			}
			now := m.Update(d)
			for _, pair := range [][2]Counters{
				{last.Net, now.Net}, {last.RDMA, now.RDMA}, {last.Devices["a"], now.Devices["a"]}, {last.Ports["b/0"], now.Ports["b/0"]},
			} {
				for name, value := range pair[0] {
					if pair[1][name] < value {
						t.Fatalf("seed %d: %s went from %d to %d", seed, name, value, pair[1][name])
					}
				}
			}
			last = now
		}
	}
}
