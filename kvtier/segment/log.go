package segment

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"

	"github.com/hearth-dev/hearth/durable"
)

// Log is one tenant's records. It is safe for concurrent use.
type Log struct {
	opts Options
	fs   durable.FS
	log  *slog.Logger
	size int64 // of a segment

	// appends is taken by Append, Seal, SetBytes, reclaim and Close; a drive's turn
	// by whoever writes to it. Whoever takes both takes appends first. Capacity 1.
	appends chan struct{}
	// scratch is memory of who has appends: what is not written from where it lies.
	scratch []byte
	pages   *pool // one page each
	payload *pool // the largest payload, for what is not read where it belongs
	frees   []func()

	drives []*drive

	mu     sync.Mutex
	closed bool
	// starting says that nobody has the log yet. It changes before they do.
	starting bool
	seq      uint64 // the last one given
	// generation and counter make incarnations.
	generation uint64
	counter    uint64
	// moved is the last sequence number of a record that moved. ended are the keys
	// that were ended since a reclaim began, nil where none runs: it moves none of
	// them.
	moved uint64
	ended map[name]struct{}
	next  int // the drive whose turn it is to be written
	// unsure says that no drive could note which of them take part.
	unsure bool
	bytes  int64 // of the budget
	stats  Stats

	// Of the start: up to which sequence number a key's records are void, and how
	// many entries are kept in memory.
	voids  map[name]uint64
	cached int
}

// drive is one directory.
type drive struct {
	log    *Log
	number uint32
	dir    string
	at     fs.FileInfo // what dir was when it was opened
	direct bool
	turn   chan struct{}
	depth  chan struct{} // reads under way
	// Of who has the turn.
	scratch []byte
	ready   uint64 // its last generation, see membership
	// unsynced is why a sync failed since the last Seal.
	unsynced error
	// files are the numbers on the list of its files; unlisted says that the list may
	// be another, hasList that there was one at the start.
	files             map[uint32]bool
	unlisted, hasList bool

	// owed are tombstones of records that were not to be written, and may be there.
	// Who has the turn changes them, under Log.mu too.
	owed []Tombstone

	// Of Log.mu.
	segments map[uint32]*segment
	open     *segment
	share    int // segments it may have
	full     bool
	failures int
	passed   int  // how often it was passed over since it failed
	out      bool // given up: nothing is written to it any more
	why      error
}

// state is what a segment is.
type state int

const (
	free     state = iota
	filling        // it is written
	sealed         // it has its footer
	unsealed       // it has records, and no footer could be written
)

// segment is one file.
type segment struct {
	drive  *drive
	number uint32
	path   string
	file   durable.File

	// Of Log.mu.
	state       state
	incarnation uint64
	fresh       bool // free, and its header of that incarnation is on the drive
	ending      bool // its records are about to go: nobody pins it any more
	broken      bool // its header could not be written: others are taken first
	lost        bool // a file that could not be made nor removed
	records     int
	refs, pins  int
	idle        chan struct{} // closed when refs become 0, where somebody waits

	// Of who has the drive's turn; next counts under Log.mu too.
	next    int64 // page
	entries []byte
	last    uint64 // sequence number

	found *found // of the start
}

// failuresBefore is how often in a row a drive may fail before it is set aside,
// and passes how often it is then passed over between two tries.
const (
	failuresBefore = 3
	passes         = 64
)

func (l *Log) pagesOfSegment() int64 { return l.size / PageSize }

// take takes a turn, or gives the reason why ctx ended.
func take(ctx context.Context, turn chan struct{}) error {
	select {
	case turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func give(turn chan struct{}) { <-turn }

// enter takes appends.
func (l *Log) enter(ctx context.Context) error {
	if err := take(ctx, l.appends); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		give(l.appends)
		return ErrClosed
	}
	return nil
}

// incarnationLocked gives the next incarnation: greater than all before, and
// never one that was used, whatever became of its segment.
func (l *Log) incarnationLocked() uint64 {
	l.counter++
	return l.generation<<32 | l.counter
}

// charge counts bytes that are about to be written, whatever the drives' wear.
func (l *Log) charge(n int64) {
	if l.opts.Charge != nil {
		l.opts.Charge(n)
	}
	l.count(func(s *Stats) { s.Bytes += n })
}

// spend counts bytes that are about to be written, where Spend lets them.
func (l *Log) spend(n int64) bool {
	if l.opts.Spend != nil && !l.opts.Spend(n) {
		return false
	}
	l.count(func(s *Stats) { s.Bytes += n })
	return true
}

func (l *Log) count(change func(s *Stats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.stats)
}

// failed counts a failure of a drive and sets it aside where it fails again and
// again.
func (d *drive) failed(err error) {
	l := d.log
	l.mu.Lock()
	l.stats.Failures++
	d.failures++
	d.passed = 0
	aside := d.failures == failuresBefore
	l.mu.Unlock()
	if aside {
		l.log.Error("a drive fails again and again and is not written for now", slog.String("dir", d.dir), slog.Any("error", err))
		return
	}
	l.log.Warn("a drive failed", slog.String("dir", d.dir), slog.Any("error", err))
}

func (d *drive) worked() {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	d.failures = 0
}

// giveUp ends the use of a drive but for reading what it has, until TakeBack.
func (l *Log) giveUp(d *drive, err error) {
	l.mu.Lock()
	l.stats.Failures++
	d.out, d.why = true, err
	l.mu.Unlock()
	l.log.Error("a drive is given up; what is on it is not used again after the next start", slog.String("dir", d.dir), slog.Any("error", err))
}

// LastSeq is the sequence number of the last record.
func (l *Log) LastSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seq
}

// SegmentSize is the size of a segment, in bytes.
func (l *Log) SegmentSize() int64 { return l.size }

// Direct says whether all drives are written around the page cache.
func (l *Log) Direct() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(l.drives, func(d *drive) bool { return !d.direct })
}

// Bytes is the size of all segments, of drives that take part.
func (l *Log) Bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var n int64
	for _, d := range l.drives {
		if !d.out {
			n += int64(len(d.segments)) * l.size
		}
	}
	return n
}

// Segments lists the segments that hold something, oldest first.
func (l *Log) Segments() (list []Info) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.drives {
		for _, s := range d.segments {
			if s.state != free {
				list = append(list, Info{
					Number: s.number, Drive: d.number, Incarnation: s.incarnation, Sealed: s.state == sealed,
					Records: s.records, Used: (s.next - 1) * PageSize,
				})
			}
		}
	}
	slices.SortFunc(list, func(a, b Info) int { return compare(a.Incarnation, b.Incarnation) })
	return list
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Stats are the counts so far.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	for _, d := range l.drives {
		if d.out || d.failures >= failuresBefore {
			s.Aside++
		}
		if d.out {
			s.Out++
		}
	}
	return s
}

// Seal ends the segments that are being filled: what was appended before is found
// again whatever happens then. An error says that some of what was appended since
// the last Seal may be lost.
func (l *Log) Seal(ctx context.Context) error {
	if err := l.enter(ctx); err != nil {
		return fmt.Errorf("seal segments: %w", err)
	}
	defer give(l.appends)
	if err := l.seal(ctx); err != nil {
		return fmt.Errorf("seal segments: %w", err)
	}
	return nil
}

func (l *Log) seal(ctx context.Context) (err error) {
	for _, d := range l.members() {
		if turnErr := take(ctx, d.turn); turnErr != nil {
			return turnErr
		}
		if d.open != nil {
			err = errors.Join(err, d.seal())
		}
		if d.unsynced != nil {
			err = errors.Join(err, fmt.Errorf("sync %s: %w", d.dir, d.unsynced))
			d.unsynced = nil
		}
		give(d.turn)
	}
	return err
}

// Close seals, waits for the reads under way and gives the files back. A second
// Close does nothing.
func (l *Log) Close() error {
	ctx := context.Background()
	if err := l.enter(ctx); err != nil {
		if errors.Is(err, ErrClosed) {
			return nil
		}
		return fmt.Errorf("close segments: %w", err)
	}
	defer give(l.appends)
	err := l.seal(ctx)
	// What deletes now waits for its turn, and then sees that the log is closed.
	for _, d := range l.drives {
		d.turn <- struct{}{}
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	for _, d := range l.drives {
		for _, s := range d.list() {
			_ = s.quiet(ctx) // it has no deadline
			err = errors.Join(err, s.file.Close())
		}
		give(d.turn)
	}
	l.release()
	if err != nil {
		return fmt.Errorf("close segments: %w", err)
	}
	return nil
}

// release gives memory back.
func (l *Log) release() {
	for _, free := range l.frees {
		free()
	}
	l.frees = nil
	for _, p := range []*pool{l.pages, l.payload} {
		if p != nil {
			p.drain()
		}
	}
}

// list are a drive's segments, oldest first.
func (d *drive) list() (list []*segment) {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	for _, s := range d.segments {
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *segment) int { return compare(a.incarnation, b.incarnation) })
	return list
}

// quiet waits until nobody reads a segment that nobody begins to read any more.
func (s *segment) quiet(ctx context.Context) error {
	l := s.drive.log
	l.mu.Lock()
	if s.refs == 0 {
		l.mu.Unlock()
		return nil
	}
	if s.idle == nil {
		s.idle = make(chan struct{})
	}
	idle := s.idle
	l.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// unrefLocked ends a read of a segment.
func (s *segment) unrefLocked() {
	s.refs--
	if s.refs == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}
