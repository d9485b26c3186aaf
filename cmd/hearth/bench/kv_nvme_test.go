package bench

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

func TestParallelDoesEachThingOnceAndTellsWhatFailed(t *testing.T) {
	t.Parallel()
	var done [100]atomic.Int32
	ended := false
	per, err := parallel(7, len(done), 10, func(i, conn int) error {
		done[i].Add(1)
		if conn < 0 || conn >= 7 {
			t.Errorf("connection %d of 7", conn)
		}
		return nil
	}, func() error { ended = true; return nil })
	if err != nil || per <= 0 || !ended {
		t.Errorf("%v bytes per second, ended: %v, %v", per, ended, err)
	}
	for i := range done {
		if n := done[i].Load(); n != 1 {
			t.Errorf("%d was done %d times", i, n)
		}
	}
	broken := errors.New("no disk")
	if _, err := parallel(3, 9, 1, func(int, int) error { return broken }, nil); !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
}

func TestPartsOfMemoryAreTheSizeOfABlockOverAndOver(t *testing.T) {
	t.Parallel()
	m := make([]byte, 35)
	for i := range m {
		m[i] = byte(i)
	}
	n := &nvmeBench{size: 10}
	for i, want := range []byte{0, 10, 20, 0, 10} {
		if p := n.part(m, i); len(p) != 10 || p[0] != want {
			t.Errorf("part %d has %d bytes from %d on, want 10 from %d", i, len(p), p[0], want)
		}
	}
}

func TestAStoreThatWasKilledHasWhatItKnewToBeWritten(t *testing.T) {
	t.Parallel()
	dir, set := t.TempDir(), 64*units.MiB
	var found int64
	for round := range 3 {
		told, err := killWriter(t.Context(), dir, set, round*1000, 8)
		if err != nil {
			t.Fatal(err)
		}
		s, err := restartStore(t.Context(), dir, set)
		if err != nil {
			t.Fatal(err)
		}
		recovered := s.tenant.Stats().Recovered
		s.end()
		if told < 8 || recovered < found+told {
			t.Errorf("round %d: %d blocks are there, %d were before and %d were told to be written", round, recovered, found, told)
		}
		found = recovered
	}
}

func TestAPartThatThereIsNotIsNotMeasured(t *testing.T) {
	t.Parallel()
	cmd := Command()
	cmd.SetArgs([]string{"kv", "--only", "nvme,nothing"})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), `"nothing"`) {
		t.Errorf("an unknown part: %v", err)
	}
}
