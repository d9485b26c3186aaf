package units

import (
	"testing"
	"time"
)

func TestParseBytesReadsBinaryAndDecimalUnits(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Bytes{
		"0": 0, "7": 7, "7B": 7, "4KiB": 4096, "256MiB": 256 << 20, "1.5GiB": 3 << 29,
		"2TiB": 2 << 40, "10kB": 10_000, "3 MB": 3_000_000, "1GB": 1e9, "8388607TiB": 8388607 << 40,
	} {
		got, err := ParseBytes(text)
		if err != nil || got != want {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
}

func TestParseBytesRefusesWhatIsNotAByteCount(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "-1", "-1MiB", "12XB", "MiB", "NaN", "8388608TiB", "9223372036854775808", "1e400", "1.5.2GB"} {
		if got, err := ParseBytes(text); err == nil {
			t.Errorf("ParseBytes(%q) = %d, want an error", text, got)
		}
	}
}

func TestTextFormsRoundTrip(t *testing.T) {
	t.Parallel()
	for _, b := range []Bytes{0, 1, 1023, KiB, 3 * MiB, 5 * GiB, TiB, 1e9 + 1} {
		got, err := ParseBytes(b.String())
		if err != nil || got != b {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", b.String(), got, err, b)
		}
	}
	for _, r := range []Rate{0, 1, 500_000_000, Rate(GiB)} {
		got, err := ParseRate(r.String())
		if err != nil || got != r {
			t.Errorf("ParseRate(%q) = %d, %v; want %d", r.String(), got, err, r)
		}
	}
	var d Duration
	if err := d.UnmarshalText([]byte("1m30s")); err != nil || d.Std() != 90*time.Second {
		t.Errorf("UnmarshalText(1m30s) = %v, %v", d, err)
	}
	if err := d.UnmarshalText([]byte("90")); err == nil {
		t.Error("UnmarshalText(90) accepted a duration without a unit")
	}
}

func TestHumanRoundsForPeople(t *testing.T) {
	t.Parallel()
	if got := Bytes(1503238553).Human(); got != "1.4 GiB" {
		t.Errorf("Human() = %q", got)
	}
	if got := Bytes(12).Human(); got != "12 B" {
		t.Errorf("Human() = %q", got)
	}
}
