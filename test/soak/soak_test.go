//go:build soak

package soak

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// defaultSoak is how long a soak takes where SOAK says nothing.
const defaultSoak = 10 * time.Minute

func TestTheBooksAgreeAfterALongMixedLoadWithFaults(t *testing.T) {
	t.Parallel()
	d, seed := defaultSoak, uint64(time.Now().UnixNano())
	if text := os.Getenv("SOAK"); text != "" {
		var err error
		if d, err = time.ParseDuration(text); err != nil || d < 20*time.Second {
			t.Fatalf("SOAK=%s: want a duration of at least 20s", text)
		}
	}
	if text := os.Getenv("SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("SEED=%s: want a number", text)
		}
	}
	t.Logf("SOAK=%s SEED=%d", d, seed)
	s, err := Soak(t.Context(), t.TempDir(), seed, d, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range s.Steps {
		if !step.OK {
			t.Errorf("%s: %s", step.Name, step.Error)
		}
	}
}
