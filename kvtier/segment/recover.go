package segment

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/hearth-dev/hearth/durable"
)

// found is what the start knows of a segment.
type found struct {
	probe   probe
	covered bool
	entries []entry // nil where they are read again
	n       int
}

// reader gives a reader of a segment, and what gives its memory back.
func (d *drive) reader(s *segment) (*reader, func(), error) {
	window, free, err := newPages(windowBytes)
	if err != nil {
		return nil, nil, err
	}
	return d.readerOf(s, window), free, nil
}

func (d *drive) readerOf(s *segment, window []byte) *reader {
	l := d.log
	largest := pagesOf(kindBlock, flagEncrypted, uint32(l.opts.LargestBlock))
	return &reader{file: s.file, tenant: l.opts.Tenant, number: s.number, size: l.size, largest: largest, window: window}
}

// settle opens a drive's segments and makes their files such that the next start
// finds what this one finds, and nothing else. A drive that is not current is
// emptied.
func (d *drive) settle(current bool, v look, window []byte) error {
	l := d.log
	list, err := l.fs.ReadDir(d.dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if durable.IsTemp(e.Name()) {
			err = errors.Join(err, l.fs.Remove(filepath.Join(d.dir, e.Name())))
		}
	}
	if err != nil {
		return err
	}
	if !current && slices.ContainsFunc(list, func(e fs.DirEntry) bool { _, ok := parseName(e.Name()); return ok }) {
		l.log.Warn("a drive missed a start, its segments are dropped", slog.String("dir", d.dir))
	}
	var numbers []uint32
	if current {
		if numbers, current, err = d.sort(v, list); err != nil {
			return err
		}
	}
	if !current {
		if err = d.dropFiles(v, list); err == nil {
			d.chooseWay(window) // with the room that there is now
		}
		return err
	}
	d.chooseWay(window)
	for _, number := range numbers {
		path := filepath.Join(d.dir, fileName(number))
		f, err := l.fs.OpenFile(path, d.openFlags(), 0)
		if err != nil {
			return err
		}
		d.segments[number] = &segment{drive: d, number: number, path: path, file: f, next: 1}
	}
	// What a killed process did to names is not durable yet, and is believed.
	if err := l.fs.SyncDir(d.dir); err != nil {
		return err
	}
	return d.understand(window)
}

// chooseWay finds out whether a drive is written around the page cache.
func (d *drive) chooseWay(window []byte) {
	l := d.log
	if !l.opts.Direct {
		return
	}
	err := probeDirect(l.fs, d.dir, window)
	if err != nil {
		l.log.Warn("a drive is written through the page cache, its file system has no direct way", slog.String("dir", d.dir), slog.Any("error", err))
	}
	l.mu.Lock()
	d.direct = err == nil
	l.mu.Unlock()
}

// understand finds out what a drive's segments hold. One that may hold more than
// can be read may hold tombstones, so what is older goes.
func (d *drive) understand(window []byte) error {
	l := d.log
	for _, s := range d.list() {
		info, err := s.file.Stat()
		if err != nil {
			return err
		}
		if info.Size() == l.size {
			p, err := d.readerOf(s, window).probe()
			if err != nil {
				return err
			}
			s.found, s.incarnation = &found{probe: p}, p.incarnation
			l.seq, l.generation = max(l.seq, p.seq), max(l.generation, p.incarnation>>32)
			if p.unreadable == nil {
				continue
			}
			l.log.Error("a segment cannot be read, and all of its drive go", slog.String("path", s.path), slog.Any("error", p.unreadable))
			return d.drop(d.list())
		}
		// The rest of a file that was being made; or somebody cut it.
		if d.hasList {
			l.log.Error("a segment has another size, and all of its drive go", slog.String("path", s.path), slog.Int64("size", info.Size()))
			return d.drop(d.list())
		}
		if info.Size() >= PageSize {
			if err := d.readerOf(s, window).read(window[:PageSize], 0); err != nil || string(window[:8]) == segmentMagic {
				l.log.Error("a segment has another size, and all of its drive go", slog.String("path", s.path), slog.Int64("size", info.Size()))
				return d.drop(d.list())
			}
		}
		if err := d.drop([]*segment{s}); err != nil {
			return err
		}
	}
	covered := l.opts.Covered != nil
	for _, s := range d.list() {
		f := s.found
		if f.probe.incarnation == 0 {
			continue
		}
		f.covered = covered && f.probe.footer && l.opts.Covered(s.number, d.number, s.incarnation)
		if f.covered {
			s.state, s.records, s.next = sealed, -1, f.probe.trailer.offset/PageSize
			continue
		}
		if err := d.adopt(s, window); err != nil {
			return err
		}
		// What follows may hold records that tombstones in this one are about.
		covered = covered && s.state == free
	}
	return nil
}

// adopt takes what a segment holds, and gives it a footer that says so where its
// own does not.
func (d *drive) adopt(s *segment, window []byte) error {
	l := d.log
	f := s.found
	c := d.readerOf(s, window).load(f.probe)
	l.seq = max(l.seq, c.seq)
	kept := slices.DeleteFunc(slices.Clone(c.entries), func(e entry) bool { return !l.wanted(e) })
	if c.scanned {
		var err error
		if kept, err = l.whole(s, kept); err != nil {
			return err
		}
	}
	if c.scanned || len(kept) < len(c.entries) {
		if err := d.repair(s, kept, c); err != nil {
			return err
		}
	}
	if d.segments[s.number] != s || len(kept) == 0 {
		return nil
	}
	s.state = sealed
	for _, e := range kept {
		l.seq = max(l.seq, e.seq)
		if e.kind == kindBlock {
			s.records++
			continue
		}
		t := e.tombstone()
		key := name{t.Namespace, t.Key}
		if l.voids == nil {
			l.voids = map[name]uint64{}
		}
		l.voids[key] = max(l.voids[key], t.Upto)
		if l.opts.Ended != nil {
			l.opts.Ended(t)
		}
	}
	last := kept[len(kept)-1]
	s.next = int64(last.page) + pagesOf(last.kind, last.flags, last.length)
	f.n = len(kept)
	if l.cached += len(kept); l.cached <= l.opts.cached {
		f.entries = kept
	}
	return nil
}

// wanted says whether an entry counts. Tombstones always do.
func (l *Log) wanted(e entry) bool {
	return e.kind == kindTombstones ||
		(e.flags&flagEncrypted != 0) == (l.opts.AEAD != nil) && (l.opts.Namespaces == nil || l.opts.Namespaces(e.namespace))
}

// whole gives the entries of a segment whose blocks are there. One that is torn
// would hide an older record of its key, which may be whole.
func (l *Log) whole(s *segment, entries []entry) (kept []entry, err error) {
	memory, free, err := newPages(min(l.size, verifyBytes+largestPayload+2*PageSize))
	if err != nil {
		return nil, err
	}
	defer free()
	var at, have int64 // what the memory holds, in pages
	for _, e := range entries {
		page, n := int64(e.page), pagesOf(e.kind, e.flags, e.length)
		if page < at || page+n > at+have {
			at, have = page, max(n, min(verifyBytes/PageSize, l.pagesOfSegment()-page))
			if _, err := durable.ReadVAt(s.file, [][]byte{memory[:have*PageSize]}, at*PageSize); err != nil {
				// Some of it is unreadable; perhaps not this one.
				have = n
				if _, err := durable.ReadVAt(s.file, [][]byte{memory[:n*PageSize]}, at*PageSize); err != nil {
					have = 0
					l.stats.Damaged++
					continue
				}
			}
		}
		p := memory[(page-at)*PageSize:][:n*PageSize]
		if e.kind == kindBlock {
			h, err := l.understand(p[:PageSize], s.incarnation)
			if err == nil {
				// What is encrypted is opened where it lies: it is read once.
				_, err = l.verify(h, p[:PageSize], p[PageSize:])
			}
			if err != nil {
				l.stats.Damaged++
				continue
			}
		}
		kept = append(kept, e)
	}
	return kept, nil
}

// verifyBytes is what whole reads at once where records are small.
const verifyBytes = 4 << 20

// repair writes the footer of what was found in a segment. Where more may be in it
// than was found, or no footer can be written, what is older goes, and in the last
// case the segment as well.
func (d *drive) repair(s *segment, kept []entry, c contents) error {
	l := d.log
	if c.doubt == nil && len(kept) == 0 && len(c.entries) == 0 {
		return s.file.Datasync() // it was begun, and nothing more
	}
	err := d.foot(s, encoded(kept), s.incarnation, c.seq)
	if err == nil && c.doubt == nil {
		return nil
	}
	l.log.Error("a segment cannot be read or ended well, and all older ones of its drive go", slog.String("path", s.path), slog.Any("error", errors.Join(c.doubt, err)))
	all := d.list()
	at := slices.Index(all, s)
	if err != nil {
		at++
	}
	return d.drop(all[:at])
}

// drop removes segments for good, oldest first.
func (d *drive) drop(list []*segment) error {
	for _, s := range list {
		if err := d.remove(context.Background(), s); err != nil {
			return fmt.Errorf("drop segment: %w", err)
		}
	}
	return nil
}
