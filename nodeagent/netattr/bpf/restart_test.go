//go:build root

package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// pinned gives a folder for pins, which is made when it is used.
func pinned(t *testing.T) string {
	t.Helper()
	return filepath.Join(netns.MountBPF(t), "hearth")
}

// unpinLinks ends the programs that are pinned and leaves the maps.
func unpinLinks(t *testing.T, pins string) {
	t.Helper()
	links, err := filepath.Glob(filepath.Join(pins, "*", "link_*"))
	if err != nil || len(links) == 0 {
		t.Fatalf("pinned links: %v, %v", links, err)
	}
	for _, link := range links {
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
}

// busy is traffic that goes on all the time: a part on connections that stay, a
// part on connections that come and go.
type busy struct {
	t            *testing.T
	ours, theirs netns.Cgroup
	serve        *mover.Process
	call, churn  *mover.Process
	address      string
	stop         chan struct{}
	rounds       chan int
	missed       uint64 // by probes that are closed, and at the end by all
}

func startBusy(t *testing.T) *busy {
	t.Helper()
	client, server := two(t)
	b := &busy{t: t, ours: netns.NewCgroup(t), theirs: netns.NewCgroup(t), stop: make(chan struct{}), rounds: make(chan int, 1)}
	b.serve, b.call, b.churn = mover.Start(t, server, b.theirs), mover.Start(t, client, b.ours), mover.Start(t, client, b.ours)
	b.address = b.serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	return b
}

// begin starts the traffic, for which somebody has to watch already.
func (b *busy) begin() {
	b.t.Helper()
	b.call.Dial(mover.Socket{Address: b.address, Count: 8})
	b.call.Stream(mover.Request{Up: 3000, Down: 20_000})
	go func() {
		rounds := 0
		defer func() { b.rounds <- rounds }()
		for {
			select {
			case <-b.stop:
				return
			default:
			}
			err := b.churn.Try("End.Churn", mover.Churn{
				Socket: mover.Socket{Address: b.address, Count: 10}, AtOnce: 2, Request: mover.Request{Up: 100, Down: 5000},
			}, new(mover.Nothing))
			if err != nil {
				b.t.Error(err)
				return
			}
			rounds++
		}
	}()
}

// end stops it and holds the counts of a probe to the books.
func (b *busy) end(p *Probe) {
	b.t.Helper()
	close(b.stop)
	rounds := <-b.rounds
	b.call.Quiet()
	b.call.Hangup(false)
	b.serve.Ended(8 + 10*rounds)
	called, churned := b.call.Totals(), b.churn.Totals()
	want := mover.Counts{Sent: called.Sent + churned.Sent, Received: called.Received + churned.Received}
	b.missedOf(p)
	b.exactly(p, b.ours, want)
	b.exactly(p, b.theirs, b.serve.Totals())
	b.t.Logf("%d connections came and went, %d bytes were sent and %d received", 10*rounds, want.Sent, want.Received)
}

// missedOf notes what a probe has missed before it is closed.
func (b *busy) missedOf(p *Probe) {
	b.t.Helper()
	status, err := p.Status()
	if err != nil {
		b.t.Fatal(err)
	}
	b.missed += status.Missed
}

// exactly holds counts to the books; where the kernel left runs of the program
// out, they may lack as many short connections.
func (b *busy) exactly(p *Probe, of netns.Cgroup, want mover.Counts) {
	b.t.Helper()
	if b.missed == 0 {
		exactly(b.t, p, in(of), want)
		return
	}
	b.t.Logf("at most %d begins and ends were missed", b.missed)
	const most = 6000 // bytes of a short connection, either way
	eventually(b.t, func() error {
		got := payload(sum(walked(b.t, p, in(of))))
		if got.Sent > want.Sent || got.Received > want.Received || want.Sent-got.Sent > b.missed*most || want.Received-got.Received > b.missed*most {
			return fmt.Errorf("counted %+v, want %+v but for %d connections", got, want, b.missed)
		}
		return nil
	})
}

// some is a while of traffic, in bytes.
func some() uint64 { return uint64(shorter(1<<20, 200_000)) }

// moved waits until so many more bytes have arrived: time, as the traffic has it.
func (b *busy) moved(more uint64) {
	b.t.Helper()
	began := b.call.Totals().Received
	eventually(b.t, func() error {
		if b.call.Totals().Received-began < more {
			return errors.New("nothing moves")
		}
		return nil
	})
}

func TestCountsGoOnWhileAProbeRestarts(t *testing.T) {
	pins := pinned(t)
	b := startBusy(t)
	first := opened(t, Options{Pins: pins})
	b.begin()
	for range shorter(5, 2) {
		b.moved(some())
		if err := first.Walk(nil); err != nil {
			t.Fatal(err)
		}
		b.missedOf(first)
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		b.moved(some())
		first = opened(t, Options{Pins: pins})
	}
	b.end(first)
}

func TestCountsGoOnAfterAProcessIsKilled(t *testing.T) {
	pins := pinned(t)
	b := startBusy(t)
	here := netns.New(t)
	var last *mover.Process
	for round := range 3 {
		agent := mover.Start(t, here, netns.NewCgroup(t))
		agent.Do("Agent.Open", Wish{Pins: pins}, new(mover.Nothing))
		if last != nil {
			last.Kill()
		}
		if round == 0 {
			b.begin()
		}
		b.moved(some())
		agent.Do("Agent.Read", mover.Nothing(0), new(Reading))
		last = agent
	}
	last.Kill()
	b.moved(some())
	b.end(opened(t, Options{Pins: pins}))
}

func TestTwoProbesWithTheSamePinsCountEachByteOnce(t *testing.T) {
	pins := pinned(t)
	b := startBusy(t)
	probes := []*Probe{opened(t, Options{Pins: pins}), opened(t, Options{Pins: pins}), opened(t, Options{Pins: pins})}
	b.begin()
	stop := make(chan struct{})
	var walking sync.WaitGroup
	walks := make([]int, len(probes))
	for i, p := range probes {
		walking.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				most := uint64(0)
				if err := p.Walk(func(r Row) { most = max(most, r.Received, r.Transmitted) }); err != nil {
					t.Error(err)
					return
				}
				if most > 1<<40 {
					t.Errorf("a row says %d bytes", most)
				}
				walks[i]++
			}
		})
	}
	b.moved(uint64(shorter(256<<20, 4<<20)))
	close(stop)
	walking.Wait()
	b.end(probes[0])
	counts := sum(walked(t, probes[0], in(b.ours)))
	if counts.ReceivedHeaders > counts.Received || counts.TransmittedHeaders > counts.Received {
		t.Errorf("more headers than can be: %+v", counts)
	}
	t.Logf("walks: %v", walks)
}

func TestAnotherLayoutIsLeftAlone(t *testing.T) {
	pins := pinned(t)
	b := startBusy(t)
	old := opened(t, Options{Pins: pins, Layout: "v0"})
	b.begin()
	next := opened(t, Options{Pins: pins})
	scoped := opened(t, Options{Pins: pins, Scope: netns.NewCgroup(t).ID})
	b.moved(some())
	if err := errors.Join(next.Close(), scoped.Close()); err != nil {
		t.Fatal(err)
	}
	b.moved(some())
	b.end(old)
	dirs, err := os.ReadDir(pins)
	if err != nil || len(dirs) != 3 {
		t.Errorf("folders of pins: %v, %v, want three", dirs, err)
	}
}

func TestUnpinEndsEveryProgram(t *testing.T) {
	pins := pinned(t)
	programs := map[ebpf.ProgramID]bool{}
	for _, opts := range []Options{{Pins: pins}, {Pins: pins}, {Pins: pins, Layout: "v0"}, {Pins: pins, Datagrams: netns.CgroupRoot(t).Path}} {
		p := opened(t, opts)
		for _, program := range p.progs {
			info, err := program.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			programs[id] = true
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (n int) {
		for id := range programs {
			if program, err := ebpf.NewProgramFromID(id); err == nil {
				_ = program.Close()
				n++
			}
		}
		return n
	}
	// Two instances of each layout see connections on.
	eventually(t, func() error {
		if n := left(); n != 4 {
			return errors.New("programs that go on after Close are not four")
		}
		return nil
	})
	if err := Unpin(pins); err != nil {
		t.Fatal(err)
	}
	if err := Unpin(pins); err != nil {
		t.Errorf("again: %v", err)
	}
	eventually(t, func() error {
		if n := left(); n != 0 {
			return errors.New("programs go on after Unpin")
		}
		return nil
	})
}
