package kernels

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

var bpf = []Suite{{Name: "bpf", Run: map[Support]string{Full: "."}}}

// told gives the result of a machine whose suite bpf prints these lines and ends.
func told(status int, lines ...string) *Result {
	result := &Result{Suites: map[string]*Outcome{}}
	for _, line := range lines {
		result.Add(Record{Kind: KindLine, Suite: "bpf", Text: line})
	}
	result.Add(Record{Kind: KindEnded, Suite: "bpf", Status: status})
	return result
}

func TestOnlyASuiteThatRanAndPassedIsAsExpected(t *testing.T) {
	t.Parallel()
	pass := "--- PASS: TestA (0.00s)"
	for _, c := range []struct {
		name   string
		result *Result
		want   []string
	}{
		{"passes", told(0, "=== RUN   TestA", "    --- PASS: TestA/b (0.00s)", pass), nil},
		{"fails", told(1, pass, "--- FAIL: TestB (0.01s)"), []string{"bpf: TestB failed"}},
		{"skips", told(0, pass, "--- SKIP: TestB (0.01s)"), []string{"bpf: TestB skipped itself"}},
		{"dies", told(255, pass), []string{"bpf: ended with status 255 and no failed test"}},
		{"tests nothing", told(0, "testing: warning: no tests to run"), []string{"bpf: ran no test"}},
		{"is missing", &Result{}, []string{"bpf: did not end"}},
		{"is cut off", &Result{Suites: map[string]*Outcome{"bpf": {Passed: 1}}}, []string{"bpf: did not end"}},
		{"finds the support", told(0, "=== ATTR  TestA support full", pass), nil},
		{"finds another", told(0, "=== ATTR  TestA support degraded", pass), []string{"bpf: found support degraded, expected full"}},
	} {
		if got := c.result.Judge(bpf, Full); !slices.Equal(got, c.want) {
			t.Errorf("a suite that %s: %q, want %q", c.name, got, c.want)
		}
	}
	if got := (&Result{}).Judge(bpf, Degraded); got != nil {
		t.Errorf("a suite without a pattern for this support: %q", got)
	}
}

func TestAKernelThatCannotBeHadIsNotRunAndNoPass(t *testing.T) {
	t.Parallel()
	ran := Row{Name: "6.1", Support: Full, Result: *told(0, "--- PASS: TestA (0.00s)")}
	ran.Release, ran.BTF = "6.1.0-57", true
	rows := []Row{
		ran,
		{Name: "5.15", Support: Full, NotRun: "no such suite", Allowed: "elsewhere"},
		{Name: "6.12", Support: Full, NotRun: "no such suite"},
		{Name: "sid", Support: Full, Faults: []string{"bpf: TestA failed"}},
	}
	if got, want := Summary(rows), "1 kernels passed, 2 failed, 1 not run"; got != want {
		t.Errorf("summary %q, want %q", got, want)
	}
	var table strings.Builder
	if err := WriteTable(&table, rows); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`(?m)^6\.1 +6\.1\.0-57 +yes .* 1 +0 +full +pass$`, `(?m)^5\.15 .*not run: no such suite$`, `(?m)^6\.12 .*FAIL: no such suite$`} {
		if !regexp.MustCompile(want).MatchString(table.String()) {
			t.Errorf("no line like %s in\n%s", want, table.String())
		}
	}
}

func TestEachKernelOfTheTableHasItsOwnName(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, kernel := range Table {
		if seen[kernel.Name] || kernel.Support != Full && kernel.Support != Degraded {
			t.Errorf("kernel %q, support %q", kernel.Name, kernel.Support)
		}
		seen[kernel.Name] = true
		if _, err := regexp.Compile(kernel.Package); err != nil {
			t.Error(err)
		}
	}
}
