package netattr

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// memory is a Source in memory.
type memory struct {
	mu      sync.Mutex
	counts  kernel
	walks   int
	fails   error         // of the next walks
	hangs   chan struct{} // walks end once it is closed; nil: at once
	tagFail error
	ports   map[uint16]traffic.Class
	closed  bool
}

func (m *memory) Walk(func(bpf.Row)) error {
	m.mu.Lock()
	m.walks++
	fails, hangs := m.fails, m.hangs
	m.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
	return fails
}

func (m *memory) Counts() (map[bpf.Key]traffic.Counts, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.counts.copy(), nil
}
func (m *memory) Fold(key, into bpf.Key) error                   { return m.counts.Fold(key, into) }
func (m *memory) Tag(uintptr, traffic.Class, uint32) error       { return m.tagFail }
func (m *memory) SetRanges(map[netip.Prefix]traffic.Class) error { return nil }
func (m *memory) SetPorts(classes map[uint16]traffic.Class) error {
	m.ports = maps.Clone(classes)
	return nil
}
func (m *memory) Status() (bpf.Status, error) { return bpf.Status{Seen: 3}, nil }
func (m *memory) Sensors() []bpf.Sensor {
	return []bpf.Sensor{{Name: bpf.SensorSockets, On: true, Wanted: true}, {Name: bpf.SensorWalk, On: true, Wanted: true}}
}

func (m *memory) Kept() bool                                 { return false }
func (m *memory) Decided() (map[uint64]traffic.Class, error) { return map[uint64]traffic.Class{}, nil }
func (m *memory) Decide(uint64, traffic.Class) error         { return nil }

func (m *memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

func (m *memory) walked() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.walks
}

// collect makes a Collector over sources, each for one try; a nil one fails.
func collect(t *testing.T, sources ...*memory) *Collector {
	t.Helper()
	tries := 0
	return New(Options{
		Sys: t.TempDir(), Cgroups: t.TempDir(), Ports: map[uint16]traffic.Class{8000: traffic.Serving},
		Source: func() (Source, error) {
			tries++
			if tries > len(sources) || sources[tries-1] == nil {
				return nil, errors.New("the agent lacks the capability BPF")
			}
			return sources[tries-1], nil
		},
	})
}

func TestWithoutProgramsTheAgentGoesOnAndSaysWhy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{counts: kernel{{Locality: traffic.OffNode, Class: traffic.KV}: received(5)}}
		c := collect(t, nil, nil, m)
		s := c.Sample()
		if s.Sight != SightNone || !strings.Contains(s.Reason, "lacks the capability BPF") || len(s.Totals) != 0 {
			t.Errorf("sight %s, reason %q, totals %v", s.Sight, s.Reason, s.Totals)
		}
		c.Tag(0, traffic.KV, 0) // does no harm
		time.Sleep(retryEvery)
		c.Sample()
		time.Sleep(retryEvery)
		if s = c.Sample(); s.Sight != SightPartial || strings.Contains(s.Reason, "BPF") || s.Class(traffic.KV, traffic.OffNode).Received != 5 {
			t.Errorf("after two more tries: sight %s, reason %q, totals %v", s.Sight, s.Reason, s.Totals)
		}
		c.Close()
	})
}

func TestAccountingThatIsLostIsTriedAgainAndTotalsStand(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		key := bpf.Key{Locality: traffic.OffNode, Class: traffic.KV}
		first, second := &memory{counts: kernel{key: received(5)}}, &memory{counts: kernel{key: received(2)}}
		c := collect(t, first, second)
		first.fails = errors.New("operation not permitted")
		c.Sample()
		s := c.Sample()
		if !first.closed || s.Sight != SightNone || !strings.Contains(s.Reason, "lost while it ran") {
			t.Errorf("closed %v, sight %s, reason %q", first.closed, s.Sight, s.Reason)
		}
		if got := s.Class(traffic.KV, traffic.OffNode).Received; got != 5 {
			t.Errorf("total is %d bytes after the loss, want 5", got)
		}
		time.Sleep(retryEvery)
		// The new counts began at 0: what they have is on top.
		if got := c.Sample().Class(traffic.KV, traffic.OffNode).Received; got != 7 {
			t.Errorf("total is %d bytes after the second begin, want 7", got)
		}
		c.Close()
	})
}

func TestSamplesComeFasterWhileAPullRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{counts: kernel{}}
		c := collect(t, m)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = c.Run(ctx)
		}()
		within := func(d time.Duration) int {
			before := m.walked()
			time.Sleep(d)
			synctest.Wait()
			return m.walked() - before
		}
		synctest.Wait()
		if n := within(10 * time.Second); n != 10 {
			t.Errorf("%d samples in 10 s, want 10", n)
		}
		end, other := c.Fast(), c.Fast()
		if n := within(10 * time.Second); n < 39 || n > 41 {
			t.Errorf("%d samples in 10 s of a pull, want 40", n)
		}
		end()
		end() // twice is once
		if n := within(10 * time.Second); n < 39 {
			t.Errorf("%d samples in 10 s of the other pull, want 40", n)
		}
		other()
		if n := within(10 * time.Second); n < 9 || n > 11 {
			t.Errorf("%d samples in 10 s after the pulls, want 10", n)
		}
		cancel()
		<-done
		if !m.closed {
			t.Error("the source is not closed")
		}
	})
}

func TestASampleThatHangsHoldsUpNoPullAndNoEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{counts: kernel{}}
		c := collect(t, m)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = c.Run(ctx)
		}()
		time.Sleep(10 * time.Second)
		hangs := make(chan struct{})
		m.mu.Lock()
		m.hangs = hangs
		m.mu.Unlock()
		time.Sleep(10 * time.Second)
		began := time.Now()
		c.BeginFlight(1)
		s := c.Sample()
		c.EndFlight(1)
		if took := time.Since(began); took > sampleWithin || s.Sight != SightNone || !strings.Contains(s.Reason, "did not end within 2s") {
			t.Errorf("after %v: sight %s, reason %q", took, s.Sight, s.Reason)
		}
		if n := m.walked(); n > 21 {
			t.Errorf("%d walks, of which the last hangs, want one at a time", n)
		}
		began = time.Now()
		cancel()
		<-done
		if took := time.Since(began); took > sampleWithin+closeWithin {
			t.Errorf("it ended after %v", took)
		}
		close(hangs)
		synctest.Wait()
		if !m.closed {
			t.Error("the source is not closed once the sample has ended")
		}
	})
}

func TestASampleThatWasSlowIsForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		m := &memory{counts: kernel{}, hangs: hangs}
		c := collect(t, m)
		if s := c.Snapshot(); s.Sight != SightNone || !strings.Contains(s.Reason, "did not end") {
			t.Errorf("sight %s, reason %q", s.Sight, s.Reason)
		}
		close(hangs)
		if s := c.Sample(); s.Sight != SightPartial || !strings.HasPrefix(s.Reason, "cgroups: ") {
			t.Errorf("once it ended: sight %s, reason %q", s.Sight, s.Reason)
		}
		last := c.Snapshot()
		c.Close()
		if s := c.Sample(); s != last {
			t.Errorf("after the end there is another sample: %+v", s)
		}
	})
}

func TestSocketsThatCannotBeMarkedAreCounted(t *testing.T) {
	t.Parallel()
	m := &memory{counts: kernel{}, tagFail: errors.New("cannot allocate memory")}
	c := collect(t, m)
	defer c.Close()
	c.Tag(0, traffic.Weights, 1)
	c.Tag(0, traffic.Weights, 2)
	if got := c.Sample().TagFailed; got != 2 {
		t.Errorf("%d failed, want 2", got)
	}
	if m.ports[8000] != traffic.Serving {
		t.Errorf("ports are %v", m.ports)
	}
}

func TestASubscriberHearsOfEachSample(t *testing.T) {
	t.Parallel()
	c := collect(t, &memory{counts: kernel{}})
	defer c.Close()
	changed, cancel := c.Subscribe()
	defer cancel()
	s := c.Sample()
	<-changed
	if c.Snapshot() != s {
		t.Error("the snapshot is not the sample")
	}
}

func TestWhatPassesWhileDevicesCannotBeReadIsCountedAfter(t *testing.T) {
	t.Parallel()
	sys := t.TempDir()
	class := filepath.Join(sys, "class/net")
	write := func(name, value string) {
		t.Helper()
		at := filepath.Join(class, "eth0", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, []byte(value), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range map[string]string{"ifindex": "2", "type": "1", "device/vendor": "x", "statistics/rx_bytes": "1000"} {
		write(name, value)
	}
	c := New(Options{Off: true, Sys: sys})
	defer c.Close()
	if err := errors.Join(os.Rename(class, class+"-away"), os.WriteFile(class, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if s := c.Sample(); s.Sight != SightDevices || len(s.Devices.Net) != 1 {
		t.Errorf("sight %s, devices %v", s.Sight, s.Devices.Net)
	}
	if err := errors.Join(os.Remove(class), os.Rename(class+"-away", class)); err != nil {
		t.Fatal(err)
	}
	write("statistics/rx_bytes", "1700")
	if got := c.Sample().OnWire[traffic.Receive]; got != 700 {
		t.Errorf("%d bytes passed, want 700", got)
	}
}

func TestTurnedOffItReadsDevicesAlone(t *testing.T) {
	t.Parallel()
	c := New(Options{Off: true, Sys: t.TempDir()})
	defer c.Close()
	if s := c.Snapshot(); s.Sight != SightNone && s.Sight != SightDevices || strings.Contains(s.Reason, "cgroups") {
		t.Errorf("sight %s, reason %q", s.Sight, s.Reason)
	}
}

func TestWithoutCgroupsBytesHaveAClassAndNoPod(t *testing.T) {
	t.Parallel()
	m := &memory{counts: kernel{{Cgroup: 7, Locality: traffic.OffNode, Class: traffic.KV}: received(5), {Cgroup: 7, Locality: traffic.OffNode}: received(3)}}
	// Nor is a directory a root because it is there.
	c := New(Options{Sys: t.TempDir(), Cgroups: t.TempDir(), Source: func() (Source, error) { return m, nil }})
	defer c.Close()
	s := c.Sample()
	if s.Sight != SightPartial || !strings.Contains(s.Reason, "cgroups: ") {
		t.Errorf("sight %s, reason %q", s.Sight, s.Reason)
	}
	if kv, other := s.Class(traffic.KV, traffic.OffNode).Received, s.Class(traffic.Other, traffic.OffNode).Received; kv != 5 || other != 3 {
		t.Errorf("kv %d and other %d bytes, want 5 and 3", kv, other)
	}
}
