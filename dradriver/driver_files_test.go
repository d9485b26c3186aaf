package dradriver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAMetadataFileIsReplacedWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "metadata.json")
	for _, text := range []string{"old and longer", "new"} {
		if err := replaceFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != text {
			t.Errorf("got %q, %v", got, err)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	taken := filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(taken, "full"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := replaceFile(taken, []byte("x"), 0o644); err == nil {
		t.Error("a folder was replaced")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left are %v, %v", entries, err)
	}
}

func TestMetadataOfAClaimWhoseNameIsTooLongForAFileIsNoneToRemove(t *testing.T) {
	t.Parallel()
	remove := metadataFiles().RemoveAll
	dir := t.TempDir()
	if err := remove(filepath.Join(dir, folderOf("ns", strings.Repeat("n", 253)))); err != nil {
		t.Errorf("a claim with a name of 253 bytes could not be unprepared: %v", err)
	}
	kept := filepath.Join(dir, folderOf("ns", "n"), "gpu")
	if err := os.MkdirAll(kept, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := remove(filepath.Dir(kept)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(kept)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of a claim is there: %v", err)
	}
}
