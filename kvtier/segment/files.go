package segment

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/durable"
)

// Every drive has a list of its segments' files. One that is on it and is not there
// was taken away by somebody else, and its tombstones with it; one that is there and
// not on it was about to go, or comes from elsewhere.

const (
	filesFile   = "files"
	filesPrefix = "hearth files "
	// maxFilesLen bounds the file, in bytes: every second number of all.
	maxFilesLen = 8 << 20
	// outSuffix is that of a file that is about to be removed.
	outSuffix = ".out"
)

// encodeFiles gives the bytes of a list of numbers, which rise.
func encodeFiles(numbers []uint32) []byte {
	line := fmt.Appendf(nil, "%s%d ", filesPrefix, Version)
	for i := 0; i < len(numbers); {
		end := i
		for end+1 < len(numbers) && numbers[end+1] == numbers[end]+1 {
			end++
		}
		if i > 0 {
			line = append(line, ',')
		}
		line = strconv.AppendUint(line, uint64(numbers[i]), 10)
		if end > i {
			line = strconv.AppendUint(append(line, '-'), uint64(numbers[end]), 10)
		}
		i = end + 1
	}
	if len(numbers) == 0 {
		line = append(line, '-')
	}
	return fmt.Appendf(line, " %016x\n", xxh3.Hash(line))
}

// decodeFiles reads a list. Errors wrap ErrNewer or errFormat.
func decodeFiles(data []byte) (numbers []uint32, err error) {
	bad := fmt.Errorf("%w: no list of files: %.60q", errFormat, data)
	line, hash, found := cutLast(bytes.TrimSuffix(data, []byte("\n")), ' ')
	sum, err := strconv.ParseUint(string(hash), 16, 64)
	if !found || err != nil || sum != xxh3.Hash(line) {
		return nil, bad
	}
	rest, found := strings.CutPrefix(string(line), filesPrefix)
	word, list, _ := strings.Cut(rest, " ")
	version, err := strconv.Atoi(word)
	if !found || err != nil || version < 1 {
		return nil, bad
	}
	if version > Version {
		return nil, fmt.Errorf("%w: list of files of version %d, this code knows %d", ErrNewer, version, Version)
	}
	if list != "-" {
		for part := range strings.SplitSeq(list, ",") {
			low, high, both := strings.Cut(part, "-")
			from, err := strconv.ParseUint(low, 10, 32)
			to := from
			if err == nil && both {
				to, err = strconv.ParseUint(high, 10, 32)
			}
			if err != nil || to > maxNumber || from > to || len(numbers) > 0 && from <= uint64(numbers[len(numbers)-1]) {
				return nil, bad
			}
			for n := from; n <= to; n++ {
				numbers = append(numbers, uint32(n))
			}
		}
	}
	if !bytes.Equal(data, encodeFiles(numbers)) {
		return nil, bad
	}
	return numbers, nil
}

// readFiles reads a drive's list; none where it has no readable one. Errors wrap
// ErrNewer.
func readFiles(fsys durable.FS, dir string) (numbers []uint32, known bool, err error) {
	data, err := durable.ReadRegular(fsys, filepath.Join(dir, filesFile), maxFilesLen)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, durable.ErrTooLong):
		return nil, false, nil
	case err != nil:
		return nil, false, err
	}
	numbers, err = decodeFiles(data)
	if errors.Is(err, errFormat) {
		return nil, false, nil
	}
	return numbers, err == nil, err
}

// errElsewhere says that a drive's path leads to another directory than it did: to
// what lay below a file system that was unmounted, or into one that was mounted.
// Files that were made there would be missed where the drive's others are.
var errElsewhere = errors.New("another directory is there than when the drive was opened, mount its file system again")

// there says whether the drive's path leads where it did.
func (d *drive) there() error {
	now, err := d.log.fs.Stat(d.dir)
	if err == nil && !durable.SameFile(now, d.at) {
		err = fmt.Errorf("%s: %w", d.dir, errElsewhere)
	}
	return err
}

// writeFiles makes the list say what the drive has. With the turn, or before anybody
// has the log.
func (d *drive) writeFiles() error {
	if err := d.there(); err != nil {
		return err
	}
	numbers := make([]uint32, 0, len(d.files))
	for n := range d.files {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	err := durable.WriteFile(d.log.fs, filepath.Join(d.dir, filesFile), encodeFiles(numbers), 0o600)
	d.unlisted = err != nil
	return err
}

// enlist puts a segment's file on the list, before anything is written to it.
func (d *drive) enlist(s *segment) error {
	d.files[s.number] = true
	if err := d.writeFiles(); err != nil {
		return fmt.Errorf("list segment: %w", err)
	}
	return nil
}

// unlink removes a segment's file for good, and may be called again where it failed.
// It has another name before it leaves the list, so that it is known who removes it.
// A file system that is full has the file's own room for the list.
func (d *drive) unlink(s *segment) error {
	l := d.log
	if err := d.there(); err != nil {
		return err
	}
	if filepath.Ext(s.path) != outSuffix {
		out := filepath.Join(d.dir, outName(s.number))
		if err := l.fs.Rename(s.path, out); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		s.path = out
	}
	if d.files[s.number] || d.unlisted {
		delete(d.files, s.number)
		err := d.writeFiles()
		if outOfRoom(err) && s.file.Truncate(0) == nil {
			err = d.writeFiles()
		}
		if err != nil {
			d.files[s.number] = true
			return err
		}
	}
	if err := l.fs.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return l.fs.SyncDir(d.dir)
}

// sort compares a drive's directory with its list. trusted says that no file is gone
// that tombstones may have been in; else all are to go. Files that are not on the list
// are removed, those about to be removed as well. numbers are the segments that stay.
func (d *drive) sort(v look, names []fs.DirEntry) (numbers []uint32, trusted bool, err error) {
	l := d.log
	d.hasList = v.hasList
	listed := map[uint32]bool{}
	for _, n := range v.listed {
		listed[n] = true
	}
	d.files = map[uint32]bool{}
	leaving := map[uint32]string{}
	for _, e := range names {
		path := filepath.Join(d.dir, e.Name())
		number, ok := parseName(e.Name())
		if out, isOut := parseOut(e.Name()); isOut {
			leaving[out] = path
		}
		switch {
		case !ok:
		case v.hasList && !listed[number]:
			l.log.Warn("a segment that the drive's list does not know is removed", slog.String("path", path))
			err = errors.Join(err, l.fs.Remove(path))
		default:
			d.files[number] = true
			numbers = append(numbers, number)
		}
	}
	if err != nil {
		return nil, false, err
	}
	trusted = true
	for n := range listed {
		if _, going := leaving[n]; !d.files[n] && !going {
			l.log.Error("a segment is gone that this program did not remove, perhaps with tombstones, and all of its drive go",
				slog.String("path", filepath.Join(d.dir, fileName(n))))
			l.stats.Missing++
			trusted = false
		}
	}
	if !trusted {
		return nil, false, nil // the list says so until all are gone
	}
	return numbers, true, d.finishOut(v, leaving)
}

// finishOut removes the files that were about to be removed, and makes the list right.
func (d *drive) finishOut(v look, leaving map[uint32]string) error {
	numbers := make([]uint32, 0, len(d.files))
	for n := range d.files {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	if !v.hasList || !slices.Equal(numbers, v.listed) {
		err := d.writeFiles()
		for _, path := range leaving {
			if !outOfRoom(err) {
				break
			}
			if err = truncate(d.log.fs, path); err == nil {
				err = d.writeFiles()
			}
		}
		if err != nil {
			return err
		}
	}
	var err error
	for _, path := range leaving {
		err = errors.Join(err, d.log.fs.Remove(path))
	}
	return err
}

// dropFiles removes all segments of a drive whose files are not believed. Until the
// last is gone the list, or the generation, says that they are not.
func (d *drive) dropFiles(v look, names []fs.DirEntry) error {
	l := d.log
	d.files, d.hasList = map[uint32]bool{}, true
	var err error
	for _, e := range names {
		_, ok := parseName(e.Name())
		if _, isOut := parseOut(e.Name()); ok || isOut {
			err = errors.Join(err, l.fs.Remove(filepath.Join(d.dir, e.Name())))
		}
	}
	if err = errors.Join(err, l.fs.SyncDir(d.dir)); err != nil || len(v.listed) == 0 {
		return err
	}
	return d.writeFiles()
}

func truncate(fsys durable.FS, path string) error {
	f, err := fsys.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(0), f.Close())
}

func outName(number uint32) string { return strconv.FormatUint(uint64(number), 10) + outSuffix }

// parseOut gives the number in the name of a file that is about to be removed.
func parseOut(name string) (uint32, bool) {
	base, isOut := strings.CutSuffix(name, outSuffix)
	if !isOut {
		return 0, false
	}
	return parseName(base + suffix)
}
