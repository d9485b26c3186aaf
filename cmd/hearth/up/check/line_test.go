package check

import "testing"

func TestFiguresAreShownByNameWithTheirUnits(t *testing.T) {
	t.Parallel()
	got := line(map[string]any{"originBytes": int64(256 << 20), "seconds": 1.25, "laterTTFTms": 17.5, "must": "seconds <= 1"})
	if want := `laterTTFTms=17.5 must="seconds <= 1" originBytes=256.0MiB seconds=1.25`; got != want {
		t.Errorf("line = %s, want %s", got, want)
	}
}
