package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// dirMode is that of the ledger's directories: entries name models and pods.
const dirMode = 0o700

// maxBad bounds the settled bad files that are kept; of the others there are as
// many as claims wait to be settled.
const maxBad = 100

// Open opens a ledger, and makes it if it is absent. It moves damaged files
// aside, and makes durable what it found. ErrNewer and durable.ErrLocked leave
// everything untouched.
func Open(o Options) (*Ledger, error) {
	l := &Ledger{
		dir: o.Dir, fs: o.FS, boot: o.BootID, now: o.Now, log: o.Log,
		ended: map[string]Ticket{}, claims: map[string]*slot{}, pending: map[string]*Entry{}, owners: index{},
		busy: map[string]chan struct{}{}, unsettled: map[string]bool{},
	}
	if l.fs == nil {
		l.fs = durable.OS
	}
	if l.now == nil {
		l.now = time.Now
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	l.journal = &journal{
		fs: l.fs, dir: filepath.Join(l.dir, "journal"), now: l.now, log: l.log, timed: l.timed,
		turn: make(chan struct{}, 1), open: map[uint64]bool{},
	}
	l.journal.give()
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("open ledger %s: %w", l.dir, err)
	}
	return l, nil
}

func (l *Ledger) open() (err error) {
	// A ledger of a newer version is not even locked.
	if _, err := l.read(); err != nil {
		return err
	}
	if err := l.makeDirs(); err != nil {
		return err
	}
	if l.lock, err = l.fs.Lock(filepath.Join(l.dir, "lock")); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.lock.Close())
		}
	}()
	files, err := l.read()
	if err != nil {
		return err
	}
	if err := l.adopt(files); err != nil {
		return err
	}
	if err := l.loadBad(); err != nil {
		return err
	}
	var entries []Entry
	for _, s := range l.claims {
		entries = append(entries, s.entry)
	}
	missing, journalErr := l.journal.load(entries)
	if journalErr != nil {
		l.log.Warn("the journal of allocations is not whole", slog.Any("error", journalErr))
	}
	for i := range missing {
		l.journal.open[missing[i].Number] = true
	}
	l.journal.waiting = missing
	return nil
}

// makeDirs makes the ledger's directories, and closes them to others: the
// kubelet makes the folder of a hostPath before the ledger does, for all to
// read. A file system without modes keeps what it has.
func (l *Ledger) makeDirs() error {
	for _, dir := range []string{l.dir, l.badDir(), l.oldDir(), l.journal.dir} {
		if err := durable.MkdirAllSynced(l.fs, dir, dirMode); err != nil {
			return err
		}
		info, err := l.fs.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&^dirMode == 0 {
			continue
		}
		if err := l.fs.Chmod(dir, dirMode); err != nil {
			l.log.Warn("the ledger's folder stays open to others", slog.String("folder", dir), slog.Any("error", err))
		}
	}
	return nil
}

// found is a file of the directory.
type found struct {
	name string
	uid  string
	d    decoded
	size int
	err  error // what is wrong with it
}

// read reads all claims. Only what concerns the whole directory is an error.
func (l *Ledger) read() ([]found, error) {
	entries, err := l.fs.ReadDir(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var files []found
	for _, e := range entries {
		uid, ours := strings.CutSuffix(e.Name(), suffix)
		if !ours || durable.IsTemp(e.Name()) || !e.Type().IsRegular() {
			continue
		}
		f := found{name: e.Name(), uid: uid}
		var data []byte
		if data, f.err = durable.ReadFile(l.fs, filepath.Join(l.dir, f.name), maxFile); f.err == nil {
			f.size = len(data)
			f.d, f.err = decode(data)
		}
		switch {
		case errors.Is(f.err, ErrNewer), f.err != nil && !damaged(f.err):
			return nil, fmt.Errorf("%s: %w", f.name, f.err)
		case f.err == nil && f.d.entry.UID != uid:
			f.err = fmt.Errorf("%w: it is of claim %s", errBad, f.d.entry.UID)
		}
		files = append(files, f)
	}
	return files, nil
}

// damaged reports whether an error of reading a file says that its bytes are
// lost. Any other, such as a want of descriptors, says nothing of them: who goes
// on without the claim gives its devices to others.
func damaged(err error) bool {
	for _, is := range []error{errBad, durable.ErrTooLong, syscall.EIO, syscall.EBADMSG, syscall.EUCLEAN} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// adopt takes over what was read: whole files become slots, bad ones go aside,
// what an interrupted write left goes away.
func (l *Ledger) adopt(files []found) error {
	entries, err := l.fs.ReadDir(l.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if durable.IsTemp(e.Name()) {
			if err := l.fs.Remove(filepath.Join(l.dir, e.Name())); err != nil {
				l.reportLocked(e.Name(), "", err.Error())
			}
		}
	}
	var kept []*change // as many as may be open at once
	for i := range files {
		f := &files[i]
		if f.err != nil {
			l.quarantine(f)
			continue
		}
		s := &slot{entry: f.d.entry, size: int64(f.d.whole), dirty: f.d.whole < f.size}
		l.putLocked(s)
		c := &change{entry: f.d.entry}
		if c.file, c.err = l.fs.OpenFile(filepath.Join(l.dir, f.name), os.O_WRONLY, 0); c.err != nil {
			l.unsynced(c)
			continue
		}
		if kept = append(kept, c); len(kept) == maxSyncs {
			l.believe(kept)
			kept = kept[:0]
		}
	}
	l.believe(kept)
	return l.syncDir(l.dir)
}

// believe syncs and closes the files of claims: what a killed process wrote and
// did not sync is believed from here on, so it is to be on the drive.
func (l *Ledger) believe(claims []*change) {
	l.syncAll(claims)
	for _, c := range claims {
		if c.err = errors.Join(c.err, c.file.Close()); c.err != nil {
			l.unsynced(c)
		}
	}
}

// unsynced has the next change of a claim write its file anew.
func (l *Ledger) unsynced(c *change) {
	l.claims[c.entry.UID].dirty = true
	l.reportLocked(c.entry.UID+suffix, c.entry.UID, c.err.Error())
}

// quarantine moves a bad file aside and remembers its claim.
func (l *Ledger) quarantine(f *found) {
	to := filepath.Join(l.badDir(), l.badName(f.name))
	err := l.fs.Rename(filepath.Join(l.dir, f.name), to)
	if err == nil {
		err = l.syncDir(l.badDir())
	}
	if err != nil {
		to = filepath.Join(l.dir, f.name)
		l.log.Error("a damaged claim's file stays where it is", slog.String("claim", f.uid), slog.Any("error", err))
	}
	l.unsettled[f.uid] = true
	l.reportLocked(to, f.uid, f.err.Error())
}

// reportLocked keeps a problem for who asks, and logs it.
func (l *Ledger) reportLocked(file, uid, reason string) {
	l.log.Error("a file of the ledger cannot be used", slog.String("file", file), slog.String("claim", uid), slog.String("reason", reason))
	if len(l.problems) >= maxProblems {
		l.problems = slices.Delete(l.problems, 0, 1)
	}
	l.problems = append(l.problems, Problem{file, uid, reason, l.now()})
}

// badUID is the claim of a file in quarantine.
func badUID(name string) (string, bool) {
	stamp, rest, found := strings.Cut(name, "-")
	uid, ours := strings.CutSuffix(rest, suffix)
	_, err := strconv.ParseInt(stamp, 10, 64)
	return uid, found && ours && err == nil
}

// bad lists the files in quarantine by claim.
func (l *Ledger) bad() (map[string][]string, error) {
	entries, err := l.fs.ReadDir(l.badDir())
	if err != nil {
		return nil, err
	}
	files := map[string][]string{}
	for _, e := range entries {
		if uid, ok := badUID(e.Name()); ok {
			files[uid] = append(files[uid], e.Name())
		}
	}
	return files, nil
}

// loadBad remembers the claims that earlier runs put in quarantine, but those
// that have a good file since.
func (l *Ledger) loadBad() error {
	files, err := l.bad()
	if err != nil {
		return err
	}
	var settled []string
	for uid, names := range files {
		if l.claims[uid] != nil {
			settled = append(settled, uid)
			continue
		}
		if !l.unsettled[uid] {
			l.unsettled[uid] = true
			l.reportLocked(filepath.Join(l.badDir(), names[len(names)-1]), uid, "damaged, found by an earlier run")
		}
	}
	l.settle(settled)
	return nil
}

// settle notes that what became of claims whose file was bad is known again.
// The files stay for people, the newest hundred.
func (l *Ledger) settle(uids []string) {
	if len(uids) == 0 {
		return
	}
	err := l.settleFiles(uids)
	if err != nil {
		// The next run will take them for unsettled, and keep what they hold.
		l.log.Warn("a damaged claim's file cannot be settled", slog.Any("error", err))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uid := range uids {
		delete(l.unsettled, uid)
	}
}

func (l *Ledger) settleFiles(uids []string) error {
	files, err := l.bad()
	if err != nil {
		return err
	}
	for _, uid := range uids {
		for _, name := range files[uid] {
			if err := l.fs.Rename(filepath.Join(l.badDir(), name), filepath.Join(l.oldDir(), name)); err != nil {
				return err
			}
		}
		if err := l.settlePlace(uid); err != nil {
			return err
		}
	}
	entries, err := l.fs.ReadDir(l.oldDir())
	if err != nil {
		return err
	}
	old := slices.DeleteFunc(entries, func(e fs.DirEntry) bool { _, ours := badUID(e.Name()); return !ours })
	for i := range len(old) - maxBad {
		if err := l.fs.Remove(filepath.Join(l.oldDir(), old[i].Name())); err != nil {
			return err
		}
	}
	// Each has its new name before it loses the old one.
	if err := l.syncDir(l.oldDir()); err != nil {
		return err
	}
	return l.syncDir(l.badDir())
}

// settlePlace moves a bad file that could not be moved aside when it was found,
// and that nothing has taken the place of.
func (l *Ledger) settlePlace(uid string) error {
	l.mu.Lock()
	taken := l.claims[uid] != nil
	l.mu.Unlock()
	if taken || !validUID(uid) {
		return nil
	}
	err := l.fs.Rename(l.path(uid), filepath.Join(l.oldDir(), l.badName(uid+suffix)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return l.syncDir(l.dir)
}

// badName names a bad file by the time at which it was found.
func (l *Ledger) badName(name string) string {
	return strconv.FormatInt(l.now().UnixMilli(), 10) + "-" + name
}
