// Package weightcache keeps model weights on one node: a Store of verified
// files with leases and eviction, and a Puller that fills it from sources.
// The node agent owns one of each and hands readers, views and leases to the
// mirror, the driver and the command line. The package never serves a byte
// whose digest it has not proven (or is not about to prove before the last
// segment leaves), never decides what should be cached, and knows no HTTP
// route and no Kubernetes. The formats on the drive are in FORMAT.md.
package weightcache

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Options configure a Store.
type Options struct {
	// Dir is the root; it is made 0700. One process owns it at a time.
	Dir string
	// ViewsDir holds the directories that engines read. It must be on Dir's
	// file system (views are hard links) and is world-readable. Empty means
	// Dir with "-views" appended, a sibling.
	ViewsDir string
	// FS is the file system; nil means durable.OS.
	FS durable.FS
	// Budget is the most bytes the blobs may occupy; 0 means what the drive has.
	Budget units.Bytes
	// KeepFree is what a pull leaves free on the drive.
	KeepFree units.Bytes
	// Keep names refs whose artifacts eviction never takes, so that two models
	// which do not fit together do not push each other out for ever: the later
	// one fails with ErrNoSpace. Remove may still take them.
	Keep []artifact.Ref
	// MayView says whether every program of the node may read an artifact, known
	// by one of its manifests, in views. It is asked with locks held: it must be
	// quick, call nothing of the store and always give the same answer. Nil: all
	// but those that are known to be restricted.
	MayView func(m *artifact.Manifest) bool
	// Boot is an id of the kernel's current run: what was written in the same
	// run is readable though it was never synced. Empty means the kernel's own.
	Boot string
	Log  *slog.Logger
	Now  func() time.Time
}

// FormatVersion is the version of the store's layout. This code reads it and
// the one before (there is none before 1).
const FormatVersion = 1

const formatPrefix = "hearth weightcache "

// format marks a directory as a weight store.
var format = durable.Marker{
	Name: formatFile, Prefix: formatPrefix, Version: FormatVersion, What: "weight store", Newer: ErrNewer, Beside: []string{lockFile},
}

// Names under the root.
const (
	formatFile    = "FORMAT"
	lockFile      = "lock"
	blobsDir      = "blobs/sha256"
	chunksDir     = "chunks/sha256"
	landingDir    = "landing"
	refsDir       = "refs"
	readyDir      = "ready"
	quarantineDir = "quarantine"
)

// Names are the entries that a store makes in its directory, all of them, for
// whoever removes one that nobody serves.
func Names() []string {
	return []string{
		formatFile, lockFile, filepath.Dir(blobsDir), filepath.Dir(chunksDir), landingDir, refsDir, readyDir,
		claimsDir, quarantineDir, doubtsFile,
	}
}

// Store is the verified bytes of one node. It is safe for concurrent use.
type Store struct {
	fs       *settling
	dir      string
	views    string
	budget   int64
	keepFree int64
	keep     map[artifact.Ref]bool
	// recording is taken to change records on the drive; capacity 1.
	recording  chan struct{}
	viewPolicy func(m *artifact.Manifest) bool
	log        *slog.Logger
	now        func() time.Time
	lock       io.Closer
	boot       [bootBytes]byte // zero: unknown, trust nothing unsynced

	mu        sync.Mutex
	refs      map[artifact.Ref]*artifact.Manifest
	artifacts map[artifact.Digest]*record
	blobs     map[artifact.Digest]int64     // committed files and their bytes
	partial   map[artifact.Digest]int64     // bytes allocated to files still landing
	landing   map[artifact.Digest]bool      // whose files are open to be filled
	bad       map[artifact.Digest]bool      // found damaged and not replaced yet
	checks    map[artifact.Digest]time.Time // when each committed file was last found right
	damage    map[artifact.Digest]int       // how often each was found damaged since Open
	damages   int                           // the sum of damage
	removing  map[artifact.Digest]bool      // being unlinked
	kept      map[artifact.Digest]time.Time // until when bytes stay that no ref means
	orphans   map[artifact.Digest]bool      // stored files of no artifact, kept while there is room
	doubts    map[artifact.Digest]time.Time // files of which somebody may hold other bytes
	turn      int64                         // counts uses
	// publications has a channel for each artifact whose views are being
	// published, closed at the end of that.
	publications  map[artifact.Digest]chan struct{}
	reserved      int64         // bytes promised to pulls and not allocated yet
	keepingDoubts chan struct{} // capacity 1: taken while they are written
	lost          chan struct{} // closed once the directory was found gone
	lose          sync.Once     // closes lost
	freed         signal        // fires when removing or evicting shrinks
	watchers      map[chan struct{}]bool
}

// record is what the store knows about one artifact.
type record struct {
	m        *artifact.Manifest
	checked  bool // its structure was found right
	leases   int
	busy     int // pulls under way
	evicting bool
	lastUsed time.Time
	turn     int64           // of its last use; eviction goes by it
	views    map[string]bool // kind of view -> published
	// old are the refs that meant it before, each with a superseded record. m is
	// of one of them where no ref means the artifact now.
	old map[artifact.Ref]bool
	// hubRefs are the refs, with their commits, that the hub view is known to
	// hold: refs of one artifact share the view.
	hubRefs map[artifact.Ref]string
}

// signal wakes everyone who waits for a change; the mutex of its owner guards it.
type signal struct{ ch chan struct{} }

func (s *signal) wait() <-chan struct{} {
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

func (s *signal) fire() {
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}

// Open takes the store at opts.Dir, making it where there is none, and clears
// what an interrupted process left. Errors wrap durable.ErrLocked where
// another process owns it and ErrNewer where a newer version wrote it; then
// nothing was touched.
func Open(opts Options) (*Store, error) {
	if opts.Dir == "" {
		return nil, errors.New("open weight store: no directory is given")
	}
	s := &Store{
		fs: newSettling(opts.FS), dir: filepath.Clean(opts.Dir), views: opts.ViewsDir,
		budget: int64(opts.Budget), keepFree: int64(opts.KeepFree), log: opts.Log, now: opts.Now,
		keep: map[artifact.Ref]bool{}, refs: map[artifact.Ref]*artifact.Manifest{}, artifacts: map[artifact.Digest]*record{},
		blobs: map[artifact.Digest]int64{}, partial: map[artifact.Digest]int64{}, landing: map[artifact.Digest]bool{}, lost: make(chan struct{}),
		bad: map[artifact.Digest]bool{}, damage: map[artifact.Digest]int{}, checks: map[artifact.Digest]time.Time{}, kept: map[artifact.Digest]time.Time{}, removing: map[artifact.Digest]bool{}, orphans: map[artifact.Digest]bool{}, publications: map[artifact.Digest]chan struct{}{},
		doubts:   map[artifact.Digest]time.Time{},
		watchers: map[chan struct{}]bool{}, recording: make(chan struct{}, 1), keepingDoubts: make(chan struct{}, 1), viewPolicy: opts.MayView,
	}
	for _, ref := range opts.Keep {
		s.keep[ref] = true
	}
	if s.fs.FS == nil {
		s.fs.FS = durable.OS
	}
	if s.views == "" {
		s.views = s.dir + "-views"
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.boot = bootID(opts.Boot)
	if err := s.open(); err != nil {
		if s.lock != nil {
			_ = s.lock.Close()
		}
		return nil, fmt.Errorf("open weight store %s: %w", s.dir, err)
	}
	return s, nil
}

func (s *Store) open() error {
	// What a newer version wrote is refused before anything is made here.
	if err := format.Read(s.fs, s.dir); err != nil && !notExist(err) {
		return err
	}
	if err := durable.MkdirAllSynced(s.fs, s.dir, 0o700); err != nil {
		return err
	}
	lock, err := s.fs.Lock(s.path(lockFile))
	if err != nil {
		return err
	}
	s.lock = lock
	if err := format.Ensure(s.fs, s.dir); err != nil {
		return err
	}
	bad, err := s.readRecords()
	if err != nil {
		return err
	}
	if err := s.fs.Chmod(s.dir, 0o700); err != nil {
		return err
	}
	if err := s.removeTemps(); err != nil {
		return err
	}
	for _, name := range []string{blobsDir, chunksDir, landingDir, refsDir, readyDir, quarantineDir} {
		if err := durable.MkdirAllSynced(s.fs, s.path(name), 0o700); err != nil {
			return err
		}
	}
	if err := durable.MkdirAllSynced(s.fs, s.views, 0o755); err != nil {
		return err
	}
	// The umask may have narrowed it, and engines of any uid read below it.
	if err := s.fs.Chmod(s.views, 0o755); err != nil {
		return err
	}
	nameless := false
	for _, path := range bad {
		name := filepath.Base(path)
		nameless = nameless || strings.HasSuffix(name, recordSuffix) && !durable.IsTemp(name) && !strings.Contains(name, supersededTag)
		if err := s.quarantine(path); err != nil {
			return err
		}
	}
	if err := s.loadReady(); err != nil {
		return err
	}
	if err := s.loadBlobs(nameless); err != nil {
		return err
	}
	lost, err := s.loadLanding()
	if err != nil {
		return err
	}
	s.loadDoubts(lost)
	if err := s.loadViews(); err != nil {
		return err
	}
	if err := s.settleAccess(); err != nil {
		return err
	}
	if err := s.reviewViews(); err != nil {
		return err
	}
	return s.settleAll()
}

// bootID folds the id of the kernel's run into the bytes a bitmap keeps.
func bootID(id string) (boot [bootBytes]byte) {
	if id == "" {
		data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return boot
		}
		id = string(data)
	}
	sum := sha256.Sum256([]byte(id))
	copy(boot[:], sum[:])
	return boot
}

// removeTemps clears interrupted writes of the version.
func (s *Store) removeTemps() error {
	entries, err := s.fs.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if durable.IsTemp(e.Name()) {
			if err := s.fs.RemoveAll(s.path(e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close gives the store back. Pulls must have ended.
func (s *Store) Close() error {
	if err := s.lock.Close(); err != nil {
		return fmt.Errorf("close weight store %s: %w", s.dir, err)
	}
	return nil
}

// Dir is the root of the store, ViewsDir that of its views.
func (s *Store) Dir() string { return s.dir }

// ViewsDir is the directory below which views are published.
func (s *Store) ViewsDir() string { return s.views }

func (s *Store) path(elements ...string) string {
	return filepath.Join(append([]string{s.dir}, elements...)...)
}

func (s *Store) blobPath(sha artifact.Digest) string {
	hex := sha.String()
	return s.path(blobsDir, hex[:2], hex)
}

func (s *Store) chunksPath(sha artifact.Digest) string {
	hex := sha.String()
	return s.path(chunksDir, hex[:2], hex)
}

// eachHex calls do for the files of a two-level directory whose names are
// digests, and removes everything else found there.
func (s *Store) eachHex(root string, do func(sha artifact.Digest, path string) error) error {
	dirs, err := s.fs.ReadDir(root)
	if err != nil {
		return err
	}
	for _, d := range dirs {
		dir := filepath.Join(root, d.Name())
		if !d.IsDir() {
			s.log.Warn("removing foreign file from the store", slog.String("path", dir))
			if err := s.fs.Remove(dir); err != nil {
				return err
			}
			continue
		}
		files, err := s.fs.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, f := range files {
			path := filepath.Join(dir, f.Name())
			sha, err := artifact.ParseDigest(f.Name())
			if err != nil || f.Name()[:2] != d.Name() {
				s.log.Warn("removing foreign file from the store", slog.String("path", path))
				if err := s.fs.RemoveAll(path); err != nil {
					return err
				}
				continue
			}
			if err := do(sha, path); err != nil {
				return err
			}
		}
	}
	return nil
}

// loadBlobs indexes committed files and drops those that no artifact uses (a
// removal or a resolve was interrupted) or whose length is wrong. Where a record
// was unreadable its files stay, nameless, as long as their room is not needed:
// naming them again then fetches nothing.
func (s *Store) loadBlobs(nameless bool) error {
	wanted := map[artifact.Digest]int64{}
	for _, r := range s.artifacts {
		for _, f := range r.m.Files {
			wanted[f.SHA256] = f.Size
		}
	}
	err := s.eachHex(s.path(blobsDir), func(sha artifact.Digest, path string) error {
		info, err := s.fs.Lstat(path)
		if err != nil {
			return err
		}
		size, used := wanted[sha]
		if !used && nameless {
			size = info.Size()
			s.orphans[sha] = true
		} else if !used {
			return s.fs.Remove(path)
		}
		if !info.Mode().IsRegular() || info.Size() != size {
			s.log.Error("removing damaged file from the store", slog.String("file", sha.String()),
				slog.Int64("size", info.Size()), slog.Int64("want", size))
			s.bad[sha] = true
			return s.fs.RemoveAll(path)
		}
		s.blobs[sha] = size
		s.checks[sha] = info.ModTime()
		if now := s.now(); now.Before(info.ModTime()) {
			s.checks[sha] = now
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.eachHex(s.path(chunksDir), func(sha artifact.Digest, path string) error {
		if _, used := wanted[sha]; used || s.orphans[sha] {
			return nil
		}
		return s.fs.Remove(path)
	})
}

// loadLanding indexes files that are still landing and clears leftovers. Lost
// are files of which it cleared what readers may have been given.
func (s *Store) loadLanding() (lost []artifact.Digest, err error) {
	wanted := map[artifact.Digest]int64{}
	for _, r := range s.artifacts {
		for _, f := range r.m.Files {
			wanted[f.SHA256] = f.Size
		}
	}
	entries, err := s.fs.ReadDir(s.path(landingDir))
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
	}
	for name := range names {
		hex, isPart := strings.CutSuffix(name, partSuffix)
		if !isPart {
			hex, _ = strings.CutSuffix(name, bitsSuffix)
		}
		sha, err := artifact.ParseDigest(hex)
		size, used := wanted[sha]
		_, committed := s.blobs[sha]
		if err == nil && used && !committed && names[hex+partSuffix] && names[hex+bitsSuffix] {
			// One whose allocation was lost has no room that is counted.
			if info, err := s.fs.Lstat(s.partPath(sha)); err == nil && info.Size() == size {
				s.partial[sha] = size
				continue
			}
		}
		// A part without a bitmap was given to nobody: the bitmap comes first.
		if err == nil && used && !committed && names[hex+bitsSuffix] {
			lost = append(lost, sha)
		}
		if err := s.fs.RemoveAll(s.path(landingDir, name)); err != nil {
			return nil, err
		}
	}
	return lost, nil
}

// Subscribe gives a signal of capacity 1 that something about an artifact may
// have changed, and the function that ends it.
func (s *Store) Subscribe() (changed <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	s.watchers[ch] = true
	s.mu.Unlock()
	return ch, func() {
		s.mu.Lock()
		delete(s.watchers, ch)
		s.mu.Unlock()
	}
}

func (s *Store) notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// openBlob opens a committed file for reading.
func (s *Store) openBlob(sha artifact.Digest) (durable.File, error) {
	s.mu.Lock()
	_, found := s.blobs[sha]
	s.mu.Unlock()
	if !found {
		return nil, fmt.Errorf("open file %s: %w", sha.Short(), ErrNotReady)
	}
	f, err := s.fs.OpenFile(s.blobPath(sha), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if err := s.lookLost(); err != nil {
			return nil, err
		}
		// It was removed just now, or by a stranger: then it is damage.
		if err := s.discard(sha); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("open file %s: %w", sha.Short(), ErrNotReady)
	}
	return f, err
}

// damageOf is how often a file was found damaged since Open: a reader that
// sees it change reads what is no longer trusted.
func (s *Store) damageOf(sha artifact.Digest) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.damage[sha]
}

func (s *Store) has(sha artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, found := s.blobs[sha]
	return found
}
