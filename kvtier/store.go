package kvtier

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
)

// FormatVersion is the version of the layout on the drive, and of a record.
const FormatVersion = 1

// format marks a directory as a KV space.
var format = durable.Marker{
	Name: formatFile, Prefix: "hearth kvtier ", Version: FormatVersion, What: "KV space", Newer: ErrNewer, Beside: []string{lockFile},
}

// Names under the root.
const (
	formatFile      = "FORMAT"
	lockFile        = "lock"
	reservationsDir = "reservations"
	claimsDir       = "claims"
	trashDir        = "trash"
	quarantineDir   = "quarantine"
	recordSuffix    = ".json"
	maxRecordBytes  = 4 << 10
)

// Names are the entries that a space makes in its directory, all of them, for
// whoever removes one that nobody serves.
func Names() []string {
	return []string{formatFile, lockFile, reservationsDir, claimsDir, tenantsDir, blocksDir, wearFile, trashDir, quarantineDir}
}

// claimMode lets the container's user write, whichever it is. Nobody else gets
// that far: the directory above it is 0700, and only a bind mount made by the
// container runtime leads past that.
const claimMode = 0o777

// record is a reservation's file.
type record struct {
	Version   int    `json:"version"`
	Claim     string `json:"claim"`
	Namespace string `json:"namespace"`
	Memory    int64  `json:"memory"` // bytes
	NVMe      int64  `json:"nvme"`   // bytes
}

func (s *Space) path(elements ...string) string {
	return filepath.Join(append([]string{s.dir}, elements...)...)
}

func (s *Space) claimDir(claim string) string   { return s.path(claimsDir, claim) }
func (s *Space) recordPath(claim string) string { return s.path(reservationsDir, claim+recordSuffix) }

func notExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func (s *Space) open() error {
	if _, err := s.fs.Stat(s.dir); !s.made && s.budget.Memory == 0 && s.budget.NVMe == 0 && notExist(err) {
		return nil
	}
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
	for _, dir := range []string{s.dir, s.path(claimsDir)} {
		if err := durable.MkdirAllSynced(s.fs, dir, 0o700); err != nil {
			return err
		}
		if err := s.fs.Chmod(dir, 0o700); err != nil {
			return err
		}
	}
	for _, name := range []string{reservationsDir, trashDir, quarantineDir} {
		if err := durable.MkdirAllSynced(s.fs, s.path(name), 0o700); err != nil {
			return err
		}
	}
	for _, name := range bad {
		if err := s.quarantine(name); err != nil {
			return err
		}
	}
	if err := s.readDirs(); err != nil {
		return err
	}
	// A process that was killed may have left names that it never synced.
	for _, name := range []string{reservationsDir, claimsDir, trashDir} {
		if err := s.fs.SyncDir(s.path(name)); err != nil {
			return err
		}
	}
	return s.fs.SyncDir(s.dir)
}

// readRecords reads what is reserved and gives the names of what cannot be
// understood. A record of a newer version, or one that cannot be read now,
// stops the open before anything changes.
func (s *Space) readRecords() (bad []string, err error) {
	entries, err := s.fs.ReadDir(s.path(reservationsDir))
	if err != nil && !notExist(err) {
		return nil, err
	}
	for _, e := range entries {
		r, err := s.readRecord(e.Name())
		switch {
		case err == nil:
			s.held[r.Claim] = r
		case errors.Is(err, ErrNewer):
			return nil, err
		case errors.Is(err, ErrInvalid), errors.Is(err, durable.ErrTooLong), errors.Is(err, syscall.EIO), errors.Is(err, durable.ErrIrregular):
			bad = append(bad, e.Name())
		default:
			return nil, err
		}
	}
	return bad, nil
}

func (s *Space) readRecord(name string) (Reservation, error) {
	if durable.IsTemp(name) {
		return Reservation{}, ErrInvalid
	}
	data, err := durable.ReadRegular(s.fs, s.path(reservationsDir, name), maxRecordBytes)
	if err != nil {
		return Reservation{}, err
	}
	return decode(data, name)
}

// decode reads and checks the bytes of a record of that file name. Errors wrap
// ErrInvalid or ErrNewer.
func decode(data []byte, name string) (Reservation, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return Reservation{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if version.Version > FormatVersion {
		return Reservation{}, fmt.Errorf("%w: record %s is of version %d, this code knows %d", ErrNewer, name, version.Version, FormatVersion)
	}
	var r record
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		return Reservation{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	held := Reservation{Claim: r.Claim, Namespace: r.Namespace, Memory: units.Bytes(r.Memory), NVMe: units.Bytes(r.NVMe)}
	if err := held.check(); err != nil {
		return Reservation{}, err
	}
	if r.Version != FormatVersion || r.Claim+recordSuffix != name {
		return Reservation{}, fmt.Errorf("%w: file %s is of claim %.140q", ErrInvalid, name, r.Claim)
	}
	return held, nil
}

// quarantine moves a record aside for people; an interrupted write goes.
func (s *Space) quarantine(name string) error {
	from := s.path(reservationsDir, name)
	if durable.IsTemp(name) {
		return s.fs.RemoveAll(from)
	}
	s.log.Error("reservation is unreadable, moving it to quarantine", slog.String("path", from))
	s.bad = append(s.bad, name)
	if err := s.fs.Rename(from, s.path(quarantineDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+name)); err != nil {
		return err
	}
	return errors.Join(s.fs.SyncDir(s.path(quarantineDir)), s.fs.SyncDir(s.path(reservationsDir)))
}

// readDirs makes directory and record agree: a record without a directory gets
// one, and a directory without a record is held without sizes until somebody
// says what it is.
func (s *Space) readDirs() error {
	entries, err := s.fs.ReadDir(s.path(claimsDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch _, found := s.held[e.Name()]; {
		case found:
		case !e.IsDir() || checkClaim(e.Name()) != nil:
			s.log.Warn("removing foreign file from the KV space", slog.String("path", s.claimDir(e.Name())))
			if err := s.moveAway(e.Name()); err != nil {
				return err
			}
		default:
			s.held[e.Name()] = Reservation{Claim: e.Name()}
		}
	}
	for claim := range s.held {
		if err := s.makeDir(claim); err != nil {
			return err
		}
	}
	return nil
}

// makeDir makes the directory of a claim where there is none.
func (s *Space) makeDir(claim string) error {
	if _, err := s.fs.Lstat(s.claimDir(claim)); !notExist(err) {
		return err
	}
	if err := s.fs.Mkdir(s.claimDir(claim), claimMode); err != nil {
		return err
	}
	// The umask may have narrowed it.
	if err := s.fs.Chmod(s.claimDir(claim), claimMode); err != nil {
		return errors.Join(err, s.fs.Remove(s.claimDir(claim)))
	}
	return s.fs.SyncDir(s.path(claimsDir))
}

// record makes a reservation durable, then its directory: without the record
// nobody would know whose it is.
func (s *Space) record(r Reservation) error {
	data, err := encode(r)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(s.fs, s.recordPath(r.Claim), data, 0o600); err != nil {
		return err
	}
	return s.makeDir(r.Claim)
}

func encode(r Reservation) ([]byte, error) {
	data, err := json.Marshal(record{Version: FormatVersion, Claim: r.Claim, Namespace: r.Namespace, Memory: int64(r.Memory), NVMe: int64(r.NVMe)})
	return append(data, '\n'), err
}

// discard takes a claim's directory and then its record away, durably.
func (s *Space) discard(claim string) error {
	if err := s.moveAway(claim); err != nil {
		return err
	}
	if err := s.fs.Remove(s.recordPath(claim)); err != nil && !notExist(err) {
		return err
	}
	return s.fs.SyncDir(s.path(reservationsDir))
}

// moveAway puts what has a name among the claims into the trash.
func (s *Space) moveAway(name string) error {
	s.trash++
	to := s.path(trashDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+strconv.Itoa(s.trash))
	if err := s.fs.Rename(s.claimDir(name), to); err != nil && !notExist(err) {
		return err
	}
	return errors.Join(s.fs.SyncDir(s.path(trashDir)), s.fs.SyncDir(s.path(claimsDir)))
}

// sweep removes what is in the trash.
func (s *Space) sweep(ctx context.Context) error {
	if s.lock == nil {
		return nil
	}
	return sweepTrash(ctx, s.fs, s.dir)
}
