package ledger

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of the journal.
const (
	maxJournalFile  = 16 << 20 // bytes; then the month's next file begins
	maxJournalTotal = 256 << 20
	maxJournalFiles = 48
	maxFresh        = 64 << 10 // bytes that may wait for a sync
	maxWaiting      = 4096     // lines that may wait to be written
	maxNamed        = 32       // pods, sharers named in a line
	// window is what is read of the journal's end to find what a crash took. The
	// bytes that may lack are at its very end.
	window = 256 << 10
)

// line is a line of the journal.
type line struct {
	Version   int               `json:"v"`
	Number    uint64            `json:"n"`
	Event     string            `json:"event"` // "prepared", "pods" or "unprepared"
	At        time.Time         `json:"at"`
	Claim     string            `json:"claim"` // UID
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	Pods      []string          `json:"pods,omitempty"`
	Devices   []string          `json:"devices,omitempty"` // UUIDs of GPUs
	Sharers   []string          `json:"sharers,omitempty"`
	Artifacts []artifact.Digest `json:"artifacts,omitempty"`
	KV        string            `json:"kvNamespace,omitempty"`
	From      time.Time         `json:"from"`
	To        time.Time         `json:"to,omitzero"`
}

// last is the number of an entry's newest line.
func (n Lines) last() uint64 { return max(n.Prepared, n.Pods, n.Gone) }

// lineOf is the line of the state that an entry has just reached.
func lineOf(e *Entry) line {
	if e.State == Gone {
		out := preparedLine(e)
		out.Number, out.Event, out.At, out.To = e.Lines.Gone, "unprepared", e.Gone, e.Gone
		return out
	}
	return preparedLine(e)
}

func preparedLine(e *Entry) line {
	out := line{
		Version: 1, Number: e.Lines.Prepared, Event: "prepared", At: e.Prepared, Claim: e.UID, Namespace: e.Namespace, Name: e.Name,
		Sharers: e.Sharers[:min(len(e.Sharers), maxNamed)], From: e.Prepared,
	}
	out.Pods = namesOf(e.Pods, func(Pod) bool { return true })
	for i := range e.Results {
		if id := e.Results[i].UUID; id != "" {
			out.Devices = append(out.Devices, id)
		}
	}
	for i := range e.Weights {
		if d := e.Weights[i].Digest; d != (artifact.Digest{}) && !slices.Contains(out.Artifacts, d) {
			out.Artifacts = append(out.Artifacts, d)
		}
	}
	if e.KV != nil {
		out.KV = e.KV.Namespace
	}
	return out
}

// podsLine is the line of a prepared claim whose pods changed: those that it has
// now.
func podsLine(e *Entry) line {
	out := preparedLine(e)
	out.Number, out.Event, out.At = e.Lines.Pods, "pods", e.Seen
	out.Pods = namesOf(e.Pods, func(p Pod) bool { return p.Left.IsZero() })
	return out
}

// namesOf names pods, at most 32.
func namesOf(pods []Pod, want func(Pod) bool) []string {
	var names []string
	for _, p := range pods {
		if want(p) && len(names) < maxNamed {
			names = append(names, p.Name)
		}
	}
	return names
}

// journal appends lines. Lines are numbered; entries keep the numbers of their
// lines, so that what a crash took from the end can be told, and written again.
// That is why no call waits for a sync of the journal.
type journal struct {
	fs    durable.FS
	dir   string
	now   func() time.Time
	log   *slog.Logger
	timed func(syncs int, since time.Time)
	turn  chan struct{} // holds one token while nobody writes

	mu      sync.Mutex
	last    uint64
	waiting []line          // to be written
	open    map[uint64]bool // numbers whose lines are not synced

	// These belong to who has the turn.
	file  monthFile // newest; zero: none yet
	size  int64
	tail  bool   // the file does not end with a line feed
	lost  bool   // size is not known
	fresh []line // written, not synced
	dirty int    // bytes of fresh
}

// number gives the next line's number.
func (j *journal) number() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	j.open[j.last] = true
	return j.last
}

// forget takes a number back whose line there will not be.
func (j *journal) forget(n uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.open, n)
}

// synced reports whether the line of that number outlives a crash.
func (j *journal) synced(n uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return !j.open[n]
}

func (j *journal) syncedAll(n Lines) bool {
	return j.synced(n.Prepared) && j.synced(n.Pods) && j.synced(n.Gone)
}

// append writes lines, unsynced; what cannot be written now waits for the next
// call.
func (j *journal) append(ctx context.Context, lines []line) error {
	j.mu.Lock()
	j.waiting = append(j.waiting, lines...)
	if over := len(j.waiting) - maxWaiting; over > 0 {
		for _, l := range j.waiting[:over] {
			delete(j.open, l.Number)
		}
		j.waiting = slices.Delete(j.waiting, 0, over)
	}
	j.mu.Unlock()
	if err := j.take(ctx); err != nil {
		return err
	}
	defer j.give()
	err := j.flush()
	if err == nil && j.dirty > maxFresh {
		err = j.syncFile()
	}
	return err
}

// sync makes every line so far durable.
func (j *journal) sync(ctx context.Context) error {
	if err := j.take(ctx); err != nil {
		return err
	}
	defer j.give()
	if err := j.flush(); err != nil {
		return err
	}
	if err := j.syncFile(); err != nil {
		return err
	}
	return j.rotate()
}

func (j *journal) take(ctx context.Context) error {
	select {
	case <-j.turn:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the journal: %w", ctx.Err())
	}
}

func (j *journal) give() { j.turn <- struct{}{} }

// flush writes the waiting lines to the file of the month.
func (j *journal) flush() error {
	j.mu.Lock()
	lines := j.waiting
	j.waiting = nil
	j.mu.Unlock()
	if len(lines) == 0 {
		return nil
	}
	err := j.write(lines)
	if err != nil {
		j.mu.Lock()
		j.waiting = append(lines, j.waiting...)
		j.mu.Unlock()
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

func (j *journal) write(lines []line) error {
	if err := j.rotate(); err != nil {
		return err
	}
	var text bytes.Buffer
	if j.tail {
		text.WriteByte('\n')
	}
	for i := range lines {
		data, err := json.Marshal(&lines[i])
		if err != nil {
			return fmt.Errorf("encode line: %w", err)
		}
		text.Write(append(data, '\n'))
	}
	f, err := j.fs.OpenFile(j.path(), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(text.Bytes(), j.size)
	err = errors.Join(err, f.Close())
	if err != nil {
		// Some of it may be there: the next line begins after that.
		j.lost = true
		return err
	}
	j.size, j.tail = j.size+int64(text.Len()), false
	j.fresh, j.dirty = append(j.fresh, lines...), j.dirty+text.Len()
	return nil
}

// rotate makes sure that there is a file to write to, and where it ends.
func (j *journal) rotate() error {
	if j.lost {
		info, err := j.fs.Stat(j.path())
		if err != nil {
			return err
		}
		j.size, j.tail, j.lost = info.Size(), info.Size() > 0, false
	}
	want := monthOf(j.now())
	if j.file.n > 0 && j.size <= maxJournalFile && !j.file.before(want) {
		return nil
	}
	if j.file.n > 0 && !j.file.before(want) {
		want = monthFile{j.file.month, j.file.n + 1}
	}
	if err := j.syncFile(); err != nil {
		return err
	}
	path := filepath.Join(j.dir, want.name())
	f, err := j.fs.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := j.syncDir(); err != nil {
		return err
	}
	info, err := j.fs.Stat(path)
	if err != nil {
		return err
	}
	j.file, j.size, j.tail = want, info.Size(), info.Size() > 0
	return nil
}

// syncFile makes what was written durable. Where that fails the lines are
// taken as lost and will be written again.
func (j *journal) syncFile() error {
	if len(j.fresh) == 0 {
		return nil
	}
	err := j.datasync()
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.waiting = append(slices.Clone(j.fresh), j.waiting...)
		j.fresh, j.dirty, j.lost = nil, 0, true
		return err
	}
	for i := range j.fresh {
		delete(j.open, j.fresh[i].Number)
	}
	j.fresh, j.dirty = nil, 0
	return nil
}

// datasync syncs the newest file.
func (j *journal) datasync() error {
	f, err := j.fs.OpenFile(j.path(), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	since := time.Now()
	err = f.Datasync()
	j.timed(1, since)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	return nil
}

func (j *journal) syncDir() error {
	defer j.timed(1, time.Now())
	return j.fs.SyncDir(j.dir)
}

func (j *journal) path() string { return filepath.Join(j.dir, j.file.name()) }

// load finds the journal's end and gives the lines of entries that a crash
// took. An error costs lines that stand twice at most: what cannot be read, or
// be made durable, counts as lost.
func (j *journal) load(entries []Entry) ([]line, error) {
	found, oldest, err := j.readBack()
	if err == nil && j.file.n > 0 {
		// What a killed process wrote and did not sync is counted from here on.
		err = errors.Join(j.datasync(), j.syncDir())
	}
	for n := range found {
		j.last = max(j.last, n)
	}
	if err != nil {
		found, oldest, j.lost = nil, 0, j.file.n > 0
	}
	var missing []line
	for i := range entries {
		e := &entries[i]
		j.last = max(j.last, e.Lines.last())
		if n := e.Lines.Prepared; n > 0 && n >= oldest && !found[n] {
			missing = append(missing, preparedLine(e))
		}
		if n := e.Lines.Pods; n > 0 && n >= oldest && !found[n] {
			missing = append(missing, podsLine(e))
		}
		if n := e.Lines.Gone; n > 0 && n >= oldest && !found[n] {
			missing = append(missing, lineOf(e))
		}
	}
	slices.SortFunc(missing, func(a, b line) int { return cmp.Compare(a.Number, b.Number) })
	if err == nil {
		// The file of the month is made now: later it would cost a Prepare a sync.
		err = j.rotate()
	}
	return missing, err
}

// readBack reads the journal's end: the numbers of the lines that are there,
// and the number before which none lacks.
func (j *journal) readBack() (found map[uint64]bool, oldest uint64, err error) {
	files, err := j.files()
	if err != nil {
		return nil, 0, err
	}
	found = map[uint64]bool{}
	read := int64(0)
	for i := len(files) - 1; i >= 0 && read < window; i-- {
		text, size, err := j.readEnd(files[i], window-read)
		if err != nil {
			return found, 0, err
		}
		if i == len(files)-1 {
			j.file, j.size, j.tail = files[i], size, len(text) > 0 && text[len(text)-1] != '\n'
		}
		read += int64(len(text))
		for row := range bytes.Lines(text) {
			if l, err := decodeLine(row); err == nil {
				found[l.Number] = true
			}
		}
	}
	// Where not all of the journal was read, what came before is on the drive.
	if read >= window && len(found) > 0 {
		oldest = slices.Min(slices.Collect(maps.Keys(found)))
	}
	return found, oldest, nil
}

// decodeLine reads a line of the journal.
func decodeLine(row []byte) (line, error) {
	var l line
	if err := json.Unmarshal(row, &l); err != nil {
		return line{}, fmt.Errorf("decode line: %w", err)
	}
	if l.Version < 1 || l.Number == 0 {
		return line{}, errors.New("decode line: no line of a journal")
	}
	return l, nil
}
