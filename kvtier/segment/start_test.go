package segment

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

func TestANewerFileIsRefusedAndNothingIsTouched(t *testing.T) {
	t.Parallel()
	for what, plant := range map[string]func(c *caller) error{
		"segment": func(c *caller) error {
			f, err := c.fs.OpenFile("/drive1/blocks/0.seg", os.O_RDWR, 0)
			if err != nil {
				return err
			}
			p := make([]byte, PageSize)
			header{number: 0, tenant: testTenant, size: smallSegment, incarnation: 9}.encode(p)
			p[8] = 2
			le.PutUint64(p[56:], hash64(p[:56]))
			_, err = f.WriteAt(p, 0)
			return err
		},
		"generation": func(c *caller) error {
			line := []byte("hearth segments 2 x")
			data := append(append(line, ' '), []byte(hex16(hash64(line)))...)
			return durable.WriteFile(c.fs, "/drive1/blocks/generation", data, 0o600)
		},
	} {
		c := opened(t, withDrives(2))
		must(t, fill(0, 60, 0)(c))
		c.fs.Revive()
		must(t, plant(c))
		must(t, durable.WriteFile(c.fs, "/drive0/blocks/.tmp-1-1-x", nil, 0o600))
		changes := c.fs.Changes()
		if err := c.open(); !errors.Is(err, ErrNewer) {
			t.Errorf("a newer %s gives %v", what, err)
		}
		if n := c.fs.Changes() - changes; n != 0 {
			t.Errorf("a newer %s: %d changes", what, n)
		}
	}
}

func TestBlocksOfNamespacesThatAreUnknownAreDroppedForGood(t *testing.T) {
	t.Parallel()
	only := byte(255)
	c := newCaller(func(o *Options) {
		o.Namespaces = func(n block.Namespace) bool { return only == 255 || n[1] == only }
	})
	must(t, c.open(), fill(0, 30, 0)(c), c.close())
	only = 1
	must(t, c.open())
	for k := range c.index {
		if k.namespace[1] != 1 {
			t.Errorf("%v of another namespace is found", k.key)
		}
	}
	if len(c.index) != 10 {
		t.Errorf("%d blocks are found, want 10", len(c.index))
	}
	must(t, c.check(), c.close())
	only = 255
	must(t, c.open())
	if len(c.index) != 10 {
		t.Errorf("%d blocks are found once all namespaces are known, want 10", len(c.index))
	}
}

func TestBlocksOfAnotherKeyOrNoneAreNotFound(t *testing.T) {
	t.Parallel()
	aead := testAEAD(t)
	for _, change := range []struct{ from, to func(*Options) }{{nil, withAEAD(aead)}, {withAEAD(aead), nil}} {
		c := opened(t, change.from)
		must(t, fill(0, 20, 0)(c), c.close())
		c.options = change.to
		must(t, c.open())
		if len(c.index) != 0 {
			t.Errorf("%d blocks are found", len(c.index))
		}
		must(t, fill(0, 20, 0)(c), c.restart(), c.check())
		if c.found != 20 {
			t.Errorf("%d blocks are found, want 20", c.found)
		}
	}
}

func TestEncryptedBlocksAreNotOnTheDrive(t *testing.T) {
	t.Parallel()
	c := opened(t, withAEAD(testAEAD(t)))
	secret := bytes.Repeat([]byte("a secret "), 1000)
	must(t, c.put(map[name][]byte{keyOf(1): secret, keyOf(2): secret[:90]}), c.close())
	if data := readAll(t, c, "/drive0/blocks/0.seg"); bytes.Contains(data, secret[:18]) {
		t.Error("the drive has a block's bytes")
	}
	report, err := Check(c.context(), CheckOptions{FS: c.fs, Dir: "/drive0/blocks", Tenant: testTenant})
	if err != nil || report.Unopened != 2 || len(report.Damaged) != 0 {
		t.Errorf("a check without the key gives %+v, %v", report, err)
	}
	report, err = Check(c.context(), CheckOptions{FS: c.fs, Dir: "/drive0/blocks", Tenant: testTenant, AEAD: testAEAD(t)})
	if err != nil || report.Unopened != 0 || report.Blocks != 2 || len(report.Damaged) != 0 {
		t.Errorf("a check with the key gives %+v, %v", report, err)
	}
}

func TestWhatACheckpointCoversIsNotReadAndWhatCameAfterIsTold(t *testing.T) {
	t.Parallel()
	for _, drives := range []int{1, 2} {
		covered := map[uint64]bool{}
		var ended []Tombstone
		c := newCaller(func(o *Options) {
			withDrives(drives)(o)
			o.Covered = func(_, _ uint32, incarnation uint64) bool { return covered[incarnation] }
			o.Ended = func(t Tombstone) { ended = append(ended, t) }
		})
		must(t, c.open(), fill(0, 30, 0)(c), endAll(3)(c), c.seal())
		checkpoint := maps.Clone(c.index)
		for _, s := range c.log.Segments() {
			covered[s.Incarnation] = s.Sealed
		}
		must(t, endAll(5)(c), fill(40, 43, 0)(c), c.close())
		ended = nil
		reads := c.fs.Reads()
		must(t, c.open())
		t.Logf("%d reads", c.fs.Reads()-reads)
		if len(c.index) != 3 {
			t.Errorf("%d drives: told of %d blocks, want the 3 that no checkpoint covers", drives, len(c.index))
		}
		if len(ended) == 0 || slices.ContainsFunc(ended, func(e Tombstone) bool { return e.Key != keyOf(5).key }) {
			t.Errorf("%d drives: told of %d tombstones, want those after the checkpoint", drives, len(ended))
		}
		delete(checkpoint, keyOf(5))
		maps.Copy(c.index, checkpoint)
		c.found = 0
		must(t, c.check())
		if c.found != 31 {
			t.Errorf("%d drives: %d blocks are read, want 31", drives, c.found)
		}
		before := c.log.LastSeq()
		must(t, c.log.Close())
		for _, s := range c.log.Segments() {
			covered[s.Incarnation] = true
		}
		must(t, c.open())
		if c.log.LastSeq() < before {
			t.Errorf("with all covered, sequence numbers go on after %d, they were at %d", c.log.LastSeq(), before)
		}
	}
}

func TestASmallerBudgetHoldsAtOnceAndAfterARestart(t *testing.T) {
	t.Parallel()
	c := opened(t, withDrives(2))
	must(t, fill(0, 110, 0)(c), c.check())
	must(t, c.log.SetBytes(c.context(), 5*smallSegment), c.check())
	if n := c.log.Bytes(); n > 5*smallSegment {
		t.Errorf("%d bytes are there", n)
	}
	must(t, fill(110, 160, 0)(c), c.check())
	if n := c.log.Bytes(); n > 5*smallSegment || n < 4*smallSegment {
		t.Errorf("%d bytes are there", n)
	}
	must(t, c.close())
	c.options = func(o *Options) { withDrives(2)(o); o.Bytes = 2*smallSegment + 5 }
	must(t, c.open(), c.check())
	if n := c.log.Bytes(); n > 2*smallSegment {
		t.Errorf("%d bytes are there", n)
	}
	for i := range 20 {
		must(t, fill(160+i, 161+i, 0)(c))
	}
	must(t, c.log.SetBytes(c.context(), 0), c.check())
	if n := c.log.Bytes(); n != 0 || len(c.index) != 0 {
		t.Errorf("without a budget %d bytes and %d blocks are there", n, len(c.index))
	}
	if err := fill(180, 181, 0)(c); !errors.Is(err, ErrNoDrive) {
		t.Errorf("without a budget: %v", err)
	}
}

func TestFilesOfOthersStayAndRestsOfOursGo(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 10, 0)(c), c.close())
	for path, data := range map[string]string{
		"photo.jpg": "x", ".tmp-1-2-3": "x", "5.seg": "", "6.seg": "short", "07.seg": "x",
	} {
		must(t, durable.WriteFile(c.fs, "/drive0/blocks/"+path, []byte(data), 0o600))
	}
	must(t, c.open())
	c.found = 0
	must(t, c.check())
	if c.found != 10 {
		t.Errorf("%d blocks are found", c.found)
	}
	for path, want := range map[string]bool{"photo.jpg": true, ".tmp-1-2-3": false, "5.seg": false, "6.seg": false, "07.seg": true} {
		if _, err := c.fs.Stat("/drive0/blocks/" + path); (err == nil) != want || err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestASegmentOfAnotherTenantIsFree(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 10, 0)(c), c.close())
	c.options = func(o *Options) { o.Tenant = [16]byte{'o', 't', 'h', 'e', 'r'} }
	must(t, c.open())
	if len(c.index) != 0 || len(c.log.Segments()) != 0 {
		t.Errorf("%d blocks of another tenant are found", len(c.index))
	}
}

func TestBlocksAreToldInTheOrderInWhichTheyWereWritten(t *testing.T) {
	t.Parallel()
	var told []uint64
	c := newCaller(func(o *Options) {
		withDrives(3)(o)
		o.cached = 20 // the other footers are read twice
		inner := o.Recovered
		o.Recovered = func(r Record) { told = append(told, r.Seq); inner(r) }
	})
	must(t, c.open(), fill(0, 90, 0)(c), c.close(), c.open(), c.check())
	if len(told) < 80 || !slices.IsSorted(told) {
		t.Errorf("told of %d blocks in the order %v", len(told), told)
	}
	used := map[uint32]bool{}
	for _, loc := range c.index {
		used[loc.Drive()] = true
	}
	if len(used) != 3 {
		t.Errorf("%d of 3 drives are used", len(used))
	}
}

func TestSegmentsAreFilledInTheOrderOfTheirIncarnations(t *testing.T) {
	t.Parallel()
	var told []uint64
	c := newCaller(func(o *Options) {
		inner := o.Recovered
		o.Recovered = func(r Record) { told = append(told, r.Seq); inner(r) }
	})
	c.keep = func(Record) bool { return false }
	must(t, c.open(), fill(0, 60, 0)(c))
	// Two are free, and of these the second in order was ended first.
	for i := 60; c.log.Segments()[0].Number != 7; i++ {
		must(t, fill(i, i+1, 0)(c))
	}
	must(t, c.log.enter(c.context()))
	for range 2 {
		must(t, c.log.reclaim(c.context(), c.log.drives[0], false, 0))
	}
	give(c.log.appends)
	must(t, fill(200, 216, 0)(c), c.restart(), c.check())
	if !slices.IsSorted(told) {
		t.Errorf("told in the order %v", told)
	}
}

// A segment that another tenant's was put in the place of may have held the
// tombstones of what older ones have: nothing of the drive is believed then.
func TestASegmentInWhosePlaceIsAnothersTakesItsTombstonesAlong(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(h *header){
		"another tenant": func(h *header) { h.tenant[0]++ },
		"another number": func(h *header) { h.number++ },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := opened(t, nil)
			must(t, fill(0, 10, 0)(c), c.seal(), endAll(1)(c), c.seal())
			list := c.log.Segments()
			newest := slices.MaxFunc(list, func(a, b Info) int { return cmp.Compare(a.Incarnation, b.Incarnation) })
			must(t, c.close())
			path := fmt.Sprintf("/drive0/blocks/%d.seg", newest.Number)
			data := readAll(t, c, path)
			h, err := decodeHeader(data)
			must(t, err)
			change(&h)
			h.encode(data)
			must(t, durable.WriteFile(c.fs, path, data, 0o600))
			must(t, c.open())
			if c.index[keyOf(1)] != 0 {
				t.Error("a block that was deleted came back")
			}
			must(t, c.reads())
		})
	}
}
