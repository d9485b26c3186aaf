package weightcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// ErrLost says that the store's directory was taken away under the process that owns it.
// What the store knows is of files that are gone; only a new Open makes it
// anew.
var ErrLost = errors.New("the directory of the weight store was removed")

// lostEvery is how often Run looks whether the store is still there.
const lostEvery = 10 * time.Second

// lookLost gives ErrLost once the store's version file is gone, which nothing
// of the store ever removes.
func (s *Store) lookLost() error {
	select {
	case <-s.lost:
	default:
		if _, err := s.fs.Lstat(s.path(formatFile)); !notExist(err) {
			return nil
		}
		s.lose.Do(func() {
			s.log.Error("the directory of the weight store was removed, nothing is served from it", slog.String("dir", s.dir))
			close(s.lost)
		})
	}
	return fmt.Errorf("%w: %s", ErrLost, s.dir)
}

// gone replaces an error that follows from the loss of the whole store.
func (s *Store) gone(err error) error {
	if err == nil || !notExist(err) {
		return err
	}
	if lost := s.lookLost(); lost != nil {
		return lost
	}
	return err
}

// watchLost waits for ctx, or for the loss of the store, which it then tells.
func (s *Store) watchLost(ctx context.Context) error {
	tick := time.NewTicker(lostEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.lost:
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := s.lookLost(); err != nil {
			return err
		}
	}
}

// writable tries whether the drive takes writes. Of one that is full it says
// nothing: that is what eviction mends.
func (s *Store) writable() error {
	probe := durable.TempName(s.path(landingDir, "probe"))
	f, err := s.fs.OpenFile(probe, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(f.Close(), s.removeIfThere(probe))
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return nil
	}
	return s.gone(err)
}
