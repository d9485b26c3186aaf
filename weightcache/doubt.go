package weightcache

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	// doubtFor is how long a client may hold the beginning of a file and come
	// back for the rest.
	doubtFor = time.Hour
	// maxDoubts bounds the files in doubt; past it the oldest is forgotten.
	maxDoubts = 1024

	doubtsFile     = "doubts"
	doubtsVersion  = 1
	maxDoubtsBytes = 1 << 20
)

// doubtsRecord is the file with the doubts; FORMAT.md has it.
type doubtsRecord struct {
	Version int                  `json:"version"`
	Boot    string               `json:"boot"` // of the kernel in which the store was open; empty: unknown
	Files   map[string]time.Time `json:"files"`
}

// doubt notes that bytes of files may have been given out which turned out
// wrong, or which no digest will ever prove. It is called before they go, so
// that a process that is killed amid it leaves either the bytes or the doubt.
func (s *Store) doubt(files ...artifact.Digest) {
	if len(files) == 0 {
		return
	}
	s.mu.Lock()
	for _, sha := range files {
		s.doubtLocked(sha)
	}
	s.mu.Unlock()
	s.keepDoubts()
}

func (s *Store) doubtLocked(sha artifact.Digest) {
	now := s.now()
	maps.DeleteFunc(s.doubts, func(_ artifact.Digest, at time.Time) bool { return now.Sub(at) >= doubtFor })
	if len(s.doubts) >= maxDoubts {
		var oldest artifact.Digest
		for file, at := range s.doubts {
			if first, found := s.doubts[oldest]; !found || at.Before(first) {
				oldest = file
			}
		}
		delete(s.doubts, oldest)
	}
	s.doubts[sha] = now
}

// Doubtful reports whether somebody who was given bytes of a file within the
// last hour may hold others than those it has: the rest alone would complete a
// wrong file. What an earlier process gave out and this one still has is not in
// doubt.
func (s *Store) Doubtful(sha artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, found := s.doubts[sha]
	return found && s.now().Sub(at) < doubtFor
}

// keepDoubts writes the doubts, for the next process. A drive that does not take
// them takes no new bytes either.
func (s *Store) keepDoubts() {
	s.keepingDoubts <- struct{}{}
	defer func() { <-s.keepingDoubts }()
	record := doubtsRecord{Version: doubtsVersion, Boot: s.bootText(), Files: map[string]time.Time{}}
	s.mu.Lock()
	now := s.now()
	for sha, at := range s.doubts {
		// By the clock as it is set now, which the next process goes by.
		record.Files[sha.String()] = now.Add(-now.Sub(at)).UTC()
	}
	s.mu.Unlock()
	data, err := json.Marshal(record)
	if err == nil {
		err = durable.WriteFile(s.fs, s.path(doubtsFile), append(data, '\n'), 0o600)
	}
	if err != nil {
		s.log.Warn("cannot keep which files are in doubt: a restart within the hour forgets some", slog.Any("error", err))
	}
}

// bootText is the boot's id as the file has it, empty where it is unknown.
func (s *Store) bootText() string {
	if s.boot == [bootBytes]byte{} {
		return ""
	}
	return hex.EncodeToString(s.boot[:])
}

// loadDoubts takes over the doubts of the process before, and adds those of
// this start: lost are files of which it lost what was unfinished. Where the
// last process ran in another boot, or nobody knows, what it gave out of any
// unfinished file may be lost. It is called before the store is shared.
func (s *Store) loadDoubts(lost []artifact.Digest) {
	record, err := s.readDoubts()
	if err != nil && !notExist(err) {
		s.log.Error("cannot read which files are in doubt: all that are unfinished count as such", slog.Any("error", err))
		// A folder in its place would keep every later doubt off the drive.
		if err := s.quarantine(s.path(doubtsFile)); err != nil {
			s.log.Error("cannot put aside which files are in doubt", slog.Any("error", err))
		}
	}
	now := s.now()
	for file, at := range record.Files {
		sha, err := artifact.ParseDigest(file)
		if err != nil || now.Sub(at) >= doubtFor {
			continue
		}
		// A clock that went back counts anew from here. One that is set while this
		// process runs changes nothing: what follows from now has its monotonic time.
		s.doubts[sha] = now.Add(-max(0, now.Sub(at)))
	}
	if record.Boot == "" || record.Boot != s.bootText() {
		for _, r := range s.artifacts {
			for _, f := range s.missingLocked(r.m) {
				if f.Size > minSegment { // of others nothing is given out unproven
					lost = append(lost, f.SHA256)
				}
			}
		}
	}
	for _, sha := range lost {
		if len(s.doubts) >= maxDoubts {
			break
		}
		s.doubts[sha] = now
	}
	if record.Boot != s.bootText() || len(lost) > 0 {
		s.keepDoubts()
	}
}

func (s *Store) readDoubts() (record doubtsRecord, err error) {
	data, err := durable.ReadFile(s.fs, s.path(doubtsFile), maxDoubtsBytes)
	if err != nil {
		return record, err
	}
	if err := json.Unmarshal(data, &record); err != nil {
		return doubtsRecord{}, fmt.Errorf("decode %s: %w", s.path(doubtsFile), err)
	}
	if record.Version != doubtsVersion {
		return doubtsRecord{}, fmt.Errorf("decode %s: version %d, want %d", s.path(doubtsFile), record.Version, doubtsVersion)
	}
	return record, nil
}

// Doubtful is Store.Doubtful.
func (p *Puller) Doubtful(sha artifact.Digest) bool { return p.store.Doubtful(sha) }
