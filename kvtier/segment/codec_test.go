package segment

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares bytes with a file of hexadecimal lines.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	var text strings.Builder
	for chunk := range slices.Chunk(got, 32) {
		text.WriteString(hex.EncodeToString(chunk) + "\n")
	}
	path := filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text.String() != string(want) {
		t.Errorf("%s: the bytes are\n%swant\n%s", file, text.String(), want)
	}
}

func sampleHeader() header {
	return header{number: 7, tenant: [16]byte{1, 2, 3, 15: 16}, size: MinSize, incarnation: 5<<32 | 9, seq: 1234}
}

func sampleRecord() recordHeader {
	r := recordHeader{
		kind: kindBlock, flags: flagEncrypted, incarnation: 5<<32 | 9, seq: 4321, namespace: block.Namespace{0xa, 15: 0xb},
		key: block.Key{Hash: block.HashOf([]byte("key")), Group: 3}, length: 2 << 20, sum: xxh3.Hash128([]byte("bytes")).Bytes(),
	}
	r.nonce = nonceOf(r.incarnation, 77)
	return r
}

func sampleTombstones() []Tombstone {
	return []Tombstone{
		{Namespace: block.Namespace{1}, Key: block.Key{Hash: block.HashOf([]byte("a")), Group: 1}, Upto: 99},
		{Namespace: block.Namespace{2}, Key: block.Key{Hash: block.HashOf([]byte("b"))}, Upto: 1 << 40},
	}
}

func sampleEntries() []entry {
	list := []entry{entryOf(sampleRecord(), 1)}
	for _, t := range sampleTombstones() {
		list = append(list, tombstoneEntry(t, 600, 2))
	}
	return list
}

func TestTheBytesOfTheFormatAreThoseOfVersionOne(t *testing.T) {
	t.Parallel()
	page := bytes.Repeat([]byte{0xff}, PageSize)
	sampleHeader().encode(page)
	golden(t, "header_v1.hex", page[:headerBytes])
	if rest := page[headerBytes:]; !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("the rest of the header's page is not zero")
	}
	sampleRecord().encode(page)
	golden(t, "record_v1.hex", page[:recordBytes])
	encodeTombstones(page, 5<<32|9, 17, sampleTombstones())
	golden(t, "tombstones_v1.hex", page[:recordBytes+2*tombstoneBytes])
	entries := encoded(sampleEntries())
	footer := make([]byte, footerPages(3)*PageSize)
	encodeFooter(footer, entries, MinSize, 5<<32|9, 4400)
	golden(t, "footer_v1.hex", append(slices.Clone(entries), footer[len(footer)-trailerBytes:]...))
	golden(t, "generation_v1.hex", membership{ready: 41, joining: 42}.encode())
}

func TestWhatIsEncodedIsDecoded(t *testing.T) {
	t.Parallel()
	page := make([]byte, PageSize)
	sampleHeader().encode(page)
	if got, err := decodeHeader(page); err != nil || got != sampleHeader() {
		t.Errorf("header %+v, %v", got, err)
	}
	sampleRecord().encode(page)
	if got, err := decodeRecord(page); err != nil || got != sampleRecord() {
		t.Errorf("record %+v, %v", got, err)
	}
	encodeTombstones(page, 9, 17, sampleTombstones())
	r, err := decodeRecord(page)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := decodeTombstones(page, r); err != nil || !slices.Equal(got, sampleTombstones()) || r.seq != 17 || r.incarnation != 9 {
		t.Errorf("tombstones %+v in %+v, %v", got, r, err)
	}
	footer := make([]byte, footerPages(3)*PageSize)
	encodeFooter(footer, encoded(sampleEntries()), MinSize, 5, 4400)
	tr, err := decodeTrailer(footer, MinSize)
	if err != nil || tr.entries != 3 || tr.incarnation != 5 || tr.seq != 4400 || tr.offset != MinSize-PageSize {
		t.Fatalf("trailer %+v, %v", tr, err)
	}
	if got, err := entriesOf(footer[:3*entryBytes], tr.offset/PageSize); err != nil || !slices.Equal(got, sampleEntries()) {
		t.Errorf("entries %+v, %v", got, err)
	}
	m := membership{ready: 3, joining: 4}
	if got, err := decodeMembership(m.encode()); err != nil || got != m {
		t.Errorf("generation %+v, %v", got, err)
	}
}

func TestNoByteOfAHeaderCanBeOtherUnnoticed(t *testing.T) {
	t.Parallel()
	page := make([]byte, PageSize)
	for what, c := range map[string]struct {
		bytes  int
		encode func()
		decode func() error
	}{
		"header": {headerBytes, func() { sampleHeader().encode(page) }, func() error { _, err := decodeHeader(page); return err }},
		"record": {recordBytes, func() { sampleRecord().encode(page) }, func() error { _, err := decodeRecord(page); return err }},
		"tombstones": {recordBytes + 2*tombstoneBytes, func() { encodeTombstones(page, 9, 17, sampleTombstones()) }, func() error {
			r, err := decodeRecord(page)
			if err == nil {
				_, err = decodeTombstones(page, r)
			}
			return err
		}},
		"trailer": {trailerBytes, func() {
			encodeFooter(page, encoded(sampleEntries()), MinSize, 5, 4400)
			copy(page, page[PageSize-trailerBytes:])
		}, func() error { _, err := decodeTrailer(page[:trailerBytes], MinSize); return err }},
		"generation": {len(membership{ready: 3, joining: 4}.encode()) - 1, func() { copy(page, membership{ready: 3, joining: 4}.encode()) }, func() error {
			_, err := decodeMembership(page[:len(membership{ready: 3, joining: 4}.encode())])
			return err
		}},
	} {
		for at := range c.bytes {
			for bit := range 8 {
				c.encode()
				if err := c.decode(); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				page[at] ^= 1 << bit
				if err := c.decode(); !errors.Is(err, errFormat) {
					t.Errorf("%s: byte %d with bit %d turned gives %v", what, at, bit, err)
				}
			}
		}
	}
}

func TestANewerVersionIsToldFromADamagedOne(t *testing.T) {
	t.Parallel()
	page := make([]byte, PageSize)
	for what, change := range map[string]func(){
		"version": func() { page[8] = 2 },
		"magic":   func() { page[7] = '2' },
	} {
		sampleHeader().encode(page)
		change()
		if _, err := decodeHeader(page); !errors.Is(err, errFormat) {
			t.Errorf("%s without its checksum gives %v", what, err)
		}
		le.PutUint64(page[56:], xxh3.Hash(page[:56]))
		if _, err := decodeHeader(page); !errors.Is(err, ErrNewer) {
			t.Errorf("%s gives %v", what, err)
		}
	}
	line := []byte("hearth segments 2 whatever it says")
	data := append(append(slices.Clone(line), ' '), hex16(xxh3.Hash(line))...)
	if _, err := decodeMembership(data); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer generation gives %v", err)
	}
}

func binaryBig(v uint64) []byte {
	var p [8]byte
	for i := range p {
		p[i] = byte(v >> (56 - 8*i))
	}
	return p[:]
}

func TestALocNamesItsRecordAndTellsIncarnationsApart(t *testing.T) {
	t.Parallel()
	l := NewLoc(63, maxNumber, 65535, 77)
	if l.Drive() != 63 || l.Segment() != maxNumber || l.Page() != 65535 || l.mark() != mark(77) {
		t.Errorf("%d %d %d", l.Drive(), l.Segment(), l.Page())
	}
	seen := map[uint64]bool{}
	for generation := range uint64(50) {
		for n := range uint64(50) {
			seen[mark(generation<<32|n)] = true
		}
	}
	if len(seen) < 2490 {
		t.Errorf("of 2500 incarnations %d can be told apart", len(seen))
	}
}

func TestSegmentsAreAsLargeAsEightFitAndTheLargestBlockNeeds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		bytes   int64
		largest int
		want    int64
	}{
		{0, 1, 4 << 20},
		{32 << 20, 1 << 20, 4 << 20},
		{64<<20 - 1, 1 << 20, 4 << 20},
		{64 << 20, 1 << 20, 8 << 20},
		{1 << 40, 1 << 20, MaxSize},
		{64 << 20, 8 << 20, 16 << 20},
		{0, block.MaxSize, 128 << 20},
		{32 << 20, 4<<20 - 3*PageSize, 8 << 20},
		{32 << 20, 4<<20 - 4*PageSize, 4 << 20},
	} {
		if got := chooseSize(c.bytes, c.largest); got != c.want {
			t.Errorf("%d bytes with blocks of %d: segments of %d, want %d", c.bytes, c.largest, got, c.want)
		}
	}
}

func TestOnlyTheNamesOfSegmentsAreTakenForSegments(t *testing.T) {
	t.Parallel()
	for _, base := range []string{"x.seg", "-1.seg", "01.seg", "1.seg.tmp", ".seg", "1048576.seg", "+1.seg", "generation", "1"} {
		if n, ok := parseName(base); ok {
			t.Errorf("%q is taken for segment %d", base, n)
		}
	}
	for _, n := range []uint32{0, 1, 10, maxNumber} {
		if got, ok := parseName(fileName(n)); !ok || got != n {
			t.Errorf("segment %d is called %s and taken for %d", n, fileName(n), got)
		}
	}
}

func FuzzHeader(f *testing.F) {
	page := make([]byte, PageSize)
	sampleHeader().encode(page)
	f.Add(page[:headerBytes])
	f.Fuzz(func(t *testing.T, p []byte) {
		h, err := decodeHeader(p)
		if err != nil {
			return
		}
		h.encode(page)
		if !bytes.Equal(page[:headerBytes], p[:headerBytes]) {
			t.Errorf("%x is read as %+v and written as %x", p[:headerBytes], h, page[:headerBytes])
		}
	})
}

func FuzzRecord(f *testing.F) {
	page := make([]byte, PageSize)
	sampleRecord().encode(page)
	f.Add(slices.Clone(page))
	encodeTombstones(page, 9, 17, sampleTombstones())
	f.Add(slices.Clone(page))
	f.Fuzz(func(t *testing.T, p []byte) {
		// A checksum keeps the fuzzer from what it is to find.
		if len(p) >= recordBytes {
			le.PutUint64(p[120:], xxh3.Hash(p[:120]))
		}
		r, err := decodeRecord(p)
		if err != nil {
			return
		}
		r.encode(page)
		if !bytes.Equal(page[:recordBytes], p[:recordBytes]) {
			t.Errorf("%x is read as %+v and written as %x", p[:recordBytes], r, page[:recordBytes])
		}
		if n := pagesOf(r.kind, r.flags, r.length); n < 1 || n > 2+block.MaxSize/PageSize {
			t.Errorf("%+v has %d pages", r, n)
		}
		if list, err := decodeTombstones(p, r); err == nil && len(list) != int(r.length) {
			t.Errorf("%d tombstones of %d", len(list), r.length)
		}
	})
}

func FuzzFooter(f *testing.F) {
	footer := make([]byte, footerPages(3)*PageSize)
	encodeFooter(footer, encoded(sampleEntries()), MinSize, 5, 4400)
	f.Add(footer[:3*entryBytes], footer[PageSize-trailerBytes:])
	f.Fuzz(func(t *testing.T, entries, end []byte) {
		if len(end) >= trailerBytes {
			p := end[len(end)-trailerBytes:]
			le.PutUint64(p[56:], xxh3.Hash(p[:56]))
		}
		if tr, err := decodeTrailer(end, MinSize); err == nil && (tr.offset < PageSize || tr.offset >= MinSize || tr.entries < 0) {
			t.Errorf("%+v", tr)
		}
		list, err := entriesOf(entries, MinSize/PageSize)
		if err != nil {
			return
		}
		if got := encoded(list); !bytes.Equal(got, entries) {
			t.Errorf("%x is read as %+v and written as %x", entries, list, got)
		}
	})
}

func FuzzGeneration(f *testing.F) {
	f.Add(membership{ready: 3, joining: 4}.encode())
	f.Add([]byte("hearth segments 1 4294967295 4294967295 0000000000000000\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := decodeMembership(data)
		if err != nil {
			return
		}
		if got, err := decodeMembership(m.encode()); err != nil || got != m {
			t.Errorf("%q is %+v, then %+v, %v", data, m, got, err)
		}
	})
}

// FuzzSegment holds that no content of a file makes a reader of segments fail or
// find what is not in the file.
func FuzzSegment(f *testing.F) {
	f.Add(uint32(0), []byte("x"))
	f.Add(uint32(PageSize+8), []byte{1, 2, 3})
	f.Add(uint32(smallSegment-40), []byte{0xff})
	whole := sampleSegment(f)
	window := make([]byte, windowBytes)
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		file := slices.Clone(whole)
		copy(file[int(at)%len(file):], patch)
		r := reader{file: bytes.NewReader(file), tenant: testTenant, size: smallSegment, largest: 20, window: window}
		p, err := r.probe()
		if err != nil && !errors.Is(err, ErrNewer) || p.unreadable != nil {
			t.Fatal(err, p.unreadable)
		}
		c := r.load(p)
		if c.doubt != nil {
			t.Fatal(c.doubt)
		}
		for _, e := range c.entries {
			if int64(e.page)+pagesOf(e.kind, e.flags, e.length) > smallSegment/PageSize || e.page == 0 {
				t.Errorf("%+v does not lie in the segment", e)
			}
		}
	})
}

// sampleSegment is a sealed segment's file.
func sampleSegment(t testing.TB) []byte {
	t.Helper()
	c := newCaller(nil)
	if err := c.open(); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		v := valueOf(i, 0)
		if err := c.put(map[name][]byte{keyOf(i): v[:min(len(v), 5000)]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(c.end(keyOf(1)), c.close()); err != nil {
		t.Fatal(err)
	}
	data := make([]byte, smallSegment)
	file, err := c.fs.OpenFile("/drive0/blocks/0.seg", os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.ReadAt(data, 0); err != nil {
		t.Fatal(err)
	}
	return data
}

func hash64(p []byte) uint64 { return xxh3.Hash(p) }

func hex16(v uint64) string { return hex.EncodeToString(binaryBig(v)) }
