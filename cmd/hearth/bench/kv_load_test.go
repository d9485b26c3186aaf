package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

// blockServer keeps values as a RESP server does; answer may change what a GET is
// told.
type blockServer struct {
	mu     sync.Mutex
	values map[string]string
	answer func(key, value string, there bool) string
}

func plainAnswer(_, value string, there bool) string {
	if !there {
		return "$-1\r\n"
	}
	return fmt.Sprintf("$%d\r\n%s\r\n", len(value), value)
}

// serve answers at an address, and at the socket of dir, until the test ends.
func (b *blockServer) serve(t *testing.T, dir string) (tcp, unix string) {
	t.Helper()
	unix = filepath.Join(dir, "s")
	var lc net.ListenConfig
	for _, at := range []struct{ network, address string }{{"tcp", "127.0.0.1:0"}, {"unix", unix}} {
		ln, err := lc.Listen(t.Context(), at.network, at.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		if at.network == "tcp" {
			tcp = ln.Addr().String()
		}
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				go b.talk(conn)
			}
		}()
	}
	return tcp, unix
}

func (b *blockServer) talk(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	in := bufio.NewReader(conn)
	for {
		words, err := readCommand(in)
		if err != nil {
			return
		}
		if _, err := io.WriteString(conn, b.do(words)); err != nil {
			return
		}
	}
}

func (b *blockServer) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.values)
}

func (b *blockServer) do(words []string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	value, there := b.values[words[1]]
	switch words[0] {
	case "GET":
		return b.answer(words[1], value, there)
	case "SET":
		b.values[words[1]] = words[2]
		return "+OK\r\n"
	case "DEL":
		delete(b.values, words[1])
		return map[bool]string{true: ":1\r\n", false: ":0\r\n"}[there]
	}
	return "-ERR unknown\r\n"
}

func readCommand(in *bufio.Reader) ([]string, error) {
	number := func(mark byte) (int, error) {
		line, err := in.ReadString('\n')
		if err != nil || line[0] != mark {
			return 0, fmt.Errorf("line %q: %w", line, err)
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := number('*')
	if err != nil {
		return nil, err
	}
	words := make([]string, n)
	for i := range words {
		size, err := number('$')
		if err != nil {
			return nil, err
		}
		text := make([]byte, size+2)
		if _, err := io.ReadFull(in, text); err != nil {
			return nil, err
		}
		words[i] = string(text[:size])
	}
	return words, nil
}

// load lets a load client carry orders out, as the child does.
func load(t *testing.T, orders ...kvOrder) []kvOutcome {
	t.Helper()
	var in, out bytes.Buffer
	for _, o := range orders {
		text, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&in, "%s\ngo\n", text)
	}
	if err := serveLoad(&in, &out); err != nil {
		t.Fatal(err)
	}
	answers, outcomes := json.NewDecoder(&out), make([]kvOutcome, len(orders))
	for i := range outcomes {
		for range 2 { // that it is ready, and what came
			if err := answers.Decode(&outcomes[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return outcomes
}

func TestTheLoadClientSetsGetsAndDropsWhatItIsTold(t *testing.T) {
	t.Parallel()
	const size, keys = 70_000, 9
	for _, unix := range []bool{false, true} {
		s := &blockServer{values: map[string]string{}, answer: plainAnswer}
		addr, socket := s.serve(t, t.TempDir())
		if unix {
			addr = socket
		}
		order := func(op kvOp, conns, ops int) kvOrder {
			return kvOrder{Addr: addr, Data: "s", Op: op, Size: size, Keys: keys, Conns: conns, Ops: ops}
		}
		got := load(t, order(kvSet, 4, 0), order(kvGet, 4, 40), order(kvSet, 3, 30), order(kvGet, 1, 130))
		for i, want := range []kvOutcome{{Ops: keys, Checked: keys}, {Ops: 40, Checked: 4}, {Ops: 30, Checked: 9}, {Ops: 130, Checked: 3}} {
			if g := got[i]; g.Error != "" || g.Ops != want.Ops || g.Checked != want.Checked || g.Missed != 0 || g.Bytes != int64(want.Ops*size) || g.Seconds <= 0 {
				t.Errorf("unix %t, order %d: %+v, want %+v", unix, i, g, want)
			}
		}
		if n := s.count(); n != keys {
			t.Errorf("unix %t: the server has %d values, want %d", unix, n, keys)
		}
		if got := load(t, order(kvDrop, 4, 0))[0]; got.Error != "" || got.Ops != keys || s.count() != 0 {
			t.Errorf("unix %t: after %+v the server has %d values", unix, got, s.count())
		}
	}
}

func TestTheLoadClientCountsWhatIsNotThere(t *testing.T) {
	t.Parallel()
	for _, miss := range []string{"$-1\r\n", "$-001\r\n"} {
		s := &blockServer{values: map[string]string{}, answer: func(string, string, bool) string { return miss }}
		addr, _ := s.serve(t, t.TempDir())
		got := load(t, kvOrder{Addr: addr, Op: kvGet, Size: 4096, Keys: 1, Conns: 1})[0]
		if got.Error != "" || got.Missed != 1 || got.Bytes != 0 {
			t.Errorf("%q: %+v", miss, got)
		}
	}
}

func TestTheLoadClientNamesAWrongByte(t *testing.T) {
	t.Parallel()
	flip := func(at int) func(string, string, bool) string {
		return func(key, value string, there bool) string {
			text := []byte(value)
			text[(at+len(text))%len(text)] ^= 1
			return plainAnswer(key, string(text), there)
		}
	}
	for name, answer := range map[string]func(string, string, bool) string{
		"other bytes": flip(-1), "of key 1": flip(0), "in version 0": flip(8),
		"begins": func(_, value string, _ bool) string {
			return fmt.Sprintf("$%d\r\n%s\r\n ", len(value)-1, value[:len(value)-1])
		},
		"-ERR": func(string, string, bool) string { return "-ERR none\r\n" },
	} {
		s := &blockServer{values: map[string]string{}, answer: answer}
		addr, _ := s.serve(t, t.TempDir())
		got := load(t, kvOrder{Addr: addr, Op: kvSet, Size: 4096, Keys: 1, Conns: 1})[0]
		if !strings.Contains(got.Error, name) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestAnOrderThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	good := kvOrder{Addr: "127.0.0.1:1", Op: kvGet, Size: 4096, Keys: 16, Conns: 16, Ops: 1}
	for _, change := range []func(*kvOrder){
		func(o *kvOrder) { o.Conns = 0 }, func(o *kvOrder) { o.Conns = 17 }, func(o *kvOrder) { o.Keys = 15 },
		func(o *kvOrder) { o.Size = 8 }, func(o *kvOrder) { o.Size = 65 << 20 },
	} {
		order := good
		change(&order)
		text, err := json.Marshal(order)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := serveLoad(bytes.NewReader(text), &out); err != nil || !strings.Contains(out.String(), "cannot be") {
			t.Errorf("%+v: %v: %s", order, err, &out)
		}
	}
}

func TestTheAimIsHeldAgainstTheBetterPeer(t *testing.T) {
	t.Parallel()
	row := againstBest(Row{Name: "cpu", Better: lower, Aim: 1.3, References: []Reference{{"one", 4, 2}, {"two", 2.5, 1.25}}, Ratio: 2, Met: true})
	if row.References[0].Name != "two" || row.References[1].Name != "one" || row.Ratio != 1.25 || row.Met {
		t.Errorf("%+v", row)
	}
}

func TestEveryCellOfTheRESPServerHasItsAim(t *testing.T) {
	t.Parallel()
	type aims struct{ cpu, rate float64 }
	for cell, want := range map[kvCell]aims{
		{kvGet, "unix", 512 * units.KiB, 4}: {1 / 0.75, 0}, {kvGet, "unix", 64 * units.KiB, 4}: {1, 0},
		{kvGet, "tcp", 32 * units.MiB, 4}: {1, 1.5}, {kvGet, "unix", 2 * units.MiB, 16}: {1 / 0.75, 0},
		{kvSet, "unix", 2 * units.MiB, 4}: {1, 1.5}, {kvSet, "tcp", 64 * units.KiB, 1}: {1, 0},
	} {
		cpu, _ := cell.cpuAim()
		rate, _ := cell.rateAim()
		if (aims{cpu, rate}) != want {
			t.Errorf("%s: %v and %v, want %v", cell.name(), cpu, rate, want)
		}
	}
	names := map[string]bool{}
	for _, size := range kvSizes {
		for _, c := range kvCells(size, true) {
			names[c.name()] = true
			if order := c.order(&kvServer{name: "s"}, kvMoved); order.Keys < c.conns || order.Ops < c.conns {
				t.Errorf("%s: %+v", c.name(), order)
			}
		}
	}
	if len(names) != 2*2*3*len(kvSizes) || !names["resp_get_unix_2MiB_4c"] {
		t.Errorf("%d cells: %v", len(names), maps.Keys(names))
	}
}
