//go:build root

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestMain(m *testing.M) {
	if mover.Serve(&Agent{}, &Reuser{}) {
		return
	}
	os.Exit(m.Run())
}

// patience is how long something may take that takes no time on a machine that
// has nothing else to do.
const patience = time.Minute

// opened gives a Probe whose sensors are all on, but for those not asked for.
func opened(t *testing.T, opts Options) *Probe {
	t.Helper()
	p, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, sensor := range p.Sensors() {
		if sensor.Wanted && !sensor.On {
			t.Fatalf("sensor %s: %s\n%s", sensor.Name, sensor.Reason, sensor.VerifierLog)
		}
	}
	return p
}

// in selects the keys of one cgroup.
func in(group netns.Cgroup) func(Key) bool {
	return func(k Key) bool { return k.Cgroup == group.ID }
}

// walked takes what passed and gives the counts of all keys selected.
func walked(t *testing.T, p *Probe, of func(Key) bool) map[Key]traffic.Counts {
	t.Helper()
	if err := p.Walk(nil); err != nil {
		t.Fatal(err)
	}
	counts, err := p.Counts()
	if err != nil {
		t.Fatal(err)
	}
	for key, c := range counts {
		if !of(key) || c == (traffic.Counts{}) {
			delete(counts, key)
		}
	}
	return counts
}

func sum(counts map[Key]traffic.Counts) traffic.Counts {
	var all traffic.Counts
	for _, c := range counts {
		all.Add(c)
	}
	return all
}

// payload is what a mover's books have too.
func payload(c traffic.Counts) mover.Counts {
	return mover.Counts{Sent: c.Transmitted, Received: c.Received}
}

// exactly waits until a probe has counted what a mover has, which has ended, and
// that it counts nothing more. It gives the counts.
func exactly(t *testing.T, p *Probe, of func(Key) bool, want mover.Counts) traffic.Counts {
	t.Helper()
	var got traffic.Counts
	eventually(t, func() error {
		got = sum(walked(t, p, of))
		if payload(got) != want {
			status, err := p.Status()
			return errors.Join(fmt.Errorf("counted %+v, want %+v, status %+v", payload(got), want, status), err)
		}
		return nil
	})
	for range 2 {
		if got = sum(walked(t, p, of)); payload(got) != want {
			t.Fatalf("counted %+v after it was %+v", payload(got), want)
		}
	}
	return got
}

// eventually tries until it is so.
func eventually(t *testing.T, so func() error) {
	t.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	late := time.After(patience)
	for {
		err := so()
		if err == nil {
			return
		}
		select {
		case <-again.C:
		case <-late:
			t.Fatal(err)
		case <-t.Context().Done():
			t.Fatal(err)
		}
	}
}

// localities lists those that counts have payload of.
func localities(counts map[Key]traffic.Counts) []traffic.Locality {
	var found []traffic.Locality
	for key, c := range counts {
		if c.Received+c.Transmitted > 0 && !slices.Contains(found, key.Locality) {
			found = append(found, key.Locality)
		}
	}
	return found
}

// families are addresses of two ends of a pair of devices, and of a router's two
// ends between them.
type family struct{ name, client, server, loopback string }

var families = []family{
	{"IPv4", "10.77.0.2", "10.77.0.1", "127.0.0.1"},
	{"IPv6", "fd77::2", "fd77::1", "::1"},
}

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// two makes two namespaces that are connected as families has it.
func two(t *testing.T) (client, server *netns.Namespace) {
	t.Helper()
	client, server = netns.New(t), netns.New(t)
	netns.Pair(t, client, "eth0", prefixes("10.77.0.2/24", "fd77::2/64"), server, "eth0", prefixes("10.77.0.1/24", "fd77::1/64"))
	return client, server
}
