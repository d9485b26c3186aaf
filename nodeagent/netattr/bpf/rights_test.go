//go:build root

package bpf

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestAnAgentWithoutCapabilitiesIsToldWhichItLacks(t *testing.T) {
	here, group := netns.New(t), netns.NewCgroup(t)
	for _, one := range []struct {
		keep  []uint
		names []string
	}{
		{nil, []string{"BPF", "PERFMON"}},
		{[]uint{unix.CAP_NET_ADMIN}, []string{"BPF", "PERFMON"}},
		{[]uint{unix.CAP_BPF, unix.CAP_NET_ADMIN}, []string{"PERFMON"}},
	} {
		agent := mover.Start(t, here, group)
		agent.Do("Agent.Drop", one.keep, new(mover.Nothing))
		err := agent.Try("Agent.Open", Wish{Pins: pinned(t), Datagrams: group.Path}, new(mover.Nothing))
		want := "the agent lacks the capabilities " + strings.Join(one.names, " and ") + ":"
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "MEMLOCK") {
			t.Errorf("with %v: %v, want %q", one.keep, err, want)
		}
	}
}

func sensor(t *testing.T, all []Sensor, name string) Sensor {
	t.Helper()
	at := slices.IndexFunc(all, func(s Sensor) bool { return s.Name == name })
	if at < 0 {
		t.Fatalf("no sensor %s in %+v", name, all)
	}
	return all[at]
}

func TestTheTwoCapabilitiesAreEnoughForAllButDatagrams(t *testing.T) {
	client, server := two(t)
	ours := netns.NewCgroup(t)
	serve, call := mover.Start(t, server, netns.NewCgroup(t)), mover.Start(t, client, ours)
	agent := mover.Start(t, netns.New(t), netns.NewCgroup(t))
	agent.Do("Agent.Drop", []uint{unix.CAP_BPF, unix.CAP_PERFMON}, new(mover.Nothing))
	agent.Do("Agent.Open", Wish{Datagrams: netns.CgroupRoot(t).Path}, new(mover.Nothing))
	var sensors []Sensor
	agent.Do("Agent.Sensors", mover.Nothing(0), &sensors)
	for _, name := range []string{SensorSockets, SensorWalk} {
		if s := sensor(t, sensors, name); !s.On {
			t.Errorf("sensor %s is off: %s", name, s.Reason)
		}
	}
	if s := sensor(t, sensors, SensorDatagrams); s.On || !strings.Contains(s.Reason, "lacks the capabilities NET_ADMIN") {
		t.Errorf("sensor datagrams: %+v, want it off for the lack of NET_ADMIN", s)
	}
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"})})
	call.Exchange(mover.Request{Up: 10, Down: 50_000})
	readsExactly(t, agent, ours, call.Totals())
}

// readsExactly waits until an Agent has what a mover has.
func readsExactly(t *testing.T, agent *mover.Process, group netns.Cgroup, want mover.Counts) {
	t.Helper()
	eventually(t, func() error {
		var r Reading
		if err := agent.Try("Agent.Read", mover.Nothing(0), &r); err != nil {
			t.Fatal(err)
		}
		var all traffic.Counts
		for i, key := range r.Keys {
			if key.Cgroup == group.ID {
				all.Add(r.Counts[i])
			}
		}
		if payload(all) != want {
			return errors.New("not all is counted")
		}
		return nil
	})
}

func TestAnAgentThatLosesItsRightsFailsOrGoesOnAndDoesNotCrash(t *testing.T) {
	client, server := two(t)
	ours := netns.NewCgroup(t)
	serve, call := mover.Start(t, server, netns.NewCgroup(t)), mover.Start(t, client, ours)
	agent := mover.Start(t, netns.New(t), netns.NewCgroup(t))
	agent.Do("Agent.Open", Wish{}, new(mover.Nothing))
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"})})
	call.Exchange(mover.Request{Up: 10, Down: 50_000})
	readsExactly(t, agent, ours, call.Totals())
	agent.Do("Agent.Drop", []uint{}, new(mover.Nothing))
	call.Exchange(mover.Request{Up: 10, Down: 50_000})
	// From 6.10 on the kernel asks for rights only where something is made.
	if err := agent.Try("Agent.Read", mover.Nothing(0), new(Reading)); err == nil {
		readsExactly(t, agent, ours, call.Totals())
	} else if !strings.Contains(err.Error(), "lacks the capabilities BPF and PERFMON") {
		t.Errorf("read without rights: %v, want it to say what is missing", err)
	}
	if agent.Try("Agent.Open", Wish{}, new(mover.Nothing)) == nil {
		t.Error("opened without rights")
	}
}

func TestAfterCloseEveryCallFailsAndNoneCrashes(t *testing.T) {
	p, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Fatal(err)
	}
	_, counts := p.Counts()
	_, status := p.Status()
	for what, err := range map[string]error{
		"Walk": p.Walk(nil), "Counts": counts, "Status": status, "Fold": p.Fold(Key{}, Key{Flight: 1}), "Tag": p.Tag(0, traffic.KV, 1),
		"SetPorts": p.SetPorts(map[uint16]traffic.Class{1: traffic.KV}), "SetRanges": p.SetRanges(map[netip.Prefix]traffic.Class{}),
	} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s after Close: %v, want %v", what, err, os.ErrClosed)
		}
	}
}

func TestDatagramsWithoutACgroupOfTheUnifiedHierarchyAreOffAndTheRestIsOn(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		p, err := Open(Options{Datagrams: dir})
		if err != nil {
			t.Fatal(err)
		}
		if s := sensor(t, p.Sensors(), SensorDatagrams); s.On || !s.Wanted || s.Reason == "" {
			t.Errorf("sensor datagrams: %+v, want it off with a reason", s)
		}
		if !p.On(SensorSockets) || !p.On(SensorWalk) || !p.On(SensorSeed) {
			t.Errorf("sensors %+v, want the rest on", p.Sensors())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestPinsThatCannotBeMadeAreOffAndTheRestIsOn(t *testing.T) {
	readOnly := netns.MountBPF(t)
	if err := unix.Mount("", readOnly, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for dir, why := range map[string]string{t.TempDir(): "mount -t bpf", readOnly: "read-only file system"} {
		p, err := Open(Options{Pins: filepath.Join(dir, "hearth")})
		if err != nil {
			t.Fatal(err)
		}
		if s := sensor(t, p.Sensors(), SensorPins); s.On || !strings.Contains(s.Reason, why) {
			t.Errorf("sensor pins: %+v, want it off with %q", s, why)
		}
		if !p.On(SensorSockets) || !p.On(SensorWalk) || !p.On(SensorSeed) {
			t.Errorf("sensors %+v, want the rest on", p.Sensors())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestPinsThatAreRemovedMeanwhileAreToldToBeOff(t *testing.T) {
	t.Parallel()
	pins := pinned(t)
	p := opened(t, Options{Pins: pins})
	if err := Unpin(pins); err != nil {
		t.Fatal(err)
	}
	if err := p.Walk(nil); err != nil || !p.On(SensorWalk) {
		t.Errorf("the walk ended with the pins: %v", err)
	}
	for _, sensor := range p.Sensors() {
		if on := sensor.Name != SensorPins && sensor.Name != SensorDatagrams; sensor.On != on {
			t.Errorf("%s: on %v, reason %q", sensor.Name, sensor.On, sensor.Reason)
		}
		if sensor.Name == SensorPins && !strings.Contains(sensor.Reason, pins) {
			t.Errorf("reason %q", sensor.Reason)
		}
	}
}

func TestAnAgentWithProcessIDsOfItsOwnSaysThatItMissesOlderConnections(t *testing.T) {
	agent := mover.StartIn(t, netns.New(t), netns.NewCgroup(t), unix.CLONE_NEWPID)
	agent.Do("Agent.Open", Wish{}, new(mover.Nothing))
	var sensors []Sensor
	agent.Do("Agent.Sensors", mover.Nothing(0), &sensors)
	if s := sensor(t, sensors, SensorSeed); s.On || !strings.Contains(s.Reason, "hostPID: true") {
		t.Errorf("sensor seed: %+v, want it off for the lack of hostPID", s)
	}
	if s := sensor(t, sensors, SensorSockets); !s.On {
		t.Errorf("sensor sockets is off: %s", s.Reason)
	}
}
