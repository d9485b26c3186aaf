package kernels

import (
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Archive writes an initramfs: a cpio archive in the form "newc", which the
// kernel unpacks into its first file system. It is not compressed: unpacking
// costs more under emulation than reading.
type Archive struct {
	out    *bufio.Writer
	number int
	made   map[string]bool
}

// NewArchive writes to out.
func NewArchive(out io.Writer) *Archive {
	return &Archive{out: bufio.NewWriter(out), made: map[string]bool{"/": true}}
}

// File adds a file with the folders above it. Its name is absolute.
func (a *Archive) File(name string, mode uint32, data []byte) error {
	if err := a.folder(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, 0o100000|mode, data)
}

// Close writes the end. It leaves the writer below open.
func (a *Archive) Close() error {
	if err := a.entry("/TRAILER!!!", 0, nil); err != nil {
		return err
	}
	if err := a.out.Flush(); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

func (a *Archive) folder(name string) error {
	if a.made[name] {
		return nil
	}
	if err := a.folder(path.Dir(name)); err != nil {
		return err
	}
	a.made[name] = true
	return a.entry(name, 0o040755, nil)
}

// entry writes a header, the name and the data, the last two each with zeros up
// to a multiple of four bytes.
func (a *Archive) entry(name string, mode uint32, data []byte) error {
	name = strings.TrimPrefix(name, "/")
	a.number++
	fields := []int{a.number, int(mode), 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0}
	header := []byte("070701")
	for _, field := range fields {
		header = fmt.Appendf(header, "%08x", field)
	}
	header = append(append(header, name...), 0)
	for _, part := range [][]byte{header, data} {
		padded := append(slices.Clip(part), make([]byte, (4-len(part)%4)%4)...)
		if _, err := a.out.Write(padded); err != nil {
			return fmt.Errorf("write initramfs: %w", err)
		}
	}
	return nil
}

// Modules gives the files in dir of the modules wanted and of all that they
// need, each after those that it needs. A module that dir lacks is built into
// the kernel, or the kernel has none; its user will tell.
func Modules(dir string, wanted ...string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	files := map[string]string{}
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), ".ko"); ok {
			files[moduleName(name)] = filepath.Join(dir, entry.Name())
		}
	}
	return order(files, wanted, func(file string) ([]string, error) {
		info, err := modinfo(file)
		if err != nil {
			return nil, fmt.Errorf("read module %s: %w", file, err)
		}
		return needs(info), nil
	})
}

// order sorts the wanted modules' files and those they need, which read gives
// for each file.
func order(files map[string]string, wanted []string, read func(file string) ([]string, error)) ([]string, error) {
	var sorted []string
	seen := map[string]bool{}
	var add func(names []string) error
	add = func(names []string) error {
		for _, name := range names {
			file := files[moduleName(name)]
			if file == "" || seen[file] {
				continue
			}
			seen[file] = true
			more, err := read(file)
			if err == nil {
				err = add(more)
			}
			if err != nil {
				return err
			}
			sorted = append(sorted, file)
		}
		return nil
	}
	err := add(wanted)
	return sorted, err
}

// moduleName is the name as the kernel writes it: files may have it with dashes.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// modinfo reads what a module's file says about the module.
func modinfo(file string) ([]byte, error) {
	object, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer object.Close()
	section := object.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no section .modinfo")
	}
	return section.Data()
}

// needs gives the modules that have to be loaded before.
func needs(info []byte) []string {
	for field := range bytes.SplitSeq(info, []byte{0}) {
		if names, ok := bytes.CutPrefix(field, []byte("depends=")); ok && len(names) > 0 {
			return strings.Split(string(names), ",")
		}
	}
	return nil
}
