package meter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/hearth-dev/hearth/durable"
)

// open opens the file, cuts off a torn end and reads back the tail's ids.
func (m *Meter) open() error {
	fs := m.options.FS
	file, err := fs.OpenFile(m.options.Path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("open usage file: %w", err)
	}
	info, err := file.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("stat usage file: %w", err), file.Close())
	}
	size := info.Size()
	from := max(0, size-tailBytes)
	tail := make([]byte, size-from)
	if n, err := file.ReadAt(tail, from); err != nil && !(errors.Is(err, io.EOF) && n == len(tail)) {
		return errors.Join(fmt.Errorf("read usage file: %w", err), file.Close())
	}
	whole := m.readTail(tail, from > 0)
	if whole < len(tail) {
		m.options.Log.Warn("usage file: torn end cut off", slog.Int("bytes", len(tail)-whole))
		err = file.Truncate(from + int64(whole))
		if err == nil {
			err = file.Sync()
		}
		if err != nil {
			return errors.Join(fmt.Errorf("repair usage file: %w", err), file.Close())
		}
	}
	if err := fs.SyncDir(filepath.Dir(m.options.Path)); err != nil {
		return errors.Join(fmt.Errorf("sync usage directory: %w", err), file.Close())
	}
	m.file, m.size = file, from+int64(whole)
	return nil
}

// readTail remembers the ids of whole lines and gives how many bytes are whole.
// A newer schema than this program knows is left alone: its lines are whole too.
func (m *Meter) readTail(tail []byte, inside bool) (whole int) {
	at := 0
	if inside { // the first line began before the tail
		cut := bytes.IndexByte(tail, '\n')
		if cut < 0 {
			return len(tail)
		}
		at, whole = cut+1, cut+1
	}
	for {
		n := bytes.IndexByte(tail[at:], '\n')
		if n < 0 {
			return whole
		}
		var line struct {
			ID string `json:"id"`
		}
		ok := json.Unmarshal(tail[at:at+n], &line) == nil
		at += n + 1
		if ok {
			m.seen.add(line.ID)
		}
		// A broken line in the middle stays where it is for a person to see; a
		// broken last line is a torn write.
		if ok || at < len(tail) && bytes.IndexByte(tail[at:], '\n') >= 0 {
			whole = at
		}
	}
}

// reopen opens the file again after a failed write and cuts it back to its
// last synced batch.
func (m *Meter) reopen() error {
	file, err := m.options.FS.OpenFile(m.options.Path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("reopen usage file: %w", err)
	}
	info, err := file.Stat()
	if err == nil && info.Size() < m.size {
		// Someone took the file away; what they have they have.
		m.size = info.Size()
	}
	if err == nil {
		err = file.Truncate(m.size)
	}
	if err == nil {
		err = m.options.FS.SyncDir(filepath.Dir(m.options.Path))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("reopen usage file: %w", err), file.Close())
	}
	m.file = file
	return nil
}

// errTaken says that what was written may be in no file any more.
var errTaken = errors.New("the file was moved or removed meanwhile")

// taken says whether the path no longer names the open file: somebody moved or
// removed it, and what is written to it may be gone when it is closed.
func (m *Meter) taken() bool {
	open, err := m.file.Stat()
	if err != nil {
		return false // the write will tell
	}
	there, err := m.options.FS.Stat(m.options.Path)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return !durable.SameFile(open, there)
}

// leave gives up a file that was taken; the next one is written from its end.
func (m *Meter) leave() {
	_ = m.file.Close()
	m.file, m.size = nil, math.MaxInt64
}

// rotate renames the full file and begins a new one.
func (m *Meter) rotate() error {
	fs, path := m.options.FS, m.options.Path
	if err := m.file.Close(); err != nil {
		m.file = nil
		return fmt.Errorf("close usage file: %w", err)
	}
	m.file = nil
	ext := filepath.Ext(path)
	stamp := m.options.Now().UTC().Format("20060102T150405.000000000Z")
	name := strings.TrimSuffix(path, ext) + "-" + stamp + ext
	if _, err := fs.Lstat(name); err == nil {
		return fmt.Errorf("rotate usage file: %s exists", filepath.Base(name))
	}
	if err := fs.Rename(path, name); err != nil {
		return fmt.Errorf("rotate usage file: %w", err)
	}
	m.size = 0
	return m.reopen()
}

// idSet remembers the last n ids.
type idSet struct {
	set  map[string]struct{}
	ring []string
	next int
}

func newIDSet(n int) idSet {
	return idSet{set: make(map[string]struct{}), ring: make([]string, n)}
}

// add says whether id is new, and remembers it in place of the oldest.
func (s *idSet) add(id string) bool {
	if _, known := s.set[id]; known {
		return false
	}
	delete(s.set, s.ring[s.next])
	s.ring[s.next] = id
	s.set[id] = struct{}{}
	s.next = (s.next + 1) % len(s.ring)
	return true
}
