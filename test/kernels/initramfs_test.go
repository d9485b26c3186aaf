package kernels

import (
	"bytes"
	"slices"
	"strconv"
	"testing"
)

// entry is what a cpio archive says of one file.
type entry struct {
	name string
	mode uint64
	data string
}

// unpack reads an archive as the kernel does.
func unpack(t *testing.T, archive []byte) []entry {
	t.Helper()
	var entries []entry
	for len(archive) > 0 {
		if string(archive[:6]) != "070701" {
			t.Fatalf("no header: %q", archive[:6])
		}
		field := func(i int) uint64 {
			value, err := strconv.ParseUint(string(archive[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return value
		}
		aligned := func(n int) int { return (n + 3) / 4 * 4 }
		size, nameEnd := int(field(6)), 110+int(field(11))
		at := aligned(nameEnd)
		entries = append(entries, entry{string(archive[110 : nameEnd-1]), field(1), string(archive[at : at+size])})
		archive = archive[at+aligned(size):]
	}
	return entries
}

func TestAnArchiveHasEachFileAfterTheFoldersAboveIt(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	archive := NewArchive(&out)
	for name, data := range map[string]string{"/init": "odd", "/suites/bpf/suite.test": "four"} {
		if err := archive.File(name, 0o755, []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.File("/suites/bpf/testdata/a", 0o644, nil); err != nil {
		t.Fatal(err)
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	entries := unpack(t, out.Bytes())
	for _, want := range []entry{
		{"init", 0o100755, "odd"},
		{"suites", 0o040755, ""},
		{"suites/bpf", 0o040755, ""},
		{"suites/bpf/suite.test", 0o100755, "four"},
		{"suites/bpf/testdata", 0o040755, ""},
		{"suites/bpf/testdata/a", 0o100644, ""},
	} {
		if !slices.Contains(entries, want) {
			t.Errorf("no entry %v in %v", want, entries)
		}
	}
	if last := entries[len(entries)-1].name; len(entries) != 7 || last != "TRAILER!!!" {
		t.Errorf("%d entries, the last %s", len(entries), last)
	}
	before := func(above, below string) bool {
		at := func(name string) int { return slices.IndexFunc(entries, func(e entry) bool { return e.name == name }) }
		return at(above) < at(below)
	}
	if !before("suites", "suites/bpf") || !before("suites/bpf", "suites/bpf/suite.test") {
		t.Errorf("order %v", entries)
	}
}

func TestModulesComeAfterThoseThatTheyNeed(t *testing.T) {
	t.Parallel()
	files := map[string]string{"tls": "tls.ko", "sch_netem": "sch-netem.ko", "a": "a.ko", "b": "b.ko"}
	info := map[string]string{
		"tls.ko": "license=GPL\x00depends=a,built_in\x00", "a.ko": "depends=b\x00", "b.ko": "depends=\x00", "sch-netem.ko": "",
	}
	got, err := order(files, []string{"tls", "sch-netem", "a", "absent"}, func(file string) ([]string, error) {
		return needs([]byte(info[file])), nil
	})
	if want := []string{"b.ko", "a.ko", "tls.ko", "sch-netem.ko"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}
