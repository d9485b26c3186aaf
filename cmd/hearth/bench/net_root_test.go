//go:build root

package bench

import (
	"strings"
	"testing"
	"time"
)

func TestNetworkAccountingIsMeasuredInEveryRow(t *testing.T) {
	t.Parallel()
	b := &netBench{
		sizes: netSizes{
			few: 20, many: 80, connections: 50, datagrams: 50, stream: 4 << 20, walks: 2,
			span: 1200 * time.Millisecond, spans: 1, window: 20 * time.Millisecond, pairs: 3,
		},
		pairs: 2, dir: t.TempDir(), note: func(line string) { t.Log(line) },
	}
	rows, err := b.measure(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	i := 0
	for _, part := range netParts {
		for _, want := range netTable[part.name] {
			if i >= len(rows) || rows[i].Name != want.Name {
				t.Fatalf("row %d of %d is not %s", i, len(rows), want.Name)
			}
			row := rows[i]
			if row.Value <= 0 || strings.Contains(row.Note, "not measured") || row.Unit != want.Unit || row.Pairs == 0 {
				t.Errorf("%+v", row)
			}
			i++
		}
	}
	if i != len(rows) {
		t.Errorf("%d rows, want %d", len(rows), i)
	}
	if b.event.perConnection < 6 {
		t.Errorf("%.1f runs a connection, and each of its ends begins, is open and ends", b.event.perConnection)
	}
}

func TestARoomHasConnectionsOfItsOwnAndLeavesNone(t *testing.T) {
	t.Parallel()
	r, err := newRoom()
	if err != nil {
		t.Fatal(err)
	}
	defer r.end()
	s, err := r.listen()
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.diag()
	if err != nil {
		t.Fatal(err)
	}
	defer d.end()
	count := func() (sockets int, passed uint64) {
		if err := d.dump(inetDiagInfo, func(one diagnosed) { sockets++; passed += one.sent + one.received }); err != nil {
			t.Fatal(err)
		}
		return sockets, passed
	}
	if err := s.hold(30); err != nil {
		t.Fatal(err)
	}
	if sockets, passed := count(); sockets != 60 || passed != 0 {
		t.Errorf("%d sockets with %d bytes, want 60 without any", sockets, passed)
	}
	if err := s.touch(10); err != nil {
		t.Fatal(err)
	}
	if _, passed := count(); passed != 3*2*100 {
		t.Errorf("%d bytes passed, want 600", passed)
	}
	if each, err := s.churn(t.Context(), &roomClient, upTo(10)); err != nil || each <= 0 {
		t.Errorf("%v a connection, %v", each, err)
	}
	for name, run := range map[string]func() (float64, error){
		"stream":   func() (float64, error) { return s.stream(t.Context(), upTo(1<<20)) },
		"exchange": func() (float64, error) { return r.exchange(t.Context(), upTo(10)) },
	} {
		if rate, err := run(); err != nil || rate <= 0 {
			t.Errorf("%s: %v, %v", name, rate, err)
		}
	}
	s.end()
	if sockets, _ := count(); sockets != 0 {
		t.Errorf("%d sockets are left", sockets)
	}
}
