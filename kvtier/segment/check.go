package segment

import (
	"context"
	"crypto/cipher"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// CheckOptions are the parameters of a Check.
type CheckOptions struct {
	FS     durable.FS
	Dir    string // one drive's, of one tenant
	Tenant [16]byte
	// AEAD opens encrypted blocks, whose headers alone are verified without it.
	AEAD cipher.AEAD
	// Namespaces says whose blocks count; nil takes all.
	Namespaces func(block.Namespace) bool
	// Progress is told how many bytes of how many are dealt with.
	Progress func(done, total int64)
}

// Report is what a Check found.
type Report struct {
	Segments int
	Free     int // of them, without records
	Blocks   int
	Bytes    int64 // of these blocks
	// Unopened are the blocks that are encrypted, and no key was given.
	Unopened   int
	Foreign    int // blocks of other namespaces
	Tombstones int
	Damaged    []Damage
}

// Damage is a record, or what tells of records, that is not as it was written.
type Damage struct {
	Path      string
	Page      int64
	Namespace block.Namespace // zero where it is no block
	Key       block.Key
	Err       error
}

// errMissing says that a file is gone that was not removed by this program.
var errMissing = errors.New("the segment is gone, and the next start drops all others of its drive")

// Check reads and verifies everything that a tenant has on one drive, and changes
// nothing. Nobody may have the log open. Errors wrap ErrNewer, what makes the
// directory unreadable, or ctx's cause.
func Check(ctx context.Context, o CheckOptions) (Report, error) {
	var report Report
	list, err := o.FS.ReadDir(o.Dir)
	if err != nil {
		return report, fmt.Errorf("check segments: %w", err)
	}
	window, free, err := newPages(windowBytes)
	if err != nil {
		return report, fmt.Errorf("check segments: %w", err)
	}
	defer free()
	payload, freePayload, err := newPages(largestPayload)
	if err != nil {
		return report, fmt.Errorf("check segments: %w", err)
	}
	defer freePayload()
	c := checker{o: o, report: &report, window: window, payload: payload}
	listed, _, err := readFiles(o.FS, o.Dir)
	if err != nil {
		return report, fmt.Errorf("check segments: %w", err)
	}
	var numbers []uint32
	for _, e := range list {
		number, ok := parseName(e.Name())
		if !ok {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return report, fmt.Errorf("check segments: %w", err)
		}
		if !info.Mode().IsRegular() {
			report.Damaged = append(report.Damaged, Damage{Path: filepath.Join(o.Dir, e.Name()), Err: errNoFile})
			continue
		}
		numbers = append(numbers, number)
		c.total += info.Size()
	}
	for _, number := range listed {
		_, leaving := o.FS.Lstat(filepath.Join(o.Dir, outName(number)))
		if !slices.Contains(numbers, number) && leaving != nil {
			report.Damaged = append(report.Damaged, Damage{Path: filepath.Join(o.Dir, fileName(number)), Err: errMissing})
		}
	}
	for _, number := range numbers {
		if err := c.segment(ctx, number); err != nil {
			return report, fmt.Errorf("check segment %d: %w", number, err)
		}
	}
	return report, nil
}

type checker struct {
	o           CheckOptions
	report      *Report
	window      []byte
	payload     []byte
	done, total int64
}

func (c *checker) progress(done int64) {
	if c.o.Progress != nil {
		c.o.Progress(done, c.total)
	}
}

func (c *checker) damaged(path string, page int64, e entry, err error) {
	c.report.Damaged = append(c.report.Damaged, Damage{Path: path, Page: page, Namespace: e.namespace, Key: e.key, Err: err})
}

// segment checks one file.
func (c *checker) segment(ctx context.Context, number uint32) (err error) {
	path := filepath.Join(c.o.Dir, fileName(number))
	f, err := c.o.FS.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	c.report.Segments++
	begin := c.done
	c.done += info.Size()
	defer c.progress(c.done)
	if !validSize(info.Size()) {
		c.damaged(path, 0, entry{}, fmt.Errorf("%w: no segment has %d bytes", errFormat, info.Size()))
		return nil
	}
	r := &reader{file: f, tenant: c.o.Tenant, number: number, size: info.Size(), largest: 1 + largestPayload/PageSize, window: c.window}
	p, err := r.probe()
	switch {
	case err != nil:
		return err
	case p.unreadable != nil:
		c.damaged(path, 0, entry{}, p.unreadable)
		return nil
	case p.incarnation == 0:
		c.report.Free++
		return nil
	}
	contents := r.load(p)
	if contents.doubt != nil || contents.scanned && p.footer {
		c.damaged(path, info.Size()/PageSize-1, entry{}, errors.Join(contents.doubt, fmt.Errorf("%w: footer", errFormat)))
	}
	if len(contents.entries) == 0 {
		c.report.Free++
	}
	for _, e := range contents.entries {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		switch {
		case e.kind == kindTombstones:
			c.report.Tombstones++
			continue
		case c.o.Namespaces != nil && !c.o.Namespaces(e.namespace):
			c.report.Foreign++
			continue
		}
		if err := c.block(f, p.incarnation, e); err != nil {
			c.damaged(path, int64(e.page), e, err)
		}
		c.progress(begin + int64(e.page)*PageSize)
	}
	return nil
}

// block verifies one block.
func (c *checker) block(f durable.File, incarnation uint64, e entry) error {
	l := Log{opts: Options{AEAD: c.o.AEAD}}
	page := c.window[:PageSize]
	behind := c.payload[:(pagesOf(e.kind, e.flags, e.length)-1)*PageSize]
	if _, err := durable.ReadVAt(f, [][]byte{page, behind}, int64(e.page)*PageSize); err != nil {
		return err
	}
	h, err := l.understand(page, incarnation)
	switch {
	case err != nil:
		return err
	case entryOf(h, e.page) != e:
		return fmt.Errorf("%w: header and footer differ", ErrDamaged)
	case h.flags&flagEncrypted != 0 && c.o.AEAD == nil:
		c.report.Unopened++
	default:
		if _, err := l.verify(h, page, behind); err != nil {
			return err
		}
	}
	c.report.Blocks++
	c.report.Bytes += int64(e.length)
	return nil
}
