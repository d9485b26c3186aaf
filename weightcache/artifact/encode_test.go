package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// slowDigest is the digest as FORMAT.md words it.
func slowDigest(files []File) Digest {
	var lines []string
	for _, f := range files {
		lines = append(lines, fmt.Sprintf("%s %d %s\n", f.SHA256, f.Size, f.Path))
	}
	slices.Sort(lines)
	return sha256.Sum256([]byte(strings.Join(lines, "")))
}

// oddManifest has every field set and texts that JSON must escape.
func oddManifest(t *testing.T) *Manifest {
	t.Helper()
	l := &Listing{Ref: Ref{Scheme: SchemeDir, Name: "/models/<x> & \"y\""}, Source: "a\tb", Commit: "abcdef", Access: AccessGated}
	for i, path := range []string{
		"a", "a-b", "b/c.json", "b/c.json.d", "é/ü.safetensors", "line\u2028.txt", "q\"uote.bin", "tag<&>.bin", "z z",
	} {
		l.Files = append(l.Files, File{
			Path: path, Size: int64(i) * 1000, SHA256: Digest{byte(i + 1)}, GitSHA1: strings.Repeat("0f", 20), LFS: true, Validator: `W/"` + path + `"`,
		})
	}
	l.Files[2].GitSHA1, l.Files[2].LFS, l.Files[2].Validator = "", false, ""
	l.Files[1].SHA256, l.Files[1].Size = l.Files[0].SHA256, l.Files[0].Size
	m, err := NewManifest(l)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestAStoredManifestIsIndentedJSON(t *testing.T) {
	t.Parallel()
	m := oddManifest(t)
	// A field that the writer does not know would be missing.
	for _, v := range []reflect.Value{reflect.ValueOf(*m), reflect.ValueOf(m.Files[0])} {
		for i := range v.NumField() {
			if v.Field(i).IsZero() && v.Type().Field(i).Name != "Size" {
				t.Fatalf("the test sets no %s", v.Type().Field(i).Name)
			}
		}
	}
	open := *m
	open.Access = AccessUnknown
	for _, m := range []*Manifest{m, &open} {
		want, err := json.MarshalIndent(m, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, append(want, '\n')) {
			t.Errorf("stored:\n%s\nwant:\n%s", got, want)
		}
		back, err := DecodeManifest(got)
		if err != nil || !reflect.DeepEqual(back, m) {
			t.Errorf("read back: %v, %v", back, err)
		}
	}
}

func TestTheDigestIsThatOfTheSortedLines(t *testing.T) {
	t.Parallel()
	var files []File
	// Equal digests, sizes and beginnings leave the order to what follows.
	for _, path := range []string{"a", "a/b", "a-b", "a\tb", "a\nb", "ab", "b", ""} {
		for _, size := range []int64{0, 9, 10, 100} {
			for sha := range byte(3) {
				files = append(files, File{Path: path, Size: size, SHA256: Digest{31: sha}})
			}
		}
	}
	for range 50 {
		files = append(files[7:], files[:7]...)
		if got, want := ComputeDigest(files), slowDigest(files); got != want {
			t.Fatalf("digest %s, want %s", got, want)
		}
	}
	m := oddManifest(t)
	if want := slowDigest(m.Files); m.Digest != want {
		t.Errorf("digest of a manifest %s, want %s", m.Digest, want)
	}
}

func TestAFileBelowAFileIsFoundWhateverLiesBetween(t *testing.T) {
	t.Parallel()
	list := func(paths ...string) []File {
		slices.Sort(paths)
		var files []File
		for i, p := range paths {
			files = append(files, File{Path: p, SHA256: Digest{byte(i + 1)}, Kind: KindOf(p)})
		}
		return files
	}
	for _, paths := range [][]string{
		{"a", "a/b"}, {"a", "a-b", "a/b"}, {"a", "a-b", "a/b/c/d"}, {"x/a", "x/a b", "x/a/b"}, {"a/b", "a/b-c", "a/b/c", "a/bc"}, {"0", "a/b/c", "a/b/c/d", "z"},
	} {
		if err := CheckFiles(list(paths...), true); err == nil {
			t.Errorf("%q: no error", paths)
		}
	}
	for _, paths := range [][]string{
		{"a", "a-b", "a.b/c", "ab/c"}, {"a/b", "a/c", "ab"}, {"a/b/c", "a/bc", "a/b-c"}, {"x/y/z", "x/yy/z", "xx/y/z"},
	} {
		if err := CheckFiles(list(paths...), true); err != nil {
			t.Errorf("%q: %v", paths, err)
		}
	}
}
