package health

import (
	_ "embed"
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/units"
)

// TableVersion is the version of the table's form.
const TableVersion = 1

//go:embed xid.yaml
var builtIn []byte

// clearRule says what ends a condition. Greater is stricter.
type clearRule uint8

const (
	clearByAge clearRule = iota
	clearByReset
	clearByBoot
	clearByHand
)

var clearNames = map[string]clearRule{"age": clearByAge, "reset": clearByReset, "boot": clearByBoot, "manual": clearByHand}

// Row is what an XID means. A row without a condition changes nothing.
type Row struct {
	Codes          []int           `yaml:"codes"`
	Meaning        string          `yaml:"meaning"`
	Action         string          `yaml:"action"`      // the catalogue's immediate action
	Investigate    string          `yaml:"investigate"` // the catalogue's investigatory action
	Condition      string          `yaml:"condition"`
	Severity       device.Severity `yaml:"severity"`
	Then           device.Severity `yaml:"then"`
	After          units.Duration  `yaml:"after"`
	Clear          string          `yaml:"clear"`
	Repeat         int             `yaml:"repeat"`
	Within         units.Duration  `yaml:"within"`
	RepeatSeverity device.Severity `yaml:"repeatSeverity"`
	Cancels        []int           `yaml:"cancels"`

	clear clearRule
}

// Table maps XID codes to rows. It is read-only once made.
type Table map[int]Row

// unknown is the row of a code that no table has: it is shown and lowers the
// device's rank, since nobody knows that it is harmless.
var unknown = Row{
	Meaning: "unknown code", Action: "CONTACT_SUPPORT",
	Condition: device.AppFault, Severity: device.Degrade, Clear: "age", clear: clearByAge,
}

// Row gives the row of a code, the row of unknown codes where there is none.
func (t Table) Row(code int) Row {
	if row, found := t[code]; found {
		return row
	}
	return unknown
}

// BuiltIn is the table that comes with the program.
func BuiltIn() (Table, error) { return ParseTable(builtIn) }

// With gives a table in which the rows of over replace those of t.
func (t Table) With(over Table) Table {
	merged := maps.Clone(t)
	maps.Copy(merged, over)
	return merged
}

// ParseTable reads a table. Unknown fields, repeated codes and rows that do
// not make sense are errors naming the code.
func ParseTable(text []byte) (Table, error) {
	var file struct {
		Version int   `yaml:"version"`
		Rows    []Row `yaml:"rows"`
	}
	if err := yaml.UnmarshalWithOptions(text, &file, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("parse xid table: %w", err)
	}
	if file.Version != TableVersion {
		return nil, fmt.Errorf("parse xid table: version is %d, want %d", file.Version, TableVersion)
	}
	table := Table{}
	for _, row := range file.Rows {
		if err := row.check(); err != nil {
			return nil, fmt.Errorf("parse xid table: row of codes %v: %w", row.Codes, err)
		}
		for _, code := range row.Codes {
			if _, found := table[code]; found {
				return nil, fmt.Errorf("parse xid table: code %d has two rows", code)
			}
			table[code] = row
		}
	}
	return table, nil
}

func (r *Row) check() error {
	if len(r.Codes) == 0 || r.Meaning == "" || r.Action == "" {
		return fmt.Errorf("want codes, meaning and action")
	}
	for _, code := range r.Codes {
		if code <= 0 || code > math.MaxUint16 {
			return fmt.Errorf("code %d is not between 1 and %d", code, math.MaxUint16)
		}
	}
	if r.Condition == "" {
		if r.Severity != 0 || r.Then != 0 || r.Repeat != 0 || r.Clear != "" {
			return fmt.Errorf("severity, then, repeat and clear want a condition")
		}
		return nil
	}
	if !knownCondition(r.Condition) {
		return fmt.Errorf("unknown condition %q", r.Condition)
	}
	rule, found := clearNames[r.Clear]
	if !found {
		return fmt.Errorf("clear is %q, want age, reset, boot or manual", r.Clear)
	}
	r.clear = rule
	if r.Then != 0 && (r.Then <= r.Severity || r.After <= 0) {
		return fmt.Errorf("then wants a worse severity than %s and after a time", r.Severity)
	}
	if r.Repeat != 0 && (r.Repeat < 2 || r.Repeat > maxRecent || r.Within <= 0 || r.RepeatSeverity <= r.Severity) {
		return fmt.Errorf("repeat wants 2 to %d facts, a time within, and a worse repeatSeverity", maxRecent)
	}
	return nil
}

func knownCondition(key string) bool {
	switch key {
	case device.AppFault, device.ResetRequired, device.RebootRequired, device.Lost, device.MemoryDegraded,
		device.PendingRemap, device.FabricDegraded, device.Thermal, device.Unmonitored:
		return true
	}
	return false
}

func (r Row) within() time.Duration { return r.Within.Std() }
