package tidy

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// room is a line of the picture in ARCHITECTURE.md: two spaces of indent for
// each folder above it, and its name.
var room = regexp.MustCompile(`^( *)([a-z][a-z0-9/-]*)`)

func TestThePictureOfTheRoomsIsTheTree(t *testing.T) {
	t.Parallel()
	_, rest, found := strings.Cut(page(t, "ARCHITECTURE.md"), "## Rooms\n```\n")
	picture, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("ARCHITECTURE.md: no picture under Rooms")
	}
	lines := map[string]string{} // by folder
	var above []string
	for line := range strings.Lines(picture) {
		match := room.FindStringSubmatch(line)
		if match == nil || len(match[1])/2 > len(above) {
			t.Errorf("ARCHITECTURE.md: a room is a folder below the one before: %q", line)
			continue
		}
		above = append(above[:len(match[1])/2], strings.TrimSuffix(match[2], "/"))
		folder := path.Join(above...)
		lines[folder] = line
		if info, err := os.Stat(filepath.Join(root, folder)); err != nil || !info.IsDir() {
			t.Errorf("ARCHITECTURE.md: the room %s is not there", folder)
		}
	}
	var missing []string
	for _, s := range goFiles(t) {
		folder := s.dir()
		// A conformance suite stands beside what it tests and is named for it.
		suite := strings.HasSuffix(path.Base(folder), "test") && path.Base(folder) != "test"
		if lines[folder] != "" || suite || strings.HasPrefix(folder, "test/") || slices.Contains(missing, folder) {
			continue
		}
		if !strings.Contains(lines[path.Dir(folder)], path.Base(folder)) && !strings.Contains(picture, folder) && !strings.Contains(picture, path.Base(folder)+"/ is ") {
			missing = append(missing, folder)
			t.Errorf("ARCHITECTURE.md: the picture lacks the room %s", folder)
		}
	}
}
