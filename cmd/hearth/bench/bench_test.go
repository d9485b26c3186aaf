package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestRoundsOrientTheRatioSoThatMoreIsBetter(t *testing.T) {
	t.Parallel()
	constant := func(v float64) func() (float64, error) { return func() (float64, error) { return v, nil } }
	fast, err := rounds(Row{Name: "cpu", Better: lower, Aim: 1.25}, 3, constant(4), contender{"ref", constant(6)}, contender{"peer", constant(2)})
	if err != nil || fast.Ratio != 1.5 || !fast.Met || fast.References[0].Value != 6 || fast.References[1].Ratio != 0.5 || fast.Pairs != 3 {
		t.Errorf("lower is better: %+v, %v", fast, err)
	}
	slow, err := rounds(Row{Name: "rate", Better: higher, Aim: 0.9}, 2, constant(4), contender{"ref", constant(8)})
	if err != nil || slow.Ratio != 0.5 || slow.Met {
		t.Errorf("higher is better: %+v, %v", slow, err)
	}
}

func TestRoundsTakeTurnsAtGoingFirst(t *testing.T) {
	t.Parallel()
	var order []string
	note := func(name string) func() (float64, error) {
		return func() (float64, error) { order = append(order, name); return 1, nil }
	}
	if _, err := rounds(Row{Better: lower}, 3, note("own"), contender{"ref", note("ref")}, contender{"peer", note("peer")}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"own", "ref", "peer", "ref", "peer", "own", "peer", "own", "ref"}; !slices.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
}

func TestRoundsNameTheRowThatCouldNotBeMeasured(t *testing.T) {
	t.Parallel()
	broken := func() (float64, error) { return 0, errors.New("no disk") }
	if _, err := rounds(Row{Name: "landing"}, 1, broken, contender{"ref", broken}); err == nil || !strings.Contains(err.Error(), "landing") {
		t.Errorf("error %v does not name the row", err)
	}
}

func TestFixedEngineAnswersEveryModeToTheBenchsOwnClient(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	addr, err := freeAddr(ctx)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- newFixedEngine().serve(ctx, addr) }()
	var c *client
	for c == nil {
		if c, err = dial(ctx, addr); err != nil {
			select {
			case err := <-served:
				t.Fatal(err)
			default:
			}
		}
	}
	defer func() { _ = c.conn.Close() }()
	for _, mode := range []string{modeJSON, modeStream1, modeBurst64, modePaced1, modeJSON} {
		if err := c.do(requestBytes(mode, mode != modeJSON, 800, "test")); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
	}
	if err := closedLoop(ctx, addr, 4, 40, 0, func(int) []byte { return requestBytes(modeJSON, false, 800, "loop") }); err != nil {
		t.Error(err)
	}
	held := false
	if err := holdStreams(ctx, addr, 3, 0, requestBytes(modeIdle, true, 800, "idle"), func() error { held = true; return nil }); err != nil || !held {
		t.Errorf("hold streams: %v, held %t", err, held)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestRenderReplacesOnlyTheMarkedSection(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	page, data := filepath.Join(dir, "README.md"), filepath.Join(dir, "router.json")
	report, err := json.Marshal(Report{Schema: Schema, Bench: "router", Commit: "abc", Rows: []Row{
		{Name: "small_json_cpu", Value: 50, Unit: "us/request", Better: lower, Ratio: 1.4, Aim: 1.05, Met: true, References: []Reference{{Name: "R", Value: 70, Ratio: 1.4}}},
		{Name: "lone_chunk_cpu", Value: 20, Unit: "us/chunk", Better: lower, Ratio: 0.5, Aim: 0.9, References: []Reference{{Name: "R", Value: 10, Ratio: 0.5}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string][]byte{page: []byte("head\n" + markBegin + "\nold\n" + markEnd + "\ntail\n"), data: report} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := renderCommand()
	cmd.SetArgs([]string{"--by", "make measure", "--page", page, data})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"head\n", "\ntail\n", "Written by `make measure` on", "<code>hearth bench router</code> at commit abc: ", "small_json_cpu | 50 | us/request | R: 70 | 1.40 | 1.05 | yes", "**no**", "router.svg"} {
		if !bytes.Contains(got, []byte(want)) {
			t.Errorf("page lacks %q:\n%s", want, got)
		}
	}
	if bytes.Contains(got, []byte("old")) {
		t.Error("the old section is still there")
	}
	plot, err := os.ReadFile(filepath.Join(dir, "router.svg"))
	if err != nil || !bytes.Contains(plot, []byte("<svg")) {
		t.Errorf("plot: %v", err)
	}
}

func TestTheFixedEngineFindsTheModeWhereverAProxyPutsIt(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 5000)
	for body, want := range map[string]string{
		`{"user":"bench-one","model":"m"}`:                                    modeStream1,
		`{"messages":[{"content":"` + long + `"}],"user":"bench-burst"}`:      modeBurst64,
		`{"model":"m","stream":true,"user":"bench-slow64","max_tokens":64}`:   modePaced64,
		`{"messages":[{"role":"user","content":"` + long + `"}],"model":"m"}`: "",
	} {
		if got := string(modeOf([]byte(body))); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%.60s: mode %q, want %q", body, got, want)
		}
	}
}
