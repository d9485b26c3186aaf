package kvtier

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

// A tenant whose record is lost begins anew, whatever its checkpoint says: what is
// ended then leaves no tombstone, since nothing of it is known, and what is stored
// may be in RAM alone.
func TestBlocksOfALostRecordStayLostWithACheckpoint(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(path string) error{
		"removed": os.Remove,
		"cut":     func(path string) error { return os.Truncate(path, 10) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
			if err := os.MkdirAll(filepath.Join(dir, quarantineDir), 0o700); err != nil {
				t.Fatal(err)
			}
			c := onDrive(t, dir)
			n := addTenant(t, c, spec)
			mustPut(t, n, 1, content(1, 0, 50_000))
			mustPut(t, n, 2, content(2, 0, 50_000))
			n.tenant.flush(t.Context())
			path := n.tenant.recordPath()
			closeCache(t, c)
			if err := damage(path); err != nil {
				t.Fatal(err)
			}
			c = onDrive(t, dir)
			n = addTenant(t, c, spec)
			if _, err := n.Delete(t.Context(), keyOf(1)); err != nil {
				t.Fatal(err)
			}
			mustPut(t, n, 2, content(2, 1, 50_000))
			closeCache(t, c) // as after a kill: nothing was written
			c = onDrive(t, dir)
			defer closeCache(t, c)
			n = addTenant(t, c, spec)
			for key := 1; key <= 2; key++ {
				if b, err := n.Get(t.Context(), keyOf(key)); !errors.Is(err, ErrMiss) {
					b.Release()
					t.Errorf("block %d came back from before its tenant's record was lost", key)
				}
			}
		})
	}
}

// Stores of one tenant on two nodes have segments of the same incarnations: the
// checkpoint of one, copied to the other, knows nothing of what was ended there.
func TestACheckpointOfAnotherStoreIsNotBelieved(t *testing.T) {
	t.Parallel()
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	fill := func(dir string, more int) (n *Namespace, c *Cache) {
		c = onDrive(t, dir)
		n = addTenant(t, c, spec)
		for i := range 3 {
			mustPut(t, n, i, content(i, 0, 50_000))
		}
		n.tenant.flush(t.Context())
		for i := range more {
			mustPut(t, n, 10+i, content(i, 0, 50_000))
		}
		n.tenant.flush(t.Context())
		return n, c
	}
	here, there := t.TempDir(), t.TempDir()
	other, c := fill(there, 20)
	theirs := other.tenant.checkpointPath()
	closeCache(t, c)
	n, c := fill(here, 0)
	if removed, err := n.Delete(t.Context(), keyOf(1)); removed != 1 || err != nil {
		t.Fatalf("%d blocks were deleted, %v", removed, err)
	}
	path := n.tenant.checkpointPath()
	closeCache(t, c)
	data, err := os.ReadFile(theirs)
	if err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	c = onDrive(t, here)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	if b, err := n.Get(t.Context(), keyOf(1)); !errors.Is(err, ErrMiss) {
		b.Release()
		t.Error("a deleted block came back with another store's checkpoint")
	}
	if !bytes.Equal(get(t, n, 2), content(2, 0, 50_000)) {
		t.Error("a block is lost with another store's checkpoint")
	}
}
