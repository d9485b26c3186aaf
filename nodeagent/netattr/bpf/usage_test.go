//go:build root

package bpf

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestUsageIsOfEachProgramThatRunsWhileTheKernelKeepsStatistics(t *testing.T) {
	statistics, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = statistics.Close() }()
	client, server := two(t)
	p := opened(t, Options{})
	before, err := p.Usage()
	if err != nil {
		t.Fatal(err)
	}
	serve, call := mover.Start(t, server, netns.NewCgroup(t)), mover.Start(t, client, netns.NewCgroup(t))
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Count: 10})
	call.Exchange(mover.Request{Up: 100, Down: 100})
	if err := p.Walk(nil); err != nil {
		t.Fatal(err)
	}
	after, err := p.Usage()
	if err != nil {
		t.Fatal(err)
	}
	for program, least := range map[string]uint64{netattrProgSockSetState: 20, netattrProgWalk: 20} {
		was, is := before.Programs[program], after.Programs[program]
		if is.Runs < was.Runs+least || is.Time <= was.Time {
			t.Errorf("%s: %+v after %+v, want at least %d runs more", program, is, was, least)
		}
	}
	for _, m := range []string{netattrMapAcct, netattrMapHere, netattrMapAccepted} {
		if after.Maps[m] == 0 {
			t.Errorf("map %s takes no memory", m)
		}
	}
	call.Hangup(false)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Usage(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("usage of a closed probe: %v", err)
	}
}
