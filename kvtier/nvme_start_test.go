package kvtier

import (
	"bytes"
	"errors"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

func TestATombstoneOlderThanTheCheckpointEndsNothingOfIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	ctx := t.Context()
	next := 100
	fill := func(until func() bool) {
		for ; !until(); next++ {
			mustPut(t, n, next, content(next, 0, 100_000))
			drain(t, n.tenant)
		}
	}
	segments := func() int { return len(n.tenant.drive.Segments()) }
	mustPut(t, n, 1, content(1, 0, 50_000))
	drain(t, n.tenant)
	if _, err := n.Delete(ctx, keyOf(1)); err != nil {
		t.Fatal(err)
	}
	fill(func() bool { return segments() > 2 })
	mustPut(t, n, 1, content(1, 1, 50_000))
	fill(func() bool { return segments() > 4 })
	n.tenant.checkpoint(ctx)
	// The segment of the tombstone is used again, and the tombstone goes on to one
	// that the checkpoint does not know.
	fill(func() bool { return n.tenant.drive.Stats().Reclaimed > 0 })
	closeCache(t, c)
	c = onDrive(t, dir)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	if !bytes.Equal(get(t, n, 1), content(1, 1, 50_000)) {
		t.Error("the block that was stored after its end is lost")
	}
}

func TestATenantThatIsGivenLessThanItsSegmentsNeedBeginsAnewAtAStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	whole := func(o *CacheOptions) { o.SegmentSize = 0 }
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 512 * units.MiB, AdmitAll: true}
	c := onDrive(t, dir, whole)
	n := addTenant(t, c, spec)
	mustPut(t, n, 1, content(1, 0, 50_000))
	drain(t, n.tenant)
	if size := n.tenant.drive.SegmentSize(); size != 64<<20 {
		t.Fatalf("segments have %d bytes", size)
	}
	spec.Kind, spec.NVMe = TenantCredential, 64*units.MiB
	if _, err := c.AddTenant(t.Context(), spec); !errors.Is(err, ErrInvalid) {
		t.Errorf("a room of one segment is taken while it runs: %v", err)
	}
	if get(t, n, 1) == nil {
		t.Error("a refusal costs a block")
	}
	closeCache(t, c)
	c = onDrive(t, dir, whole)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	if get(t, n, 1) != nil {
		t.Error("a block of before is found")
	}
	for i := 10; i < 1500; i++ {
		mustPut(t, n, i, content(i, 0, 100_000))
		drain(t, n.tenant)
	}
	if s := n.tenant.Stats(); s.NVMe.Used > 64*units.MiB || s.NVMe.Blocks < 300 || s.DroppedDrive > 0 {
		t.Errorf("it does not go on: %+v", s)
	}
	if !bytes.Equal(get(t, n, 1499), content(1499, 0, 100_000)) {
		t.Error("the last block is lost")
	}
}
