package segment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// cachedEntries is how many entries of footers Open keeps in memory between
// understanding them and telling them; others are read twice.
const cachedEntries = 1 << 19

// Open reads what is on the drives, tells Options' callbacks what it found and
// begins a generation. A drive that cannot be read or written is left out and
// what it has is not believed again; without any there is an error. Errors wrap
// ErrNewer where a file is of a newer version: then nothing was changed.
func Open(o Options) (*Log, error) {
	began := time.Now()
	if err := o.fill(); err != nil {
		return nil, err
	}
	l := &Log{opts: o, fs: o.FS, log: o.Log, appends: make(chan struct{}, 1), starting: true}
	if err := l.start(); err != nil {
		l.discard()
		return nil, fmt.Errorf("open segments: %w", err)
	}
	l.starting = false
	l.stats.Opened = time.Since(began)
	return l, nil
}

// discard gives back what a start that failed has taken.
func (l *Log) discard() {
	for _, d := range l.drives {
		for _, s := range d.segments {
			_ = s.file.Close() // nothing was promised of it
		}
	}
	l.release()
}

func (l *Log) memory(bytes int64) ([]byte, error) {
	p, free, err := newPages(bytes)
	if err == nil {
		l.frees = append(l.frees, free)
	}
	return p, err
}

func (l *Log) start() error {
	o := &l.opts
	l.pages = newPool(PageSize, o.Depth*len(o.Dirs))
	window, free, err := newPages(windowBytes)
	if err != nil {
		return err
	}
	defer free()
	looks := make([]look, len(o.Dirs))
	for i, dir := range o.Dirs {
		d := &drive{
			log: l, number: uint32(i), dir: dir, turn: make(chan struct{}, 1), depth: make(chan struct{}, o.Depth),
			segments: map[uint32]*segment{},
		}
		l.drives = append(l.drives, d)
		if d.scratch, err = l.memory(scratchBytes); err != nil {
			return err
		}
		if looks[i], err = d.look(window); errors.Is(err, ErrNewer) {
			return err
		} else if err != nil {
			l.giveUp(d, err)
		}
	}
	l.chooseSize(looks)
	l.payload = newPool(min(l.size, roundUp(largestPayload)), 4)
	if l.scratch, err = l.memory(max(groupScratch, min(l.size, roundUp(int64(o.LargestBlock)+tagBytes)+PageSize))); err != nil {
		return err
	}
	l.settle(looks, window)
	l.seq = max(l.seq, o.After)
	if err := l.commit(); err != nil {
		return err
	}
	l.shareAnew() // of those that could not note it
	return l.tell(window)
}

// errNoFile says that something has a segment's name and is no file: to open a pipe
// would wait for ever.
var errNoFile = errors.New("no regular file has a segment's name")

// look is what a drive's directory says before anything is changed.
type look struct {
	member      membership
	known       bool // it has a generation's file that can be read
	size        int64
	incarnation uint64   // the newest
	listed      []uint32 // the files that its list has
	hasList     bool
}

// look reads the headers of a drive's segments and changes nothing. Errors wrap
// ErrNewer.
func (d *drive) look(window []byte) (v look, err error) {
	fsys := d.log.fs
	if err := durable.MkdirAllSynced(fsys, d.dir, 0o700); err != nil {
		return v, err
	}
	if d.at, err = fsys.Stat(d.dir); err != nil {
		return v, err
	}
	if v.member, v.known, err = readMembership(fsys, d.dir); err != nil {
		return v, err
	}
	if v.listed, v.hasList, err = readFiles(fsys, d.dir); err != nil {
		return v, err
	}
	list, err := fsys.ReadDir(d.dir)
	if err != nil {
		return v, err
	}
	for _, e := range list {
		if _, ok := parseName(e.Name()); !ok {
			continue
		}
		if !e.Type().IsRegular() {
			return v, fmt.Errorf("%w: move it away: %s", errNoFile, filepath.Join(d.dir, e.Name()))
		}
		h, err := d.peek(e.Name(), window)
		if errors.Is(err, ErrNewer) {
			return v, fmt.Errorf("%w: %s", err, filepath.Join(d.dir, e.Name()))
		}
		if err == nil && h.tenant == d.log.opts.Tenant && h.incarnation > v.incarnation {
			v.incarnation, v.size = h.incarnation, h.size
		}
	}
	return v, nil
}

// peek reads the header of a segment's file.
func (d *drive) peek(base string, window []byte) (h header, err error) {
	f, err := d.log.fs.OpenFile(filepath.Join(d.dir, base), os.O_RDONLY, 0)
	if err != nil {
		return h, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	r := reader{file: f}
	if err := r.read(window[:PageSize], 0); err != nil {
		return h, err
	}
	return decodeHeader(window)
}

// largestPayload is what the largest block takes behind its header, in bytes.
const largestPayload = 64<<20 + tagBytes

// chooseSize takes the size of the newest segment there is, or chooses one.
func (l *Log) chooseSize(looks []look) {
	var newest uint64
	for _, v := range looks {
		if v.incarnation > newest {
			newest, l.size = v.incarnation, v.size
		}
	}
	if l.size == 0 {
		l.size = l.opts.SegmentSize
	}
	if l.size == 0 {
		l.size = chooseSize(l.opts.Bytes, l.opts.LargestBlock)
	}
}

// settle makes every drive agree with its files, or gives it up: what is not to be
// believed is removed, and what has no footer gets one.
func (l *Log) settle(looks []look, window []byte) {
	members := make([]membership, len(looks))
	for i, v := range looks {
		members[i] = v.member
		if !v.known {
			// Its segments say in which generations it took part at least.
			members[i] = membership{joining: v.incarnation >> 32}
		}
		l.drives[i].ready = members[i].ready
		l.generation = max(l.generation, v.incarnation>>32)
	}
	current, newest := currentOf(members)
	l.generation = max(l.generation, newest)
	for i, d := range l.drives {
		if d.out {
			continue
		}
		err := d.settle(current[i], looks[i], window)
		if err != nil {
			l.giveUp(d, err)
		}
	}
	l.shareOut(l.opts.Bytes)
	for _, d := range l.members() {
		if err := d.trim(); err != nil {
			l.giveUp(d, err)
		}
	}
}

// trim removes what a drive has beyond its share: free segments, then the oldest.
// Each is gone for good before the next goes, as its tombstones are about older
// ones.
func (d *drive) trim() error {
	list := d.list()
	for _, wantFree := range []bool{true, false} {
		for _, s := range list {
			if len(d.segments) <= d.share {
				return nil
			}
			if (s.state == free) != wantFree {
				continue
			}
			if !wantFree {
				d.log.log.Info("a segment is removed, the budget is smaller", slog.String("path", s.path))
			}
			if err := d.remove(context.Background(), s); err != nil {
				return err
			}
		}
	}
	return nil
}

// tell calls Recovered for what was found on all drives, in the order in which it
// was written.
func (l *Log) tell(window []byte) error {
	defer l.forget()
	if l.opts.Recovered == nil {
		return nil
	}
	var cursors []*cursor
	for _, d := range l.members() {
		c := &cursor{drive: d, window: window}
		for _, s := range d.list() {
			if s.found != nil && !s.found.covered && s.found.n > 0 {
				c.segments = append(c.segments, s)
			}
		}
		if err := c.next(); err != nil {
			return err
		}
		cursors = append(cursors, c)
	}
	for {
		var first *cursor
		for _, c := range cursors {
			if len(c.entries) > 0 && (first == nil || c.entries[0].seq < first.entries[0].seq) {
				first = c
			}
		}
		if first == nil {
			return nil
		}
		e := first.entries[0]
		l.opts.Recovered(e.record(NewLoc(first.drive.number, first.at.number, e.page, first.at.incarnation)))
		first.entries = first.entries[1:]
		if err := first.next(); err != nil {
			return err
		}
	}
}

// cursor goes through the blocks of a drive that were found and are not void.
type cursor struct {
	drive    *drive
	window   []byte
	segments []*segment // still to come
	at       *segment
	entries  []entry // of it, still to come; the first is a block
}

// next comes to a block, if there is one left.
func (c *cursor) next() error {
	l := c.drive.log
	for {
		for len(c.entries) > 0 {
			e := c.entries[0]
			if e.kind == kindBlock && e.seq > l.voids[name{e.namespace, e.key}] {
				return nil
			}
			c.entries = c.entries[1:]
		}
		if len(c.segments) == 0 {
			return nil
		}
		c.at, c.segments = c.segments[0], c.segments[1:]
		f := c.at.found
		c.entries, f.entries = f.entries, nil
		if c.entries != nil {
			continue
		}
		r := c.drive.readerOf(c.at, c.window)
		p, err := r.probe()
		if err == nil && p.footer {
			c.entries, err = r.footer(p.trailer)
		}
		if err != nil || !p.footer {
			return fmt.Errorf("read %s again: %w", c.at.path, errors.Join(err, p.unreadable, ErrDamaged))
		}
	}
}

// forget drops what only the start needs.
func (l *Log) forget() {
	l.voids, l.cached = nil, 0
	for _, d := range l.drives {
		for _, s := range d.segments {
			s.found = nil
		}
	}
}
