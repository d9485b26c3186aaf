package health

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/dradriver/device"
)

var start = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)

func builtInTable(t *testing.T) Table {
	t.Helper()
	table, err := BuiltIn()
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func xid(code int) device.Fact { return device.Fact{Kind: device.FactXID, Code: code} }
func recoveryFact(action int) device.Fact {
	return device.Fact{Kind: device.FactRecovery, Code: action}
}
func kind(k device.FactKind) device.Fact { return device.Fact{Kind: k} }

type step struct {
	fact device.Fact
	wait time.Duration // before the fact
	want string        // "key=value/severity ..." after it
}

func render(s state) string {
	var list []string
	for _, c := range s.conditions() {
		list = append(list, c.Key+"="+c.Value+"/"+c.Severity.String())
	}
	return strings.Join(list, " ")
}

func TestNextFoldsFactsIntoConditions(t *testing.T) {
	t.Parallel()
	table := builtInTable(t)
	for name, steps := range map[string][]step{
		"a lost device stays lost through a reset and comes back with a boot": {
			{xid(79), 0, "lost=xid-79/evict"},
			{kind(device.FactReset), time.Minute, "lost=xid-79/evict"},
			{kind(device.FactPresent), time.Minute, "lost=xid-79/evict"},
			{kind(device.FactBoot), time.Minute, ""},
		},
		"a harmless code does not make a condition milder": {
			{xid(48), 0, "reset-required=xid-48/no-new"},
			{xid(45), time.Second, "reset-required=xid-48/no-new"},
			{xid(38), time.Second, "reset-required=xid-48/no-new"},
			{xid(120), time.Second, "reset-required=xid-120/evict"},
			{xid(48), time.Second, "reset-required=xid-120/evict"},
			{kind(device.FactReset), time.Second, ""},
		},
		"no-new grows to evict after its grace": {
			{xid(46), 0, "reset-required=xid-46/no-new"},
			{kind(device.FactTime), 59 * time.Second, "reset-required=xid-46/no-new"},
			{kind(device.FactTime), time.Second, "reset-required=xid-46/evict"},
		},
		"a reset in the grace ends it": {
			{xid(46), 0, "reset-required=xid-46/no-new"},
			{kind(device.FactReset), 30 * time.Second, ""},
			{kind(device.FactTime), time.Minute, ""},
		},
		"an application's fault ends by age, counted from its last fact": {
			{xid(31), 0, "app-fault=xid-31/notice"},
			{xid(43), 9 * time.Minute, "app-fault=xid-31/notice"},
			{kind(device.FactTime), 9 * time.Minute, "app-fault=xid-31/notice"},
			{kind(device.FactTime), time.Minute, ""},
		},
		"repeated watchdog stops degrade": {
			{xid(8), 0, "app-fault=xid-8/notice"},
			{xid(8), time.Hour, "app-fault=xid-8/notice"},
			{xid(8), time.Hour, "app-fault=xid-8/degrade"},
		},
		"watchdog stops days apart do not add up": {
			{xid(8), 0, "app-fault=xid-8/notice"},
			{xid(8), 25 * time.Hour, "app-fault=xid-8/notice"},
			{xid(8), 25 * time.Hour, "app-fault=xid-8/notice"},
		},
		"a pending remap prefers others until the next reset": {
			{xid(63), 0, "pending-remap=xid-63/degrade"},
			{kind(device.FactReset), time.Hour, ""},
		},
		"a failed remap ends by hand only": {
			{xid(64), 0, "memory-degraded=xid-64/no-new"},
			{kind(device.FactReset), time.Hour, "memory-degraded=xid-64/no-new"},
			{kind(device.FactBoot), time.Hour, "memory-degraded=xid-64/no-new"},
			{kind(device.FactCleared), time.Hour, ""},
		},
		"162 cancels 163": {
			{xid(163), 0, "thermal=xid-163/degrade"},
			{xid(162), time.Second, ""},
		},
		"162 leaves a condition that another code holds too": {
			{xid(163), 0, "thermal=xid-163/degrade"},
			{xid(164), time.Second, "thermal=xid-163/degrade"},
			{xid(162), time.Second, "thermal=xid-163/degrade"},
		},
		"the driver's verdict holds back a reset's proof": {
			{xid(109), 0, "reset-required=xid-109/no-new"},
			{recoveryFact(1), time.Second, "reset-required=recovery-1/evict"},
			{kind(device.FactReset), time.Second, "reset-required=recovery-1/evict"},
			{recoveryFact(0), time.Second, "reset-required=recovery-1/evict"},
			{kind(device.FactReset), time.Second, ""},
		},
		"a verdict of none ends what only the verdict set": {
			{recoveryFact(3), 0, "fabric-degraded=recovery-3/no-new"},
			{recoveryFact(0), time.Second, ""},
		},
		"verdicts of newer drivers are not dropped": {
			{recoveryFact(5), 0, "fabric-degraded=recovery-5/degrade"},
			{recoveryFact(7), time.Second, "fabric-degraded=recovery-5/degrade reboot-required=recovery-7/evict"},
			{recoveryFact(9), time.Second, "fabric-degraded=recovery-5/degrade reboot-required=recovery-7/evict reset-required=recovery-9/no-new"},
		},
		"a device that answers again is not lost": {
			{kind(device.FactLost), 0, "lost=no-answer/evict"},
			{kind(device.FactPresent), time.Second, ""},
		},
		"conditions stand side by side": {
			{xid(79), 0, "lost=xid-79/evict"},
			{xid(74), time.Second, "fabric-degraded=xid-74/no-new lost=xid-79/evict"},
			{kind(device.FactReset), time.Second, "lost=xid-79/evict"},
		},
		"an unknown code degrades and ends by age": {
			{xid(999), 0, "app-fault=xid-999/degrade"},
			{kind(device.FactTime), maxAge, ""},
		},
		"codes without a condition are only counted": {
			{xid(93), 0, ""}, {xid(154), 0, ""}, {xid(171), 0, ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := start
			var s state
			for i, step := range steps {
				now = now.Add(step.wait)
				before := render(s)
				after, changed := next(table, s, step.fact, now)
				if got := render(after); got != step.want {
					t.Fatalf("step %d: %q, want %q", i, got, step.want)
				}
				if changed != (before != step.want) {
					t.Errorf("step %d: changed is %v from %q to %q", i, changed, before, step.want)
				}
				if render(s) != before {
					t.Fatalf("step %d: next changed its input", i)
				}
				s = after
			}
		})
	}
}

func TestEveryConditionOfTheTableHasAnEnd(t *testing.T) {
	t.Parallel()
	table := builtInTable(t)
	for code := range table {
		s, _ := next(table, state{}, xid(code), start)
		if s.Counts[code] != 1 {
			t.Errorf("xid %d is not counted", code)
		}
		end := kind(device.FactCleared)
		if cleared, _ := next(table, s, end, start.Add(time.Second)); len(cleared.Conditions) != 0 {
			t.Errorf("xid %d: conditions stand after an operator's word: %s", code, render(cleared))
		}
	}
}

func TestTheTableKnowsTheCodesAndActionsOfTheCatalogue(t *testing.T) {
	t.Parallel()
	table := builtInTable(t)
	for code, action := range map[int]string{
		13: "RESTART_APP", 31: "RESTART_APP", 43: "IGNORE", 45: "WORKFLOW_XID_45", 48: "WORKFLOW_XID_48", 63: "IGNORE", 64: "RESET_GPU",
		74: "WORKFLOW_NVLINK_ERR", 79: "RESTART_BM", 94: "RESTART_APP", 95: "RESET_GPU", 109: "RESET_GPU", 119: "RESET_GPU", 120: "RESET_GPU",
		140: "RESET_GPU", 143: "RESET_GPU", 149: "WORKFLOW_NVLINK5_ERR", 151: "RESTART_VM", 154: "INFORMATIONAL", 158: "RESET_GPU", 172: "IGNORE", 176: "IGNORE",
	} {
		if table[code].Action != action {
			t.Errorf("xid %d: action %q, want %q", code, table[code].Action, action)
		}
	}
	if len(table) < 110 {
		t.Errorf("the table has %d codes", len(table))
	}
}

func TestParseTableRefusesRowsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for row, want := range map[string]string{
		"{codes: [1], meaning: x, action: A, condition: broken, severity: notice, clear: age}":                                              "unknown condition",
		"{codes: [1], meaning: x, action: A, condition: lost, severity: notice}":                                                            "clear is",
		"{codes: [1], meaning: x, action: A, condition: lost, severity: bad, clear: age}":                                                   "severity",
		"{codes: [1], meaning: x, action: A, condition: lost, severity: evict, then: no-new, after: 1s, clear: age}":                        "worse severity",
		"{codes: [1], meaning: x, action: A, severity: evict}":                                                                              "want a condition",
		"{codes: [], meaning: x, action: A}":                                                                                                "codes",
		"{codes: [0], meaning: x, action: A}":                                                                                               "between",
		"{codes: [1, 1], meaning: x, action: A}":                                                                                            "two rows",
		"{codes: [1], meaning: x, action: A, colour: red}":                                                                                  "colour",
		"{codes: [1], meaning: x, action: A, condition: lost, severity: evict, clear: age, repeat: 2, within: 1h}":                          "repeat",
		"{codes: [1], meaning: x, action: A, condition: lost, severity: no-new, clear: age, repeat: 99, within: 1h, repeatSeverity: evict}": "repeat",
	} {
		_, err := ParseTable([]byte("version: 1\nrows:\n  - " + row + "\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\n  gave %v, want %q", row, err, want)
		}
	}
	if _, err := ParseTable([]byte("version: 2\nrows: []\n")); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("version 2 gave %v", err)
	}
}

func TestAConfiguredTableReplacesRowsCodeByCode(t *testing.T) {
	t.Parallel()
	over, err := ParseTable([]byte("version: 1\nrows:\n  - {codes: [79], meaning: ours, action: IGNORE}\n"))
	if err != nil {
		t.Fatal(err)
	}
	table := builtInTable(t).With(over)
	if table[79].Condition != "" || table[48].Condition != device.ResetRequired {
		t.Errorf("79: %q, 48: %q", table[79].Condition, table[48].Condition)
	}
}

// run starts a Tracker in the present bubble and gives the func that stops it.
func run(t *testing.T, opts Options) (*Tracker, func()) {
	t.Helper()
	opts.Table = builtInTable(t)
	if opts.Devices == nil {
		opts.Devices = []device.Device{{ID: "gpu-1", Product: "B"}, {ID: "gpu-0", Product: "A"}}
	}
	tracker, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	return tracker, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run gave %v", err)
		}
	}
}

func TestConditionsSurviveARestartAndABootEndsWhatABootEnds(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "health.json")
	synctest.Test(t, func(t *testing.T) {
		tracker, stop := run(t, Options{Path: path, BootID: "one"})
		for id, code := range map[device.ID]int{"gpu-0": 79, "gpu-1": 64} {
			if err := tracker.Apply(t.Context(), device.Fact{Device: id, Kind: device.FactXID, Code: code}); err != nil {
				t.Fatal(err)
			}
		}
		want := tracker.Snapshot()
		stop()

		<-time.After(time.Hour)
		tracker, stop = run(t, Options{Path: path, BootID: "one"})
		got := tracker.Snapshot()
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })); diff != "" {
			t.Errorf("after a restart (-want +got):\n%s", diff)
		}
		if tracker.Counts()["gpu-0"][79] != 1 {
			t.Errorf("counts are %v", tracker.Counts())
		}
		stop()

		tracker, stop = run(t, Options{Path: path, BootID: "two"})
		first, _ := tracker.Snapshot().Find("gpu-0")
		second, _ := tracker.Snapshot().Find("gpu-1")
		if first.Health != device.Healthy || second.Health != device.Unhealthy {
			t.Errorf("after a boot: gpu-0 %v, gpu-1 %v", first.Health, second.Health)
		}
		stop()
	})
}

func TestTimeAloneEndsAndWorsensConditions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tracker, stop := run(t, Options{})
		defer stop()
		changed, unsubscribe := tracker.Subscribe()
		defer unsubscribe()
		apply := func(id device.ID, code int) {
			if err := tracker.Apply(t.Context(), device.Fact{Device: id, Kind: device.FactXID, Code: code}); err != nil {
				t.Fatal(err)
			}
			<-changed
		}
		apply("gpu-0", 31)
		apply("gpu-1", 46)
		began := time.Now()
		<-changed
		s, _ := tracker.Snapshot().Find("gpu-1")
		if s.Conditions[0].Severity != device.Evict || time.Since(began) != time.Minute {
			t.Errorf("after %v gpu-1 is %+v", time.Since(began), s)
		}
		<-changed
		s, _ = tracker.Snapshot().Find("gpu-0")
		if len(s.Conditions) != 0 || time.Since(began) != maxAge {
			t.Errorf("after %v gpu-0 is %+v", time.Since(began), s)
		}
	})
}

func TestAFactOfAnUnknownDeviceIsRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tracker, stop := run(t, Options{})
		defer stop()
		if err := tracker.Apply(t.Context(), device.Fact{Device: "gpu-9", Kind: device.FactXID, Code: 79}); !errors.Is(err, ErrUnknownDevice) {
			t.Errorf("Apply gave %v", err)
		}
	})
}

func TestApplyGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	tracker, err := New(Options{Table: builtInTable(t)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tracker.Apply(ctx, xid(79)); !errors.Is(err, context.Canceled) {
		t.Errorf("Apply gave %v", err)
	}
}

func TestAMalformedStateFileIsQuarantinedAndANewerOneIsLeft(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "health.json")
	for _, text := range []string{"", "{", `{"version":0}`, `{"version":1,"devices":{"a":{"conditions":{"odd":{"key":"odd"}}}}}`, `[1]`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		tracker, err := New(Options{Path: path})
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		kept, err := os.ReadFile(tracker.Quarantined())
		if err != nil || string(kept) != text {
			t.Errorf("%q: kept %q, %v", text, kept, err)
		}
	}
	newer := `{"version":2,"devices":"of another form"}`
	if err := os.WriteFile(path, []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Path: path}); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer file gave %v", err)
	}
	if kept, err := os.ReadFile(path); err != nil || string(kept) != newer {
		t.Errorf("a newer file was changed: %q, %v", kept, err)
	}
}

func TestAStoredStateFileOfVersionOneIsRead(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/health_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	s, err := decode(data)
	if err != nil {
		t.Fatal(err)
	}
	if got := render(s.Devices["gpu-0"]); got != "app-fault=xid-8/degrade reset-required=xid-46/no-new" {
		t.Errorf("gpu-0 is %q", got)
	}
	if c := s.Devices["gpu-0"].Conditions[device.ResetRequired]; c.Then != device.Evict || !c.At.Equal(start.Add(time.Minute)) || c.Clear != clearByReset {
		t.Errorf("reset-required is %+v", c)
	}
}

func FuzzStateFile(f *testing.F) {
	seed, err := os.ReadFile("testdata/health_v1.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	table, err := BuiltIn()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := decode(data)
		if err != nil {
			if !errors.Is(err, errBad) && !errors.Is(err, ErrNewer) {
				t.Fatalf("decode gave %v", err)
			}
			return
		}
		for _, st := range s.Devices {
			wake(st)
			if after, _ := next(table, st, kind(device.FactCleared), start); len(after.Conditions) != 0 {
				t.Fatalf("conditions stand: %s", render(after))
			}
		}
	})
}
