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
	l := &Log{opts: o, fs: o.FS, log: o.Log, appends: make(chan struct{}, 1)}
	if err := l.start(); err != nil {
		l.discard()
		return nil, fmt.Errorf("open segments: %w", err)
	}
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
	if err := l.commit(); err != nil {
		return err
	}
	return l.tell(window)
}

// look is what a drive's directory says before anything is changed.
type look struct {
	member      membership
	known       bool // it has a generation's file that can be read
	size        int64
	incarnation uint64 // the newest
	files       int
}

// look reads the headers of a drive's segments and changes nothing. Errors wrap
// ErrNewer.
func (d *drive) look(window []byte) (v look, err error) {
	fsys := d.log.fs
	if err := durable.MkdirAllSynced(fsys, d.dir, 0o700); err != nil {
		return v, err
	}
	if v.member, v.known, err = readMembership(fsys, d.dir); err != nil {
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
		v.files++
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
		err := d.settle(current[i], window)
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

// tell calls Recovered for what was found.
func (l *Log) tell(window []byte) error {
	if l.opts.Recovered == nil {
		l.forget()
		return nil
	}
	for _, d := range l.members() {
		for _, s := range d.list() {
			f := s.found
			if f == nil || f.covered {
				continue
			}
			if f.entries == nil && f.n > 0 {
				r := d.readerOf(s, window)
				p, err := r.probe()
				if err != nil || !p.footer {
					return fmt.Errorf("read %s again: %w", s.path, errors.Join(err, p.unreadable, ErrDamaged))
				}
				if f.entries, err = r.footer(p.trailer); err != nil {
					return fmt.Errorf("read %s again: %w", s.path, err)
				}
			}
			for _, e := range f.entries {
				if e.kind != kindBlock || e.seq <= l.voids[name{e.namespace, e.key}] {
					continue
				}
				l.opts.Recovered(e.record(NewLoc(d.number, s.number, e.page, s.incarnation)))
			}
			f.entries = nil
		}
	}
	l.forget()
	return nil
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
