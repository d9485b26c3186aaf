package kvtier

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// stored gives a world in which one key of the first namespace is on a drive as
// version 1.
func stored(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, 1)
	if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 1, 50_000), PutOptions{}); err != nil {
		t.Fatal(err)
	}
	w.write(t.Context())
	if s := w.tenant().Stats(); s.NVMe.Blocks != 1 {
		t.Fatalf("%d blocks are on the drives", s.NVMe.Blocks)
	}
	return w
}

// reborn kills the process and gives the bytes of the key then.
func (w *world) reborn() []byte {
	w.t.Helper()
	w.kill()
	w.fs.Revive()
	w.open()
	w.t.Cleanup(func() { _ = w.cache.Close() })
	return get(w.t, w.spaces[0], 3)
}

// failSegments makes what is written to segments fail.
func (w *world) failSegments(err error) {
	w.fs.FailWhen(func(op, path string) error {
		if filepath.Ext(path) == ".seg" || op == "open" || op == "rename" {
			return err
		}
		return nil
	})
}

func TestAPutAfterADeleteThatFailedIsNeverOverwrittenByTheOldBytes(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(n *Namespace) error{
		"delete": func(n *Namespace) error {
			_, err := n.Delete(t.Context(), keyOf(3))
			return err
		},
		"overwrite": func(n *Namespace) error {
			return put(t.Context(), n, keyOf(3), content(3, 2, 50_000), PutOptions{})
		},
		"delete by somebody who goes away": func(n *Namespace) error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := n.Delete(ctx, keyOf(3))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := stored(t)
			w.t = t
			w.failSegments(syscall.EIO)
			if err := end(w.spaces[0]); err == nil {
				t.Fatal("a key is said to have ended that has not")
			}
			if got := get(t, w.spaces[0], 3); got != nil {
				t.Fatal("the old bytes are found")
			}
			if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 3, 50_000), PutOptions{}); err == nil {
				t.Fatal("other bytes are shown while the old ones would come back")
			}
			w.fs.Heal()
			if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 4, 50_000), PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := w.reborn(); got != nil && !bytes.Equal(got, content(3, 4, 50_000)) {
				t.Error("after a kill there are bytes that others took the place of")
			}
		})
	}
}

func TestWhatCouldNotBeEndedIsEndedByTheWriterLater(t *testing.T) {
	t.Parallel()
	w := stored(t)
	w.failSegments(syscall.EIO)
	if _, err := w.spaces[0].Delete(t.Context(), keyOf(3)); err == nil {
		t.Fatal("a key is said to have ended that has not")
	}
	if _, err := w.tenant().writeSome(t.Context()); err == nil {
		t.Error("the writer does not say that keys could not be ended")
	}
	w.fs.Heal()
	w.write(t.Context())
	if got := w.reborn(); got != nil {
		t.Error("the block comes back")
	}
}

func TestADeleteAgainEndsWhatTheOneBeforeCouldNot(t *testing.T) {
	t.Parallel()
	w := stored(t)
	w.failSegments(syscall.EIO)
	for range 2 {
		if _, err := w.spaces[0].Delete(t.Context(), keyOf(3)); err == nil {
			t.Fatal("a key is said to have ended that has not")
		}
	}
	w.fs.Heal()
	if _, err := w.spaces[0].Delete(t.Context(), keyOf(3)); err != nil {
		t.Fatal(err)
	}
	if got := w.reborn(); got != nil {
		t.Error("the block comes back")
	}
}

func TestABlockThatCouldNotBeReadOnceNeverComesBackOverOthers(t *testing.T) {
	t.Parallel()
	w := stored(t)
	tenant := w.tenant()
	tenant.mu.Lock()
	tenant.evictLocked()
	tenant.mu.Unlock()
	w.fs.FailReadWhen(func(op, _ string) error {
		if op == "read" {
			return syscall.EIO
		}
		return nil
	})
	if got := get(t, w.spaces[0], 3); got != nil {
		t.Fatal("bytes come from a drive that gives none")
	}
	w.fs.Heal()
	if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 2, 50_000), PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := w.reborn(); got != nil && !bytes.Equal(got, content(3, 2, 50_000)) {
		t.Error("the bytes of before came back over others")
	}
}

func TestARecordOfAnotherLengthIsDamaged(t *testing.T) {
	t.Parallel()
	w := stored(t)
	tenant := w.tenant()
	tenant.mu.Lock()
	tenant.evictLocked()
	id := tenant.index.Find(w.spaces[0].print(keyOf(3)))
	loc := tenant.index.Loc(id)
	tenant.index.SetLoc(id, 0)
	tenant.index.SetSize(id, 50_001)
	tenant.index.SetLoc(id, loc)
	tenant.mu.Unlock()
	if got := get(t, w.spaces[0], 3); got != nil {
		t.Errorf("%d bytes are given out of a block of 50000", len(got))
	}
	if s := tenant.Stats(); s.NVMe.Damaged != 1 {
		t.Errorf("%d blocks are damaged", s.NVMe.Damaged)
	}
}

// TestNobodyIsToldOfAKeyBeforeItsOldBytesAreVoid holds the drive in the middle of
// an end, and looks at who goes on meanwhile.
func TestNobodyIsToldOfAKeyBeforeItsOldBytesAreVoid(t *testing.T) {
	t.Parallel()
	second := map[string]func(ctx context.Context, n *Namespace) error{
		"put": func(ctx context.Context, n *Namespace) error {
			return put(ctx, n, keyOf(3), content(3, 2, 50_000), PutOptions{})
		},
		"delete": func(ctx context.Context, n *Namespace) error {
			_, err := n.Delete(ctx, keyOf(3), keyOf(3), keyOf(4))
			return err
		},
	}
	first := map[string]func(ctx context.Context, n *Namespace) error{
		"put": func(ctx context.Context, n *Namespace) error {
			return put(ctx, n, keyOf(3), content(3, 9, 50_000), PutOptions{})
		},
		"delete": func(ctx context.Context, n *Namespace) error {
			_, err := n.Delete(ctx, keyOf(4), keyOf(3))
			return err
		},
	}
	for name, begin := range first {
		for beside, then := range second {
			t.Run(beside+" beside "+name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := stored(t)
					go1, done := make(chan struct{}), [2]atomic.Bool{}
					w.fs.FailWhen(func(op, path string) error {
						if op == "datasync" && filepath.Ext(path) == ".seg" {
							<-go1
						}
						return nil
					})
					errs := make(chan error, 2)
					go func() { err := begin(t.Context(), w.spaces[0]); done[0].Store(true); errs <- err }()
					synctest.Wait()
					go func() { err := then(t.Context(), w.spaces[0]); done[1].Store(true); errs <- err }()
					synctest.Wait()
					if done[0].Load() || done[1].Load() {
						t.Errorf("done before the old bytes are void: the first %t, the other %t", done[0].Load(), done[1].Load())
					}
					if _, found := w.spaces[0].Lookup(keyOf(3)); found {
						t.Error("the key is found meanwhile")
					}
					close(go1)
					if err := errors.Join(<-errs, <-errs); err != nil {
						t.Error(err)
					}
					w.fs.Heal()
					if err := w.cache.Close(); err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

func TestAnotherBatchLeavesAloneWhatIsBeingWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	t.Cleanup(func() { _ = w.cache.Close() })
	mustPut(t, w.spaces[0], 3, content(3, 1, 50_000))
	tenant := w.tenant()
	batch, writes, _ := tenant.take()
	if len(batch) != 1 {
		t.Fatalf("%d blocks are taken", len(batch))
	}
	if _, found := w.spaces[0].Lookup(keyOf(3)); !found { // queues it again
		t.Fatal("the block is not found")
	}
	if again, _, _ := tenant.take(); len(again) != 0 {
		t.Fatalf("%d blocks are taken twice", len(again))
	}
	tenant.written(batch, writes, nil, segment.ErrFull)
	if s := tenant.Stats(); s.DroppedDrive != 1 || s.Waiting != 0 {
		t.Errorf("%d drops are counted, %d bytes wait", s.DroppedDrive, s.Waiting)
	}
}

func TestAStartThatFailedLeavesNothingToTheNext(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		fs := durabletest.New()
		if err := durable.MkdirAllSynced(fs, "/kv", 0o700); err != nil {
			t.Fatal(err)
		}
		w := &world{t: t, fs: fs, last: [2]map[int]int{{}, {}}}
		w.open()
		for key := range 20 {
			mustPut(t, w.spaces[0], key, content(key, 1, 50_000))
		}
		w.write(t.Context())
		w.kill()
		fs.Revive()
		transit := units.Bytes(0)
		c, err := OpenCache(CacheOptions{Dir: "/kv", Drives: []string{"/drive"}, Memory: 2 * units.MiB, Transit: &transit, VerifyEvery: 1, SegmentSize: 4 << 20, FS: fs})
		if err != nil {
			t.Fatal(err)
		}
		fs.FailReadAt(fs.Reads()+n, syscall.EIO)
		before := fs.Reads() + n
		spec := TenantSpec{Kind: TenantCredential, Name: "model", Memory: 2 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
		tenant, err := c.AddTenant(t.Context(), spec)
		reached := fs.Reads() >= before
		if err != nil {
			found, unknown := c.Tenant(TenantCredential, "model")
			if unknown != nil {
				t.Fatal(unknown)
			}
			if s := found.Stats(); s.Total != 0 {
				t.Errorf("read %d: a tenant that did not start has %d blocks", n, s.Total)
			}
			if tenant, err = c.AddTenant(t.Context(), spec); err != nil {
				t.Fatalf("read %d: the next start fails: %v", n, err)
			}
		}
		space, err := tenant.Namespace(t.Context(), w.identity("a"))
		if err != nil {
			t.Fatal(err)
		}
		for key := range 20 {
			if got := get(t, space, key); got != nil && !bytes.Equal(got, content(key, 1, 50_000)) {
				t.Errorf("read %d: block %d has other bytes", n, key)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if !reached || t.Failed() {
			return
		}
	}
}

func TestATenantThatCouldNotBeClearedStoresNothingUntilItIs(t *testing.T) {
	t.Parallel()
	w := stored(t)
	w.fs.FailWhen(func(op, _ string) error {
		if op == "rename" {
			return syscall.EIO
		}
		return nil
	})
	if _, err := w.tenant().Clear(t.Context()); err == nil {
		t.Fatal("a tenant is said to be cleared that is not")
	}
	if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 2, 100), PutOptions{}); !errors.Is(err, ErrDropped) {
		t.Errorf("a put beside what may come back: %v", err)
	}
	if _, err := w.spaces[0].Delete(t.Context(), keyOf(3)); err == nil {
		t.Error("a key is said to be deleted that may come back")
	}
	w.fs.Heal()
	if _, err := w.tenant().Clear(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 3, 100), PutOptions{}); err != nil {
		t.Error(err)
	}
	if got := w.reborn(); got != nil && !bytes.Equal(got, content(3, 3, 100)) {
		t.Error("what was cleared came back")
	}
}

func TestOtherBytesWaitForTheWriterThatHasTheOnesBefore(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(ctx context.Context, n *Namespace) error{
		"put": func(ctx context.Context, n *Namespace) error {
			return put(ctx, n, keyOf(3), content(3, 2, 50_000), PutOptions{})
		},
		"delete": func(ctx context.Context, n *Namespace) error {
			_, err := n.Delete(ctx, keyOf(3))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1)
				mustPut(t, w.spaces[0], 3, content(3, 1, 50_000))
				tenant := w.tenant()
				batch, writes, drive := tenant.take()
				var done atomic.Bool
				ended := make(chan error, 1)
				go func() { err := then(t.Context(), w.spaces[0]); done.Store(true); ended <- err }()
				synctest.Wait()
				if done.Load() {
					t.Error("done while the old bytes are on their way to the drive")
				}
				locs, err := drive.Append(t.Context(), writes)
				tenant.written(batch, writes, locs, err)
				if err := errors.Join(err, <-ended); err != nil {
					t.Fatal(err)
				}
				w.kill()
				w.fs.Revive()
				w.open()
				if got := get(t, w.spaces[0], 3); bytes.Equal(got, content(3, 1, 50_000)) {
					t.Error("the old bytes came back")
				}
				if err := w.cache.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestWhatIsOnTheDrivesTwiceIsEndedBeforeAnythingIsGivenUp has a start find a key
// at two places, of which one goes later.
func TestWhatIsOnTheDrivesTwiceIsEndedBeforeAnythingIsGivenUp(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(w *world) error{
		"write": func(w *world) error {
			err := put(t.Context(), w.spaces[0], keyOf(5), content(5, 1, 100), PutOptions{})
			w.write(t.Context())
			return err
		},
		"delete": func(w *world) error {
			if err := put(t.Context(), w.spaces[0], keyOf(5), content(5, 1, 100), PutOptions{}); err != nil {
				return err
			}
			tenant := w.tenant()
			tenant.mu.Lock()
			tenant.endLocked(w.spaces[0].print(keyOf(6)), w.spaces[0].id, keyOf(6)) // of a key that is on the drive
			tenant.mu.Unlock()
			return tenant.void(t.Context(), []index.Print{w.spaces[0].print(keyOf(6))})
		},
		"checkpoint": func(w *world) error {
			w.tenant().checkpoint(t.Context())
			return nil
		},
		"other budget": func(w *world) error {
			_, err := w.cache.AddTenant(t.Context(), TenantSpec{
				Kind: TenantCredential, Name: "model", Memory: 2 * units.MiB, NVMe: 32 * units.MiB, AdmitAll: true,
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := stored(t)
			w.t = t
			tenant := w.tenant()
			older := recordOf(t, w.spaces[0], 3)
			tenant.mu.Lock()
			tenant.twice = []segment.Tombstone{{Namespace: older.Namespace, Key: older.Key, Upto: older.Seq}}
			tenant.mu.Unlock()
			if err := first(w); err != nil {
				t.Fatal(err)
			}
			tenant.mu.Lock()
			left := len(tenant.twice)
			tenant.evictLocked()
			tenant.evictLocked()
			tenant.mu.Unlock()
			if left != 0 {
				t.Errorf("%d keys are still to be ended at one of two places", left)
			}
			tenant.dropped(older) // the index knew of the other one, which went
			if err := put(t.Context(), w.spaces[0], keyOf(3), content(3, 2, 100), PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := w.reborn(); got != nil && !bytes.Equal(got, content(3, 2, 100)) {
				t.Error("the older one came back over other bytes")
			}
		})
	}
}
