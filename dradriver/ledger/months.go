package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const journalSuffix = ".jsonl"

// monthFile names a file of the journal: the n-th of a month, from 1.
type monthFile struct {
	month string // "2026-11"
	n     int
}

func monthOf(t time.Time) monthFile { return monthFile{t.UTC().Format("2006-01"), 1} }

// name is "2026-11.jsonl", "2026-11.2.jsonl" and so on.
func (m monthFile) name() string {
	if m.n > 1 {
		return m.month + "." + strconv.Itoa(m.n) + journalSuffix
	}
	return m.month + journalSuffix
}

// before reports whether a month comes before another.
func (m monthFile) before(other monthFile) bool { return m.month < other.month }

// parseMonthFile reads a file's name.
func parseMonthFile(name string) (monthFile, bool) {
	base, found := strings.CutSuffix(name, journalSuffix)
	month, number, several := strings.Cut(base, ".")
	m := monthFile{month, 1}
	if several {
		m.n, _ = strconv.Atoi(number)
	}
	_, err := time.Parse("2006-01", month)
	return m, found && err == nil && m.name() == name
}

// files lists the journal's files, oldest first. An absent directory has none.
func (j *journal) files() ([]monthFile, error) {
	entries, err := j.fs.ReadDir(j.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list journal: %w", err)
	}
	var files []monthFile
	for _, e := range entries {
		if m, ok := parseMonthFile(e.Name()); ok {
			files = append(files, m)
		}
	}
	slices.SortFunc(files, func(a, b monthFile) int { return cmp.Or(cmp.Compare(a.month, b.month), cmp.Compare(a.n, b.n)) })
	return files, nil
}

// readEnd reads at most limit bytes of a file's end, and tells its size.
func (j *journal) readEnd(m monthFile, limit int64) (text []byte, size int64, err error) {
	f, err := j.fs.OpenFile(filepath.Join(j.dir, m.name()), os.O_RDONLY, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("read journal: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, fmt.Errorf("read journal: %w", err)
	}
	size = info.Size()
	from := max(0, size-limit)
	text, err = io.ReadAll(io.NewSectionReader(f, from, size-from))
	if err != nil {
		return nil, 0, fmt.Errorf("read journal: %w", err)
	}
	return text, size, nil
}

// prune removes the oldest files while there are too many of them or they take
// too much room.
func (j *journal) prune() error {
	files, err := j.files()
	if err != nil {
		return err
	}
	total := int64(0)
	for i, file := range slices.Backward(files) {
		path := filepath.Join(j.dir, file.name())
		info, err := j.fs.Stat(path)
		if err != nil {
			return fmt.Errorf("prune journal: %w", err)
		}
		if total += info.Size(); i == len(files)-1 || total <= maxJournalTotal && len(files)-i <= maxJournalFiles {
			continue
		}
		if err := j.fs.Remove(path); err != nil {
			return fmt.Errorf("prune journal: %w", err)
		}
	}
	return nil
}
