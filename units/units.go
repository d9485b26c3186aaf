// Package units holds the quantities that appear in configuration and on the
// command line as text: byte counts, byte rates and durations. Every other
// package may use it; it imports nothing of Hearth and keeps no state.
package units

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Bytes is a count of bytes. Its text form is an integer with an optional
// binary (KiB, MiB, GiB, TiB) or decimal (kB, MB, GB, TB) unit: "256MiB".
type Bytes int64

// Binary multiples of a byte.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
	TiB Bytes = 1 << 40
)

var byteUnits = []struct {
	suffix string
	factor float64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"B", 1},
	{"", 1},
}

// ParseBytes reads the text form of Bytes. Negative counts, unknown units and
// values past int64 are errors.
func ParseBytes(s string) (Bytes, error) {
	text := strings.TrimSpace(s)
	for _, u := range byteUnits {
		number, found := strings.CutSuffix(text, u.suffix)
		if !found {
			continue
		}
		number = strings.TrimSpace(number)
		if whole, err := strconv.ParseInt(number, 10, 64); err == nil {
			if whole < 0 || whole > math.MaxInt64/int64(u.factor) {
				break
			}
			return Bytes(whole * int64(u.factor)), nil
		}
		value, err := strconv.ParseFloat(number, 64)
		if err != nil || value < 0 || math.IsNaN(value) || value*u.factor >= math.MaxInt64 {
			break
		}
		return Bytes(value * u.factor), nil
	}
	return 0, fmt.Errorf("parse byte count %q: want a number with an optional unit, such as 512MiB or 1.5GB", s)
}

// String gives the shortest exact text form: "256MiB", or plain bytes where no
// binary unit divides the count.
func (b Bytes) String() string {
	if b != 0 {
		for _, u := range byteUnits[:4] {
			if factor := Bytes(u.factor); b%factor == 0 {
				return strconv.FormatInt(int64(b/factor), 10) + u.suffix
			}
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}

// Human gives a rounded form for people: "1.4 GiB". It does not round-trip.
func (b Bytes) Human() string {
	for _, u := range byteUnits[:4] {
		if float64(b) >= u.factor {
			return strconv.FormatFloat(float64(b)/u.factor, 'f', 1, 64) + " " + u.suffix
		}
	}
	return strconv.FormatInt(int64(b), 10) + " B"
}

// UnmarshalText implements encoding.TextUnmarshaler with ParseBytes.
func (b *Bytes) UnmarshalText(text []byte) error {
	v, err := ParseBytes(string(text))
	if err != nil {
		return err
	}
	*b = v
	return nil
}

// MarshalText implements encoding.TextMarshaler with String.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// Rate is a number of bytes per second; 0 means unlimited where a rate bounds
// something. Its text form is a byte count with "/s": "500MB/s".
type Rate int64

// ParseRate reads the text form of Rate; "unlimited" and "0" are 0.
func ParseRate(s string) (Rate, error) {
	text := strings.TrimSpace(s)
	if text == "unlimited" || text == "0" {
		return 0, nil
	}
	count, found := strings.CutSuffix(text, "/s")
	if !found {
		return 0, fmt.Errorf("parse byte rate %q: want a byte count per second, such as 500MB/s, or unlimited", s)
	}
	b, err := ParseBytes(count)
	if err != nil {
		return 0, fmt.Errorf("parse byte rate %q: want a byte count per second, such as 500MB/s, or unlimited", s)
	}
	return Rate(b), nil
}

// String gives the text form, "unlimited" for 0.
func (r Rate) String() string {
	if r == 0 {
		return "unlimited"
	}
	return Bytes(r).String() + "/s"
}

// UnmarshalText implements encoding.TextUnmarshaler with ParseRate.
func (r *Rate) UnmarshalText(text []byte) error {
	v, err := ParseRate(string(text))
	if err != nil {
		return err
	}
	*r = v
	return nil
}

// MarshalText implements encoding.TextMarshaler with String.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Duration is a span of time whose text form is Go's: "1m30s", "250ms".
type Duration time.Duration

// Std returns the standard library's type.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String gives Go's text form.
func (d Duration) String() string { return time.Duration(d).String() }

// UnmarshalText implements encoding.TextUnmarshaler with time.ParseDuration.
// A number without a unit is an error, except 0.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("parse duration %q: want a number with a unit, such as 250ms, 30s or 1h", text)
	}
	*d = Duration(v)
	return nil
}

// MarshalText implements encoding.TextMarshaler with String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }
