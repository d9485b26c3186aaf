package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/durable"
)

const (
	suffix = ".json"
	// maxFile bounds a claim's file as it is read; past maxAppend the next change
	// writes it anew with one record.
	maxFile   = 1 << 20
	maxAppend = 256 << 10
	// maxSyncs bounds the syncs that one call has under way.
	maxSyncs = 16
)

// change is one claim's next entry on its way to the drive.
type change struct {
	entry  Entry
	record []byte
	// at is where the record is appended; negative: the file is written anew.
	at  int64
	err error
	// maybe says that the record may be on the drive although err is set.
	maybe bool

	file durable.File
	temp string
}

func (l *Ledger) path(uid string) string { return filepath.Join(l.dir, uid+suffix) }

// store makes changes durable: every file is written, then all are synced side
// by side, then one sync of the directory covers the names of all that are
// new. Each change has its own err.
func (l *Ledger) store(changes []*change) {
	var files []*change
	for _, c := range changes {
		if c.err = l.write(c); c.err == nil {
			files = append(files, c)
		}
	}
	l.syncAll(files)
	renamed := false
	for _, c := range files {
		closeErr := c.file.Close()
		switch {
		case c.err != nil:
		case closeErr != nil:
			c.err = closeErr
		case c.temp != "":
			if c.err = l.fs.Rename(c.temp, l.path(c.entry.UID)); c.err == nil {
				c.maybe, renamed = true, true
			}
		}
		if c.temp != "" && c.err != nil {
			_ = l.fs.Remove(c.temp)
		}
	}
	if !renamed {
		return
	}
	if err := l.syncDir(l.dir); err != nil {
		for _, c := range files {
			if c.temp != "" && c.err == nil {
				c.err = err
			}
		}
	}
}

// write puts a change's bytes where they belong, unsynced.
func (l *Ledger) write(c *change) error {
	path := l.path(c.entry.UID)
	if c.at < 0 {
		c.temp = durable.TempName(path)
	}
	var err error
	if c.temp != "" {
		c.file, err = l.fs.OpenFile(c.temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	} else {
		c.file, err = l.fs.OpenFile(path, os.O_WRONLY, 0)
	}
	if err != nil {
		return err
	}
	if c.temp == "" {
		c.maybe = true
		_, err = c.file.WriteAt(c.record, c.at)
	} else {
		_, err = c.file.Write(c.record)
	}
	if err != nil {
		_ = c.file.Close()
		if c.temp != "" {
			_ = l.fs.Remove(c.temp)
		}
	}
	return err
}

// syncAll syncs the files of changes side by side: the kernel writes what is
// waiting together.
func (l *Ledger) syncAll(changes []*change) {
	if len(changes) == 0 {
		return
	}
	defer l.timed(len(changes), time.Now())
	sync := func(c *change) { c.err = c.file.Datasync() }
	if len(changes) == 1 {
		sync(changes[0])
		return
	}
	var group errgroup.Group
	group.SetLimit(maxSyncs)
	for _, c := range changes {
		group.Go(func() error { sync(c); return nil })
	}
	_ = group.Wait()
}

func (l *Ledger) syncDir(dir string) error {
	defer l.timed(1, time.Now())
	return l.fs.SyncDir(dir)
}

// timed counts syncs and the time that callers waited for them.
func (l *Ledger) timed(syncs int, since time.Time) {
	l.syncs.Add(int64(syncs))
	l.syncTime.Add(int64(time.Since(since)))
}

// removeFile takes a claim's file away; the directory is to be synced.
func (l *Ledger) removeFile(uid string) error {
	if err := l.fs.Remove(l.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// full reports whether an error says that there is no room, be it of blocks,
// inodes or a quota.
func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// told says what a drive's error means for people.
func (l *Ledger) told(what string, err error) error {
	if err == nil {
		return nil
	}
	text := "the drive of " + l.dir + " does not keep it"
	switch {
	case full(err):
		text = "no space left at " + l.dir
	case errors.Is(err, syscall.EROFS):
		text = l.dir + " is read-only"
	case errors.Is(err, syscall.EIO):
		text = "the drive of " + l.dir + " fails"
	}
	return fmt.Errorf("%s: %s: %w", what, text, err)
}

// size is the length of the file after a change that succeeded.
func (c *change) size() int64 { return max(c.at, 0) + int64(len(c.record)) }
