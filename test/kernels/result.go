package kernels

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// Outcome is how a suite ended in a kernel. The counts are of top-level tests.
type Outcome struct {
	Passed   int      `json:"passed"`
	Failed   []string `json:"failed,omitempty"`  // names
	Skipped  []string `json:"skipped,omitempty"` // names
	Supports []string `json:"support,omitempty"` // those that tests stated, each once
	Status   int      `json:"status"`            // of the program
	Seconds  float64  `json:"seconds"`
	ended    bool
}

// Result is what a machine told.
type Result struct {
	Release  string              `json:"release,omitempty"` // uname -r
	BTF      bool                `json:"btf"`               // the kernel describes its types
	BootedIn float64             `json:"booted_in_seconds"` // from QEMU's start until process 1 is ready
	Kernel   float64             `json:"kernel_seconds"`    // the same as the kernel counts it, without firmware and unpacking
	Total    float64             `json:"total_seconds"`     // until QEMU's end
	Suites   map[string]*Outcome `json:"suites,omitempty"`  // by name
	done     bool
	broken   string
}

// Row is a kernel's line of the report.
type Row struct {
	Name      string   `json:"name"`
	Package   string   `json:"package,omitempty"` // name and version; empty where it cannot be had
	ConfigBTF bool     `json:"config_btf"`        // its configuration has CONFIG_DEBUG_INFO_BTF
	Support   Support  `json:"support"`           // expected
	NotRun    string   `json:"not_run,omitempty"` // why it did not run, or not to the end
	Faults    []string `json:"faults,omitempty"`  // what is not as expected
	Allowed   string   `json:"allowed,omitempty"` // why NotRun is no failure
	Result
}

// Verdict is how a row ended.
type Verdict string

// The verdicts.
const (
	Pass   Verdict = "pass"
	Fail   Verdict = "FAIL"
	NotRun Verdict = "not run"
)

var (
	verdict = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+)`)
	attr    = regexp.MustCompile(`^=== ATTR  \S+ support (\S+)$`)
)

// Add takes a record into the result.
func (r *Result) Add(record Record) {
	switch record.Kind {
	case KindBooted:
		r.Release, r.BTF, r.Kernel = record.Release, record.BTF, record.Seconds
		return
	case KindDone:
		r.done = true
		return
	case KindBroken:
		r.broken = record.Text
		return
	}
	outcome := r.Suites[record.Suite]
	if outcome == nil {
		outcome = &Outcome{}
		r.Suites[record.Suite] = outcome
	}
	switch record.Kind {
	case KindEnded:
		outcome.Status, outcome.Seconds, outcome.ended = record.Status, record.Seconds, true
	case KindLine:
		if found := verdict.FindStringSubmatch(record.Text); found != nil {
			switch found[1] {
			case "PASS":
				outcome.Passed++
			case "FAIL":
				outcome.Failed = append(outcome.Failed, found[2])
			case "SKIP":
				outcome.Skipped = append(outcome.Skipped, found[2])
			}
		}
		if found := attr.FindStringSubmatch(record.Text); found != nil && !slices.Contains(outcome.Supports, found[1]) {
			outcome.Supports = append(outcome.Supports, found[1])
		}
	}
}

// Judge gives what of a result is not as expected: the suites that had to run with
// this support all ran, tested something, passed, and found it so.
func (r *Result) Judge(suites []Suite, support Support) []string {
	var faults []string
	for _, suite := range suites {
		if suite.Run[support] == "" {
			continue
		}
		outcome := r.Suites[suite.Name]
		say := func(format string, args ...any) {
			faults = append(faults, suite.Name+": "+fmt.Sprintf(format, args...))
		}
		if outcome == nil || !outcome.ended {
			say("did not end")
		}
		if outcome == nil {
			continue
		}
		for _, name := range outcome.Failed {
			say("%s failed", name)
		}
		for _, name := range outcome.Skipped {
			say("%s skipped itself", name)
		}
		if outcome.ended && outcome.Status != 0 && len(outcome.Failed) == 0 {
			say("ended with status %d and no failed test", outcome.Status)
		}
		if outcome.ended && outcome.Status == 0 && outcome.Passed == 0 {
			say("ran no test")
		}
		for _, found := range outcome.Supports {
			if Support(found) != support {
				say("found support %s, expected %s", found, support)
			}
		}
	}
	return faults
}

// Verdict tells how the row ended.
func (r Row) Verdict() Verdict {
	switch {
	case r.NotRun != "" && r.Allowed != "":
		return NotRun
	case r.NotRun != "" || len(r.Faults) > 0:
		return Fail
	}
	return Pass
}

// found is the support that the suites found; the expected one where none says.
func (r Row) found() string {
	var kinds []string
	for _, outcome := range r.Suites {
		kinds = append(kinds, outcome.Supports...)
	}
	if len(kinds) == 0 {
		return string(r.Support)
	}
	slices.Sort(kinds)
	return strings.Join(slices.Compact(kinds), "+")
}

// Summary counts the rows by their verdicts.
func Summary(rows []Row) string {
	count := map[Verdict]int{}
	for _, row := range rows {
		count[row.Verdict()]++
	}
	return fmt.Sprintf("%d kernels passed, %d failed, %d not run", count[Pass], count[Fail], count[NotRun])
}

// WriteTable writes a line for each row.
func WriteTable(out io.Writer, rows []Row) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "KERNEL\tRELEASE\tBTF\tBOOTED IN\tTOTAL\tPASSED\tFAILED\tSUPPORT\tVERDICT")
	for _, row := range rows {
		passed, failed := 0, 0
		for _, outcome := range row.Suites {
			passed += outcome.Passed
			failed += len(outcome.Failed)
		}
		btf := "no"
		if row.BTF {
			btf = "yes"
		}
		note := string(row.Verdict())
		if row.NotRun != "" {
			note += ": " + row.NotRun
		}
		if row.Release == "" {
			fmt.Fprintf(table, "%s\t-\t-\t-\t-\t-\t-\t%s\t%s\n", row.Name, row.Support, note)
			continue
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.1f s\t%.1f s\t%d\t%d\t%s\t%s\n", row.Name, row.Release, btf,
			row.BootedIn, row.Total, passed, failed, row.found(), note)
	}
	return table.Flush()
}

// HasBTF reports whether a kernel's configuration builds its types in.
func HasBTF(config string) bool {
	return slices.Contains(strings.Split(config, "\n"), "CONFIG_DEBUG_INFO_BTF=y")
}
