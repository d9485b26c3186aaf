//go:build root

package bpf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDegradedKernelIsTold runs in kernels that lack what the programs need,
// where HEARTH_EXPECT is "degraded"; elsewhere it holds that nothing is lacking.
func TestDegradedKernelIsTold(t *testing.T) {
	p, err := Open(Options{})
	if err == nil {
		for _, sensor := range p.Sensors() {
			if sensor.VerifierLog == "" {
				continue
			}
			name := filepath.Join(t.ArtifactDir(), "verifier-"+sensor.Name+".txt")
			if err := os.WriteFile(name, []byte(sensor.Reason+"\n"+sensor.VerifierLog), 0o600); err != nil {
				t.Error(err)
			}
		}
		defer func() { _ = p.Close() }()
	}
	if os.Getenv("HEARTH_EXPECT") != "degraded" {
		if err != nil {
			t.Fatal(err)
		}
		for _, sensor := range p.Sensors() {
			if sensor.Wanted && !sensor.On {
				t.Errorf("sensor %s: %s\n%s", sensor.Name, sensor.Reason, sensor.VerifierLog)
			}
		}
		return
	}
	if err == nil {
		t.Fatalf("opened, with %+v; want an error", p.Sensors())
	}
	t.Log(err)
	if text := err.Error(); !strings.Contains(text, "Linux 5.15 or newer") || strings.Contains(text, "MEMLOCK") || strings.Contains(text, "\n") {
		t.Errorf("%q does not say in one line which kernel is wanted", text)
	}
}
