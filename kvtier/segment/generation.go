package segment

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/durable"
)

// A generation is a run of the log, or what is left of one after it gave a drive
// up. Every drive has a file that names the last one it took part in. A drive
// that missed one lacks tombstones, so its segments are not believed.

const (
	generationFile   = "generation"
	generationPrefix = "hearth segments "
	maxGeneration    = 1<<32 - 1
	maxGenerationLen = 128
)

// membership is the content of a generation's file.
type membership struct {
	// ready is the last generation of which the drive knows that all its drives
	// had noted it, joining the last that it noted itself; never a smaller one.
	ready, joining uint64
}

func (m membership) encode() []byte {
	line := fmt.Appendf(nil, "%s%d %d %d", generationPrefix, Version, m.ready, m.joining)
	return fmt.Appendf(line, " %016x\n", xxh3.Hash(line))
}

// decodeMembership reads a generation's file. Errors wrap ErrNewer or errFormat.
func decodeMembership(data []byte) (m membership, err error) {
	bad := fmt.Errorf("%w: no generation: %.60q", errFormat, data)
	line, hash, found := cutLast(bytes.TrimSuffix(data, []byte("\n")), ' ')
	sum, err := strconv.ParseUint(string(hash), 16, 64)
	if !found || err != nil || len(hash) != 16 || sum != xxh3.Hash(line) {
		return m, bad
	}
	rest, found := bytes.CutPrefix(line, []byte(generationPrefix))
	fields := bytes.Split(rest, []byte(" "))
	version, err := strconv.Atoi(string(fields[0]))
	if !found || err != nil || version < 1 {
		return m, bad
	}
	if version > Version {
		return m, fmt.Errorf("%w: generation of version %d, this code knows %d", ErrNewer, version, Version)
	}
	if len(fields) != 3 {
		return m, bad
	}
	m.ready, err = strconv.ParseUint(string(fields[1]), 10, 32)
	if err == nil {
		m.joining, err = strconv.ParseUint(string(fields[2]), 10, 32)
	}
	if err != nil || m.joining < m.ready || !bytes.Equal(bytes.TrimSuffix(data, []byte("\n")), bytes.TrimSuffix(m.encode(), []byte("\n"))) {
		return membership{}, bad
	}
	return m, nil
}

func cutLast(p []byte, sep byte) (before, after []byte, found bool) {
	i := bytes.LastIndexByte(p, sep)
	if i < 0 {
		return p, nil, false
	}
	return p[:i], p[i+1:], true
}

// readMembership reads a drive's generation; none where it has no readable one.
func readMembership(fsys durable.FS, dir string) (m membership, known bool, err error) {
	data, err := durable.ReadRegular(fsys, filepath.Join(dir, generationFile), maxGenerationLen)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, durable.ErrTooLong):
		return m, false, nil
	case err != nil:
		return m, false, err
	}
	m, err = decodeMembership(data)
	if errors.Is(err, errFormat) {
		return m, false, nil
	}
	return m, err == nil, err
}

func writeMembership(fsys durable.FS, dir string, m membership) error {
	return durable.WriteFile(fsys, filepath.Join(dir, generationFile), m.encode(), 0o600)
}

// currentOf says which drives took part in the newest generation that was ready:
// what they lack nobody has. It also gives the newest of all.
func currentOf(all []membership) (current []bool, newest uint64) {
	var ready uint64
	for _, m := range all {
		newest, ready = max(newest, m.joining), max(ready, m.ready)
	}
	current = make([]bool, len(all))
	for i, m := range all {
		current[i] = m.joining >= ready
	}
	return current, newest
}

// commit begins a generation with the drives that can note it, and none that
// cannot: those are out. Nothing is written meanwhile. In one generation all
// drives note that they join before the first notes that it is ready, so that no
// crash leaves one behind that lacks nothing.
func (l *Log) commit() error {
	for {
		members := l.members()
		if len(members) == 0 {
			return l.noDrive()
		}
		l.mu.Lock()
		if l.generation >= maxGeneration {
			l.mu.Unlock()
			return fmt.Errorf("%w: no generation after %d", ErrFull, uint64(maxGeneration))
		}
		l.generation++
		l.counter = 0
		generation := l.generation
		l.mu.Unlock()
		whole := true
		for _, ready := range []bool{false, true} {
			for _, d := range members {
				m := membership{ready: d.ready, joining: generation}
				if ready {
					m.ready = generation
				}
				if err := l.note(d, m); err != nil {
					l.giveUp(d, err)
					whole = false
					continue
				}
				d.ready = m.ready
			}
			if !whole {
				break
			}
		}
		if whole {
			return nil
		}
	}
}

// note writes a drive's generation. At a start a file system that is full has the
// drive give up what it can make anew: free segments, then the oldest.
func (l *Log) note(d *drive, m membership) error {
	for {
		err := d.there()
		if err == nil {
			err = writeMembership(l.fs, d.dir, m)
		}
		if !outOfRoom(err) || !l.starting {
			return err
		}
		list := d.list()
		slices.SortStableFunc(list, func(a, b *segment) int { return int(min(a.state, sealed)) - int(min(b.state, sealed)) })
		if len(list) == 0 {
			return err
		}
		l.log.Warn("a segment is removed, its file system is full", slog.String("path", list[0].path), slog.Any("error", err))
		if e := d.remove(context.Background(), list[0]); e != nil {
			return errors.Join(err, e)
		}
	}
}

// members are the drives that are not given up.
func (l *Log) members() (list []*drive) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.drives {
		if !d.out {
			list = append(list, d)
		}
	}
	return list
}

// noDrive says why there is none.
func (l *Log) noDrive() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := []error{ErrNoDrive}
	for _, d := range l.drives {
		errs = append(errs, d.why)
	}
	return errors.Join(errs...)
}
