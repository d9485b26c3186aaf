package kvtier

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/units"
)

func TestAFlushWhoseTimeIsUpSealsAndWritesNoMore(t *testing.T) {
	t.Parallel()
	l, err := newHistory(1)
	if err != nil {
		t.Fatal(err)
	}
	l.spec.AdmitAll, l.spec.Memory = true, 3*units.MiB
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	for key := range 4 {
		if err := errors.Join(l.put(x(key)), l.write(l.tenant())); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.put(x(6)); err != nil { // it is not written before
		t.Fatal(err)
	}
	over, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	l.tenant().flush(over)
	if _, err := l.fs.Stat(l.tenant().checkpointPath()); err == nil {
		t.Error("a checkpoint is written after the time is up")
	}
	for _, s := range l.tenant().drive.Segments() {
		if !s.Sealed {
			t.Error("a segment is not sealed")
		}
	}
	if s := l.tenant().Stats(); s.Written != 4 {
		t.Errorf("%d blocks are written, 4 before the time was up", s.Written)
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	l.tenant().flush(soon)
	if _, err := l.fs.Stat(l.tenant().checkpointPath()); err != nil || l.tenant().Stats().Written != 5 {
		t.Errorf("with time left: %v, %d blocks are written", err, l.tenant().Stats().Written)
	}
	closeCache(t, l.cache)
	if d := checkpointTime(10_000_000); d < time.Second || d > 10*time.Second {
		t.Errorf("a checkpoint of 10 million blocks takes %s", d)
	}
}
