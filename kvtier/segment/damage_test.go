package segment

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// damageWorld is a log with everything in it: sealed segments and one that is
// filled, blocks in and behind their header's page, keys that ended and keys that
// have other bytes now.
func damageWorld(t *testing.T, options func(*Options)) *caller {
	t.Helper()
	c := newCaller(options)
	if err := c.open(); err != nil {
		t.Fatal(err)
	}
	work := all(fill(0, 12, 0), endAll(1, 2), fill(3, 5, 1), sealAll, fill(12, 20, 0), endAll(4, 13), fill(5, 6, 1), sealAll, fill(20, 24, 0), endAll(0, 14, 21), fill(21, 22, 1), sealAll, fill(24, 25, 0), endAll(20, 22, 23))
	if err := work(c); err != nil {
		t.Fatal(err)
	}
	if tail := c.log.drives[0].open; tail == nil || len(tail.entries) < 4*entryBytes {
		t.Fatal("no segment with tombstones is filled")
	}
	return c
}

// places are bytes of a file worth being turned: all of its structure, and some of
// its payloads.
func places(t *testing.T, c *caller, path string, random *rand.Rand) (list []int64) {
	t.Helper()
	data := readAll(t, c, path)
	for page := 0; page < len(data)/PageSize; page++ {
		p := data[page*PageSize:][:PageSize]
		n := 0
		if page == 0 {
			n = headerBytes
		} else if r, err := decodeRecord(p); err == nil {
			n = recordBytes
			if r.kind == kindTombstones {
				n += int(r.length) * tombstoneBytes
			}
		}
		for at := range n {
			list = append(list, int64(page*PageSize+at))
		}
		for range 4 {
			list = append(list, int64(page*PageSize+random.IntN(PageSize)))
		}
	}
	if tr, err := decodeTrailer(data, int64(len(data))); err == nil {
		for at := range tr.entries * entryBytes {
			list = append(list, tr.offset+int64(at))
		}
	}
	for at := range trailerBytes {
		list = append(list, int64(len(data)-1-at))
	}
	return list
}

func readAll(t *testing.T, c *caller, path string) []byte {
	t.Helper()
	f, err := c.fs.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, smallSegment)
	if _, err := f.ReadAt(data, 0); err != nil {
		t.Fatal(err)
	}
	return data
}

func TestDamageOfAnyByteAfterACrashCostsOneBlockAtMostAndGivesNoOldValue(t *testing.T) {
	t.Parallel()
	step := 97
	switch {
	case everyCrash:
		step = 1
	case testing.Short():
		step = 997
	}
	for what, options := range map[string]func(*Options){"Plain": nil, "Encrypted": withAEAD(testAEAD(t))} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(3, 4))
			c := damageWorld(t, options)
			held := len(c.index)
			tried := 0
			lists := map[string][]int64{}
			for _, s := range c.log.Segments() {
				path := "/drive0/blocks/" + fileName(s.Number)
				lists[path] = places(t, c, path, random)
			}
			for path, list := range lists {
				for i := random.IntN(step); i < len(list); i += step {
					tried++
					fs := c.fs.CrashWith(durabletest.PageSector, durabletest.Everything)
					if err := fs.Corrupt(path, list[i]); err != nil {
						t.Fatal(err)
					}
					next := c.on(fs)
					if err := next.damagedBy(held - 1); err != nil {
						t.Errorf("%s, byte %d of page %d: %v", path, list[i]%PageSize, list[i]/PageSize, err)
					}
				}
			}
			t.Logf("%d bytes were turned", tried)
		})
	}
}

func TestNoOneDamagedPageBringsBackWhatEnded(t *testing.T) {
	t.Parallel()
	reused := newCaller(nil)
	must(t, reused.open(), fill(0, 90, 0)(reused), endAll(80, 84)(reused))
	sealedLast := newCaller(nil)
	must(t, sealedLast.open(), fill(0, 90, 0)(sealedLast), sealedLast.log.Close())
	const last = smallSegment/PageSize - 1
	noOneDamagedPage(t, damageWorld(t, nil), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
	for _, c := range []*caller{reused, sealedLast} {
		noOneDamagedPage(t, c, 0, 1, last)
	}
}

func noOneDamagedPage(t *testing.T, c *caller, pages ...int64) {
	t.Helper()
	held := len(c.index)
	for number := range c.log.drives[0].segments { // free ones as well
		path := "/drive0/blocks/" + fileName(number)
		for _, page := range pages {
			for _, at := range []int64{0, recordBytes + 50} { // header, and what of a tombstone says how far it goes
				fs := c.fs.CrashWith(durabletest.PageSector, durabletest.Everything)
				if err := fs.Corrupt(path, page*PageSize+at); err != nil {
					t.Fatal(err)
				}
				if err := c.on(fs).damagedBy(held - 1); err != nil {
					t.Errorf("%s, page %d, byte %d: %v", path, page, at, err)
				}
				c.fs.Revive()
			}
		}
	}
}

// damagedBy opens a damaged log and counts what it still gives.
func (c *caller) damagedBy(least int) error {
	clear(c.sure)
	for range 2 {
		if err := c.open(); err != nil {
			return err
		}
		c.found = 0
		if err := c.check(); err != nil {
			return err
		}
		if c.found < least {
			return fmt.Errorf("%d blocks are found, of %d", c.found, least+1)
		}
		if err := c.close(); err != nil {
			return err
		}
	}
	return nil
}

func TestDamageUnderAnOpenLogIsAMissAndNeverMoves(t *testing.T) {
	t.Parallel()
	for seed := range 10 {
		random := rand.New(rand.NewPCG(uint64(seed), 5))
		c := newCaller(nil)
		c.keep = func(Record) bool { return true }
		if err := errors.Join(c.open(), fill(0, 60, 0)(c)); err != nil {
			t.Fatal(err)
		}
		for range 60 {
			info := c.log.Segments()
			s := info[random.IntN(len(info))]
			if err := c.fs.Corrupt("/drive0/blocks/"+fileName(s.Number), PageSize+random.Int64N(smallSegment-PageSize)); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(fill(60, 120, 0)(c), c.check(), endAll(3, 7, 70)(c), c.restart(), c.check()); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if c.found == 0 {
			t.Errorf("seed %d: nothing is found", seed)
		}
	}
}

func TestASegmentThatCannotBeReadTakesWhatItsTombstonesWereAboutWithIt(t *testing.T) {
	t.Parallel()
	// The second of three segments ends keys of the first, and cannot be read.
	c := newCaller(nil)
	if err := all((*caller).open, fill(0, 4, 0), sealAll, endAll(1), fill(4, 6, 0), sealAll, fill(10, 13, 0), sealAll, (*caller).close)(c); err != nil {
		t.Fatal(err)
	}
	c.fs.FailReadWhen(func(op, path string) error {
		if op == "read" && filepath.Base(path) == "1.seg" {
			return errors.New("unreadable")
		}
		return nil
	})
	clear(c.sure)
	if err := c.open(); err != nil {
		t.Fatal(err)
	}
	if _, found := c.index[keyOf(1)]; found {
		t.Error("a key that ended is found where its tombstone cannot be read")
	}
	if err := errors.Join(c.close()); err != nil {
		t.Fatal(err)
	}
	c.fs.Heal()
	if err := errors.Join(c.open(), c.check(), c.close()); err != nil {
		t.Error(err)
	}
}

func TestAFileOfVersionOneIsRead(t *testing.T) {
	t.Parallel()
	path := filepath.Join("testdata", "segment_v1.gz")
	if *update {
		out, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		z := gzip.NewWriter(out)
		if _, err := z.Write(sampleSegment(t)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(z.Close(), out.Close()); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err := errors.Join(err, in.Close()); err != nil {
		t.Fatal(err)
	}
	c := newCaller(nil)
	if err := c.fs.MkdirAll("/drive0/blocks", 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := c.fs.OpenFile("/drive0/blocks/0.seg", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if i != 1 {
			v := valueOf(i, 0)
			c.may[keyOf(i)], c.sure[keyOf(i)] = v[:min(len(v), 5000)], true
		}
	}
	if err := errors.Join(c.open(), c.check()); err != nil {
		t.Error(err)
	}
	if c.found != 4 {
		t.Errorf("%d blocks are found, want 4", c.found)
	}
	report, err := Check(context.Background(), CheckOptions{FS: c.fs, Dir: "/drive0/blocks", Tenant: testTenant})
	if err != nil || report.Blocks != 5 || report.Tombstones != 1 || len(report.Damaged) > 0 {
		t.Errorf("the check gives %+v, %v", report, err)
	}
}
