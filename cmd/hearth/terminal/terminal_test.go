package terminal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestTableAlignsColumnsAndDisarmsControlCharacters(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := Table(&out, []string{"NODE", "STATE"}, [][]string{{"node-1", "ready"}, {"n\x1b[2J", ""}}); err != nil {
		t.Fatal(err)
	}
	want := "NODE    STATE\nnode-1  ready\nn?[2J   -\n"
	if out.String() != want {
		t.Errorf("table =\n%q, want\n%q", out.String(), want)
	}
}

func TestErrorsCarryTheirExitStatusAndHint(t *testing.T) {
	t.Parallel()
	refused := Fail(ExitRefused, errors.New("remove artifact: in use"), "stop the engine first")
	for _, test := range []struct {
		err  error
		code Code
		text string
	}{
		{nil, ExitOK, ""},
		{errors.New("pull: disk full"), ExitFailure, "hearth: pull: disk full\n"},
		{Usagef("no component %q", "x"), ExitUsage, "hearth: no component \"x\"\n"},
		{fmt.Errorf("pull: %w", context.Canceled), ExitInterrupted, "hearth: pull: context canceled\n"},
		{fmt.Errorf("rm: %w", refused), ExitRefused, "hearth: rm: remove artifact: in use\nhint: stop the engine first\n"},
	} {
		var out bytes.Buffer
		Report(&out, test.err)
		if CodeOf(test.err) != test.code || out.String() != test.text {
			t.Errorf("%v: status %d and %q, want %d and %q", test.err, CodeOf(test.err), out.String(), test.code, test.text)
		}
	}
	if Fail(ExitFailure, nil, "") != nil {
		t.Error("Fail of nil is not nil")
	}
}

func TestProgressWithoutATerminalSaysLittleAndEnds(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := NewProgress(&out)
	now := time.Unix(0, 0)
	p.now = func() time.Time { return now }
	p.Set("x", "resolving", 0, 0)
	for i := range int64(101) {
		now = now.Add(100 * time.Millisecond)
		p.Set("x", "filling", i<<20, 100<<20)
	}
	p.Done("x", "ready")
	p.Done("x", "ready")
	p.Set("x", "filling", 0, 100<<20)
	p.Close()
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) < 5 || len(lines) > 13 {
		t.Errorf("%d lines for one transfer:\n%s", len(lines), out.String())
	}
	if lines[0] != "x: resolving" || lines[len(lines)-1] != "x: ready" || !strings.Contains(out.String(), "x: filling 50%") {
		t.Errorf("lines:\n%s", out.String())
	}
}

func TestLoggerWritesJSONWhereNobodyWatches(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := Logger(&out, "warn")
	log.Info("quiet")
	log.Warn("loud")
	if got := out.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"msg":"loud"`) {
		t.Errorf("log = %q", got)
	}
}

func TestAnOutputThatIsNoTerminalHas80ColumnsAndASCII(t *testing.T) {
	t.Parallel()
	if columns, utf8 := Width(&bytes.Buffer{}), UTF8(&bytes.Buffer{}); columns != 80 || utf8 {
		t.Errorf("a buffer has %d columns, UTF-8 %v", columns, utf8)
	}
	for want, environments := range map[bool][]map[string]string{
		true:  {{"LANG": "de_DE.UTF-8"}, {"LC_CTYPE": "C.utf8", "LANG": "C"}, {"LC_ALL": "en_US.UTF-8", "LANG": "C"}},
		false: {{}, {"LANG": "C"}, {"LC_ALL": "C", "LANG": "en_US.UTF-8"}},
	} {
		for _, env := range environments {
			if got := utf8Locale(func(name string) string { return env[name] }); got != want {
				t.Errorf("%v shows UTF-8: %v", env, got)
			}
		}
	}
}
