package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAMarkerMakesAnEmptyDirectoryAStoreAndRefusesOthers(t *testing.T) {
	t.Parallel()
	newer := errors.New("newer")
	m := Marker{Name: "FORMAT", Prefix: "hearth test ", Version: 2, What: "test store", Newer: newer, Beside: []string{"lock"}}
	write := func(t *testing.T, dir, name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	empty := t.TempDir()
	if err := m.Read(OS, empty); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty directory gives %v", err)
	}
	write(t, empty, "lock", "")
	for range 2 {
		if err := m.Ensure(OS, empty); err != nil {
			t.Errorf("an empty directory gives %v", err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(empty, "FORMAT")); err != nil || string(text) != "hearth test 2\n" {
		t.Errorf("the marker is %q, %v", text, err)
	}
	for text, want := range map[string]string{
		"hearth test 1\n": "", "hearth test 2": "", "hearth test 3\n": "version 3, this code knows 2", "hearth test 0\n": "want", "hearth other 1\n": "want",
		"": "want", "hearth test x": "want", strings.Repeat("x", maxMarker+1): "",
	} {
		dir := t.TempDir()
		write(t, dir, "FORMAT", text)
		err := m.Ensure(OS, dir)
		known := text == "hearth test 1\n" || text == "hearth test 2"
		if (err == nil) != known || err != nil && !strings.Contains(err.Error(), want) || errors.Is(err, newer) != (text == "hearth test 3\n") {
			t.Errorf("marker %q gives %v", text, err)
		}
	}
	foreign := t.TempDir()
	write(t, foreign, "photos", "")
	if err := m.Ensure(OS, foreign); err == nil || !strings.Contains(err.Error(), `"photos"`) || !strings.Contains(err.Error(), "no test store") {
		t.Errorf("a directory of somebody else gives %v", err)
	}
}
