package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Marker is the file that says what a directory is and of which version: one
// line, Prefix and a number. Every version of a store reads it the same, so that
// what is newer than known is refused before anything in it is touched.
type Marker struct {
	Name    string // of the file
	Prefix  string // "hearth weightcache ", with the space
	Version int    // what this code writes, and the newest that it reads; from 1
	What    string // of the directory, for people: "weight store"
	Newer   error  // wrapped where a directory is of a newer version
	// Beside names files that a directory may hold before it has a marker.
	Beside []string
}

// maxMarker bounds a marker, in bytes.
const maxMarker = 64

// Read reads the version of a directory. Errors wrap fs.ErrNotExist where there
// is none, and Newer.
func (m Marker) Read(fsys FS, dir string) error {
	data, err := ReadRegular(fsys, filepath.Join(dir, m.Name), maxMarker)
	if err != nil {
		return err
	}
	text, found := strings.CutPrefix(strings.TrimSuffix(string(data), "\n"), m.Prefix)
	version, err := strconv.Atoi(text)
	if !found || err != nil || version < 1 {
		return fmt.Errorf("%s says %.40q, want %q and a version", m.Name, data, m.Prefix)
	}
	if version > m.Version {
		return fmt.Errorf("%w: version %d, this code knows %d", m.Newer, version, m.Version)
	}
	return nil
}

// Ensure reads the version, or writes it durably into a directory that holds
// nothing but what may be beside it.
func (m Marker) Ensure(fsys FS, dir string) error {
	err := m.Read(fsys, dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := e.Name(); !IsTemp(name) && !slices.Contains(m.Beside, name) {
			return fmt.Errorf("the directory holds %q and no %s file: it is no %s, and only an empty directory becomes one", name, m.Name, m.What)
		}
	}
	return WriteFile(fsys, filepath.Join(dir, m.Name), []byte(m.Prefix+strconv.Itoa(m.Version)+"\n"), 0o600)
}
