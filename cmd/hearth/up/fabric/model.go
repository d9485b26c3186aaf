package fabric

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// modelVersion is part of the name of a generated model, so that a change of
// the generator makes new ones.
const modelVersion = 1

// GeneratedModel returns a directory that holds a generated model, making it
// at first use and keeping it in the user's cache directory (or temp, where
// there is none), one per size and seed. Two callers at once wait for each
// other.
func GeneratedModel(ctx context.Context, size units.Bytes, seed uint64) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	cache = filepath.Join(cache, "hearth", "models")
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", fmt.Errorf("make model cache: %w", err)
	}
	name := fmt.Sprintf("v%d-%d-%d", modelVersion, size, seed)
	lock, err := waitLock(ctx, filepath.Join(cache, name+".lock"))
	if err != nil {
		return "", fmt.Errorf("lock model cache: %w", err)
	}
	defer func() { _ = lock.Close() }()
	dir := filepath.Join(cache, name)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	fresh := dir + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return "", fmt.Errorf("clear unfinished model: %w", err)
	}
	if err := hub.WriteModel(fresh, hub.ModelOptions{Size: size, Shards: 4, Seed: seed}); err != nil {
		return "", fmt.Errorf("generate model: %w", err)
	}
	if err := publish(fresh, dir); err != nil {
		return "", fmt.Errorf("publish generated model: %w", err)
	}
	return dir, nil
}

// publish makes the files of a flat directory durable and gives it its name: a
// model that is found is whole.
func publish(fresh, dir string) error {
	entries, err := os.ReadDir(fresh)
	if err != nil {
		return err
	}
	for _, e := range entries {
		f, err := os.Open(filepath.Join(fresh, e.Name()))
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return errors.Join(durable.OS.SyncDir(fresh), durable.OS.Rename(fresh, dir), durable.OS.SyncDir(filepath.Dir(dir)))
}

// waitLock takes a lock, waiting while another process has it.
func waitLock(ctx context.Context, path string) (io.Closer, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		lock, err := durable.Lock(path)
		if !errors.Is(err, durable.ErrLocked) {
			return lock, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// placeRepo makes a repository of the files of a flat directory, by hard links
// where both are on one file system, else by copies.
func placeRepo(from, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		old, fresh := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		if err := os.Link(old, fresh); err == nil {
			continue
		}
		if err := copyFile(old, fresh); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	_, err = io.Copy(out, in)
	return err
}
