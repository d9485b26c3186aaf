package kvtier

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// CheckOptions say what a Check reads.
type CheckOptions struct {
	// Dir is the KV space's directory, Drives the further ones. Nobody may serve
	// them: Check takes their locks.
	Dir    string
	Drives []string
	// Key gives a tenant's encryption key, nil for none; nil knows none.
	Key func(kind, name string) ([]byte, error)
	// Progress is told how many bytes of how many are dealt with; nil tells nobody.
	Progress func(done, total int64)
	// FS is the file system; nil means durable.OS.
	FS durable.FS
}

// TenantCheck is what a Check found of one tenant on all drives.
type TenantCheck struct {
	Kind, Name string // empty where nothing says whose the blocks are
	Folder     string
	segment.Report
	// Problem says what is wrong besides damaged records; empty is nothing.
	Problem string
}

// Bad says whether anything of the tenant is not as it was written.
func (c TenantCheck) Bad() bool { return len(c.Damaged) > 0 || c.Problem != "" }

// Check reads and verifies every record of every tenant and changes nothing.
// Where there is no KV space it finds no tenants. Errors wrap durable.ErrLocked
// where somebody serves the directory, ErrNewer, or ctx's cause.
func Check(ctx context.Context, opts CheckOptions) (list []TenantCheck, err error) {
	if opts.FS == nil {
		opts.FS = durable.OS
	}
	roots := append([]string{filepath.Clean(opts.Dir)}, opts.Drives...)
	for _, root := range roots {
		unlock, err := lockRoot(opts.FS, root)
		if err != nil {
			return nil, fmt.Errorf("check KV space %s: %w", root, err)
		}
		defer func() { err = errors.Join(err, unlock()) }()
	}
	tenants, err := listTenants(opts.FS, roots[0], roots, nil)
	if err != nil {
		return nil, fmt.Errorf("check KV space %s: %w", opts.Dir, err)
	}
	var done, total int64
	for _, t := range tenants {
		total += t.bytes
	}
	for _, t := range tenants {
		begin := done
		checked, err := t.check(ctx, opts, roots, func(n int64) {
			if opts.Progress != nil {
				opts.Progress(begin+n, total)
			}
		})
		if err != nil {
			return list, fmt.Errorf("check KV tenant %s: %w", t.label(), err)
		}
		list = append(list, checked)
		done += t.bytes
	}
	return list, nil
}

// lockRoot takes a root's lock; nothing where there is no root.
func lockRoot(fsys durable.FS, root string) (unlock func() error, err error) {
	if err := format.Read(fsys, root); err != nil {
		if notExist(err) {
			return func() error { return nil }, nil
		}
		return nil, err
	}
	lock, err := fsys.Lock(filepath.Join(root, lockFile))
	if err != nil {
		return nil, err
	}
	return lock.Close, nil
}

// onDrives is a tenant as the drives have it.
type onDrives struct {
	folder string
	record tenantRecord
	err    error // why the record is of no use
	bytes  int64 // of all segments
}

func (t onDrives) label() string {
	if t.err != nil {
		return t.folder
	}
	return t.record.Kind + " " + t.record.Name
}

// listTenants finds the tenants that have a record or blocks, by folder, but for
// the folders to be skipped. Errors wrap ErrNewer.
func listTenants(fsys durable.FS, dir string, roots []string, skip map[string]bool) ([]onDrives, error) {
	folders := map[string]bool{}
	sizes := map[string]int64{}
	for _, parent := range append(blocksOf(roots), filepath.Join(dir, tenantsDir)) {
		entries, err := fsys.ReadDir(parent)
		if err != nil && !notExist(err) {
			return nil, err
		}
		for _, e := range entries {
			if id, err := hex.DecodeString(e.Name()); err == nil && len(id) == 16 && e.IsDir() && !skip[e.Name()] {
				folders[e.Name()] = true
			}
		}
	}
	var list []onDrives
	for folder := range folders {
		for _, parent := range blocksOf(roots) {
			n, err := segmentBytes(fsys, filepath.Join(parent, folder))
			if err != nil {
				return nil, err
			}
			sizes[folder] += n
		}
		t := onDrives{folder: folder, bytes: sizes[folder]}
		t.record, t.err = recordIn(fsys, filepath.Join(dir, tenantsDir, folder, tenantFile), folder)
		if errors.Is(t.err, ErrNewer) {
			return nil, t.err
		}
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b onDrives) int { return strings.Compare(a.folder, b.folder) })
	return list, nil
}

func blocksOf(roots []string) (dirs []string) {
	for _, root := range roots {
		dirs = append(dirs, filepath.Join(root, blocksDir))
	}
	return dirs
}

func segmentBytes(fsys durable.FS, dir string) (n int64, err error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil && !notExist(err) {
		return 0, err
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext != ".seg" && ext != ".out" { // that is about to go
			continue
		}
		if info, err := e.Info(); err == nil {
			n += info.Size()
		}
	}
	return n, nil
}

// recordIn reads the record of whoever's folder it is.
func recordIn(fsys durable.FS, path, folder string) (r tenantRecord, err error) {
	data, err := durable.ReadRegular(fsys, path, maxTenantFile)
	if err != nil {
		return r, err
	}
	var who struct{ Kind, Name string }
	if err := json.Unmarshal(data, &who); err != nil {
		return r, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if r, err = decodeTenant(data, who.Kind, who.Name); err != nil {
		return tenantRecord{}, err
	}
	if sum := sha256.Sum256([]byte(who.Kind + "\x00" + who.Name)); hex.EncodeToString(sum[:16]) != folder {
		return tenantRecord{}, fmt.Errorf("%w: the record is of %s %q, whose folder has another name", ErrInvalid, who.Kind, who.Name)
	}
	return r, nil
}

// check verifies a tenant's blocks on every drive.
func (t onDrives) check(ctx context.Context, opts CheckOptions, roots []string, progress func(done int64)) (TenantCheck, error) {
	c := TenantCheck{Kind: t.record.Kind, Name: t.record.Name, Folder: t.folder}
	o := segment.CheckOptions{FS: opts.FS}
	if id, err := hex.DecodeString(t.folder); err == nil {
		o.Tenant = [16]byte(id)
	}
	switch {
	case notExist(t.err):
		// Its removal was cut short: nothing finds these blocks any more.
		o.Namespaces = func(block.Namespace) bool { return false }
	case t.err != nil:
		c.Problem = "its record is unreadable, so its blocks are of no use: " + t.err.Error()
		o.Namespaces = func(block.Namespace) bool { return false }
	default:
		o.Namespaces = func(n block.Namespace) bool { return slices.Contains(t.record.ids, n) }
		if opts.Key == nil {
			break
		}
		key, err := opts.Key(t.record.Kind, t.record.Name)
		if err != nil {
			return c, err
		}
		if o.AEAD, err = cipherOf(key, t.record.Salt); err != nil {
			return c, err
		}
	}
	if _, err := t.pins(opts); err != nil {
		c.Problem = strings.TrimPrefix(c.Problem+"; its pins are unreadable: "+err.Error(), "; ")
	}
	var done int64
	for _, parent := range blocksOf(roots) {
		o.Dir = filepath.Join(parent, t.folder)
		begin := done
		o.Progress = func(n, total int64) {
			progress(begin + n)
			done = begin + total
		}
		report, err := segment.Check(ctx, o)
		if notExist(err) {
			continue
		}
		if err != nil {
			return c, errNewer(err)
		}
		c.add(report)
	}
	return c, nil
}

// pins reads the pins of the tenant.
func (t onDrives) pins(opts CheckOptions) ([]pinName, error) {
	data, err := durable.ReadRegular(opts.FS, filepath.Join(opts.Dir, tenantsDir, t.folder, pinsFile), maxPinsFile)
	if notExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return decodePins(data)
}

func (c *TenantCheck) add(r segment.Report) {
	c.Segments += r.Segments
	c.Free += r.Free
	c.Blocks += r.Blocks
	c.Bytes += r.Bytes
	c.Unopened += r.Unopened
	c.Foreign += r.Foreign
	c.Tombstones += r.Tombstones
	c.Damaged = append(c.Damaged, r.Damaged...)
}
