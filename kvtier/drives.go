package kvtier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/hearth-dev/hearth/durable"
)

// openDrives takes the further drives, each with a marker and a lock of its own;
// that of the first is the Space's. Errors wrap durable.ErrLocked and ErrNewer.
func (c *Cache) openDrives() error {
	for _, dir := range c.opts.Drives {
		if err := c.openRoot(dir); err != nil {
			return fmt.Errorf("open drive %s: %w", dir, err)
		}
	}
	for _, dir := range c.drives() {
		for _, name := range []string{blocksDir, trashDir} {
			if err := durable.MkdirAllSynced(c.fs, filepath.Join(dir, name), 0o700); err != nil {
				return err
			}
		}
	}
	for _, name := range []string{tenantsDir, quarantineDir} {
		if err := durable.MkdirAllSynced(c.fs, filepath.Join(c.opts.Dir, name), 0o700); err != nil {
			return err
		}
	}
	for _, dir := range c.drives() {
		c.removeTemps(dir)
	}
	return nil
}

// removeTemps removes what a process that was killed left half written in a
// directory: a checkpoint, or a file of the drive's test. What cannot be removed
// takes room and nothing else.
func (c *Cache) removeTemps(dir string) {
	entries, err := c.fs.ReadDir(dir)
	for _, e := range entries {
		if durable.IsTemp(e.Name()) {
			err = errors.Join(err, c.fs.Remove(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil && !notExist(err) {
		c.log.Warn("what a process left half written is not removed", slog.String("dir", dir), slog.Any("error", err))
	}
}

func (c *Cache) openRoot(dir string) error {
	if err := format.Read(c.fs, dir); err != nil && !notExist(err) {
		return err
	}
	if err := durable.MkdirAllSynced(c.fs, dir, 0o700); err != nil {
		return err
	}
	lock, err := c.fs.Lock(filepath.Join(dir, lockFile))
	if err != nil {
		return err
	}
	c.locks = append(c.locks, lock)
	return format.Ensure(c.fs, dir)
}

// closeDrives gives the further drives back.
func (c *Cache) closeDrives() error {
	var err error
	for _, lock := range c.locks {
		err = errors.Join(err, lock.Close())
	}
	c.locks = nil
	return err
}

// sweep removes what is in the trash of every drive.
func (c *Cache) sweep(ctx context.Context) error {
	var err error
	for _, dir := range c.drives() {
		err = errors.Join(err, sweepTrash(ctx, c.fs, dir))
	}
	return err
}

// sweepTrash removes what is in the trash below a root.
func sweepTrash(ctx context.Context, fsys durable.FS, root string) error {
	entries, err := fsys.ReadDir(filepath.Join(root, trashDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err = errors.Join(err, fsys.RemoveAll(filepath.Join(root, trashDir, e.Name())))
	}
	return err
}
