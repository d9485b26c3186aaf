package kvtier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// world is a cache on a file system that can crash, and what it may answer.
type world struct {
	t      *testing.T
	random *rand.Rand
	fs     *durabletest.FS
	cache  *Cache
	spaces []*Namespace
	// last is the version that was stored last of each key of each namespace; 0 is
	// none.
	last [2]map[int]int
	next int // version
	ops  []string
}

const modelKeys = 60

func (w *world) size(key int) int { return []int{28, 3000, 4096, 70_000, 300_000}[key%5] + key }

func (w *world) open() {
	transit := units.Bytes(0)
	c, err := OpenCache(CacheOptions{
		Dir: "/kv", Drives: []string{"/drive"}, Memory: 2 * units.MiB, Transit: &transit, VerifyEvery: 1, SegmentSize: 4 << 20, FS: w.fs,
		Log: slog.New(slog.DiscardHandler), Wear: WearOptions{WritesPerDay: 1, Capacity: 1 << 50},
	})
	if err != nil {
		w.fatal("open: %v", err)
	}
	w.cache = c
	w.spaces = nil
	for _, format := range []string{"a", "b"} {
		tenant, err := c.AddTenant(w.t.Context(), TenantSpec{Kind: TenantCredential, Name: "model", Memory: 2 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
		if err != nil {
			w.fatal("add tenant: %v", err)
		}
		n, err := tenant.Namespace(w.t.Context(), w.identity(format))
		if err != nil {
			w.fatal("namespace: %v", err)
		}
		w.spaces = append(w.spaces, n)
	}
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	for _, op := range w.ops[max(0, len(w.ops)-40):] {
		w.t.Log(op)
	}
	w.t.Fatalf(format, args...)
}

func (w *world) note(format string, args ...any) { w.ops = append(w.ops, fmt.Sprintf(format, args...)) }

func (w *world) tenant() *Tenant { return w.spaces[0].tenant }

// write lets the writer work as it does in Run.
func (w *world) write(ctx context.Context) {
	for {
		more, err := w.tenant().writeSome(ctx)
		if err != nil && !errors.Is(err, durabletest.ErrCrashed) {
			w.fatal("write: %v", err)
		}
		if !more || err != nil {
			return
		}
	}
}

// check compares one key with the model; a miss is always right.
func (w *world) check(space, key int) (found bool) {
	b, err := w.spaces[space].Get(w.t.Context(), keyOf(key))
	if err != nil {
		if !errors.Is(err, ErrMiss) {
			w.fatal("get %d of %d: %v", key, space, err)
		}
		return false
	}
	defer b.Release()
	version := w.last[space][key]
	if version == 0 {
		w.fatal("key %d of %d is found and was never stored, or deleted", key, space)
	}
	if !bytes.Equal(b.Bytes(), content(key, version, w.size(key))) {
		w.fatal("key %d of %d does not have the bytes of version %d", key, space, version)
	}
	return true
}

func (w *world) step() {
	ctx := w.t.Context()
	space, key := w.random.IntN(2), w.random.IntN(modelKeys)
	switch n := w.random.IntN(100); {
	case n < 35:
		version := w.last[space][key]
		if version == 0 || w.random.IntN(3) == 0 {
			w.next++
			version = w.next
		}
		opts := PutOptions{Parent: keyOf(key - 1), HasParent: key > 0}
		w.note("put %d/%d version %d", space, key, version)
		// Even where it is dropped, what was there before may not come back.
		err := put(ctx, w.spaces[space], keyOf(key), content(key, version, w.size(key)), opts)
		switch {
		case errors.Is(err, ErrDropped):
		case err != nil:
			w.fatal("put: %v", err)
		default:
			w.last[space][key] = version
		}
	case n < 42:
		w.note("delete %d/%d", space, key)
		if _, err := w.spaces[space].Delete(ctx, keyOf(key)); err != nil {
			w.fatal("delete: %v", err)
		}
		w.last[space][key] = 0
	case n < 45:
		w.note("checkpoint")
		w.tenant().checkpoint(ctx)
	case n < 60:
		w.note("write")
		w.write(ctx)
	case n < 62:
		w.note("restart")
		w.tenant().flush(ctx)
		if err := w.cache.Close(); err != nil {
			w.fatal("close: %v", err)
		}
		w.open()
	case n < 64:
		w.note("kill")
		w.kill()
		w.fs.Revive()
		w.open()
	case n < 66:
		w.note("power cut")
		w.kill()
		w.fs = w.fs.Crash(w.random)
		w.open()
	default:
		w.note("get %d/%d", space, key)
		w.check(space, key)
	}
}

// kill ends the process: nothing it does now reaches the drive.
func (w *world) kill() {
	w.fs.CrashAt(w.fs.Changes()+1, false)
	_ = w.cache.Close()
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, random: rand.New(rand.NewPCG(seed, 77)), fs: durabletest.New(), last: [2]map[int]int{{}, {}}}
	if err := durable.MkdirAllSynced(w.fs, "/kv", 0o700); err != nil {
		t.Fatal(err)
	}
	w.open()
	return w
}

// TestWhatIsFoundIsWhatWasStoredLast runs random operations with restarts, kills
// and power cuts against a map.
func TestWhatIsFoundIsWhatWasStoredLast(t *testing.T) {
	t.Parallel()
	seeds := uint64(6)
	if testing.Short() {
		seeds = 2
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, seed)
			for range 600 {
				w.step()
			}
			if err := w.cache.Close(); err != nil {
				w.fatal("close: %v", err)
			}
		})
	}
}

func TestBlocksThatWereWrittenAreThereAfterAKill(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	for key := range modelKeys {
		w.next++
		w.last[0][key] = w.next
		if err := put(t.Context(), w.spaces[0], keyOf(key), content(key, w.next, w.size(key)), PutOptions{}); err != nil {
			t.Fatal(err)
		}
		w.write(t.Context())
	}
	w.kill()
	w.fs.Revive()
	w.open()
	for key := range modelKeys {
		if !w.check(0, key) {
			t.Errorf("block %d was written and is lost", key)
		}
	}
	if err := w.cache.Close(); err != nil {
		t.Fatal(err)
	}
}

func (w *world) identity(format string) block.Identity { return block.Identity{Format: format} }
