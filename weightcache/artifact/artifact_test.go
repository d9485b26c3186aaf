package artifact

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

func digestOf(s string) Digest { return sha256.Sum256([]byte(s)) }

func TestDigestIsOverSortedLinesOfDigestSizeAndPath(t *testing.T) {
	t.Parallel()
	files := []File{
		{Path: "model.safetensors", Size: 5, SHA256: digestOf("aaaaa")},
		{Path: "config.json", Size: 2, SHA256: digestOf("{}")},
	}
	lines := []string{
		digestOf("aaaaa").String() + " 5 model.safetensors\n",
		digestOf("{}").String() + " 2 config.json\n",
	}
	if lines[0] > lines[1] {
		lines[0], lines[1] = lines[1], lines[0]
	}
	if got, want := ComputeDigest(files), digestOf(lines[0]+lines[1]); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
	files[0].Validator, files[0].LFS, files[0].GitSHA1 = "other", true, strings.Repeat("0", 40)
	if got, want := ComputeDigest(files), digestOf(lines[0]+lines[1]); got != want {
		t.Error("the digest depends on more than content")
	}
}

func sample(t testing.TB) *Manifest {
	t.Helper()
	ref, err := ParseRef("hub://acme/tiny@main")
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewManifest(&Listing{
		Ref: ref, Source: "origin", Commit: strings.Repeat("ab", 20), Access: AccessGated,
		Files: []File{
			{Path: "model.safetensors", Size: 20 << 20, SHA256: digestOf("weights"), LFS: true, GitSHA1: strings.Repeat("12", 20), Validator: `"etag"`},
			{Path: "config.json", Size: 2, SHA256: digestOf("{}"), GitSHA1: strings.Repeat("34", 20)},
			{Path: "LICENSE", Size: 7, SHA256: digestOf("licence")},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestManifestReadsAndWritesAsRecorded(t *testing.T) {
	t.Parallel()
	m := sample(t)
	data, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	golden, err := os.ReadFile("testdata/manifest_v2.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(data, golden) {
		t.Errorf("encoded manifest is\n%s\nwant\n%s", data, golden)
	}
	back, err := DecodeManifest(golden)
	if err != nil {
		t.Fatal(err)
	}
	if back.Digest != m.Digest || len(back.Files) != 3 || back.Files[0].Kind != Other || back.Files[2].Kind != Weights || back.Access != AccessGated {
		t.Errorf("decoded %+v", back)
	}
}

func TestManifestOfVersionOneIsReadAndItsAccessIsUnknown(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/manifest_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	m, err := DecodeManifest(golden)
	if err != nil {
		t.Fatal(err)
	}
	if m.Version != 1 || m.Digest != sample(t).Digest || m.Access != AccessUnknown {
		t.Errorf("decoded %+v", m)
	}
	if again, err := m.Encode(); err != nil || !bytes.Equal(again, golden) {
		t.Errorf("encoded again it is\n%s\n%v", again, err)
	}
	now, err := m.WithAccess(AccessGated).Encode()
	if want, _ := sample(t).Encode(); err != nil || !bytes.Equal(now, want) {
		t.Errorf("with access it is\n%s\n%v", now, err)
	}
}

func TestManifestDecoderIsStrict(t *testing.T) {
	t.Parallel()
	data, err := sample(t).Encode()
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for name, change := range map[string]string{
		"unknown field":  strings.Replace(text, `"version": 2`, `"version": 2, "more": 2`, 1),
		"version 0":      strings.Replace(text, `"version": 2`, `"version": 0`, 1),
		"access in 1":    strings.Replace(text, `"version": 2`, `"version": 1`, 1),
		"other access":   strings.Replace(text, `"gated"`, `"secret"`, 1),
		"other digest":   strings.Replace(text, sample(t).Digest.String(), digestOf("x").String(), 1),
		"other size":     strings.Replace(text, `"size": 7`, `"size": 8`, 1),
		"path leaves":    strings.Replace(text, `"LICENSE"`, `"../LICENSE"`, 1),
		"wrong kind":     strings.Replace(text, `"kind": "other"`, `"kind": "weights"`, 1),
		"trailing bytes": text + "{}",
		"upper-case hex": strings.Replace(text, `"commit": "ab`, `"commit": "AB`, 1),
		"no files":       `{"version":1}`,
		"not JSON":       "hello",
	} {
		if _, err := DecodeManifest([]byte(change)); !errors.Is(err, ErrInvalid) || errors.Is(err, ErrNewer) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	newer := strings.Replace(text, `"version": 2`, `"version": 3, "more": 3`, 1)
	if _, err := DecodeManifest([]byte(newer)); !errors.Is(err, ErrNewer) {
		t.Errorf("newer version: %v, want ErrNewer", err)
	}
}

func TestPathsThatLeaveOrConfuseAreRefused(t *testing.T) {
	t.Parallel()
	for _, p := range []string{
		"", ".", "..", "../a", "a/../b", "/a", "a//b", "a/", "./a", "a\x00b", "a\nb", `a\b`, "a/..",
		strings.Repeat("x", 256), strings.Repeat("x/", 600) + "x", "\xff",
	} {
		if err := ValidPath(p); !errors.Is(err, ErrInvalid) {
			t.Errorf("ValidPath(%q) = %v, want ErrInvalid", p, err)
		}
	}
	for _, p := range []string{"a", "a/b.json", "..a", "a..b", "é/ü", ".gitattributes", "a b"} {
		if err := ValidPath(p); err != nil {
			t.Errorf("ValidPath(%q) = %v", p, err)
		}
	}
}

func TestFileAndDirectoryOfOneNameAreRefused(t *testing.T) {
	t.Parallel()
	d := digestOf("x")
	files := []File{{Path: "a", SHA256: d}, {Path: "a.b", SHA256: d}, {Path: "a/b", SHA256: d}}
	if err := CheckFiles(files, true); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "both") {
		t.Errorf("CheckFiles: %v", err)
	}
	if err := CheckFiles(files[1:], true); err != nil {
		t.Errorf("CheckFiles: %v", err)
	}
	if err := CheckFiles(make([]File, MaxFiles+1), true); !errors.Is(err, ErrInvalid) {
		t.Errorf("CheckFiles of too many: %v", err)
	}
}

func TestKindsFollowWhatEnginesReadFirst(t *testing.T) {
	t.Parallel()
	for p, want := range map[string]Kind{
		"config.json": Metadata, "model.safetensors.index.json": Metadata, "tokenizer.model": Metadata,
		"chat_template.jinja": Metadata, "merges.txt": Metadata, "model-00001-of-00002.safetensors": Weights,
		"x.gguf": Weights, "pytorch_model.bin": Weights, "README.md": Other, "LICENSE": Other, "LICENSE.txt": Other,
		"sub/modeling_x.py": Metadata, "picture.png": Other, ".gitattributes": Other, "Q4/MODEL.GGUF": Weights,
	} {
		if got := KindOf(p); got != want {
			t.Errorf("KindOf(%q) = %s, want %s", p, got, want)
		}
	}
}

func TestChunksProveAFileInAnyOrderWithOneHashPass(t *testing.T) {
	t.Parallel()
	random := rand.NewChaCha8([32]byte{1})
	for _, size := range []int{0, 1, ChunkSize - 1, ChunkSize, ChunkSize + 1, 2*ChunkSize + 100} {
		data := make([]byte, size)
		_, _ = random.Read(data)
		c := NewChunker()
		for rest := data; len(rest) > 0; {
			n := min(len(rest), 1<<20+13)
			_, _ = c.Write(rest[:n])
			rest = rest[n:]
		}
		sum, chunks := c.Sum()
		if sum != sha256.Sum256(data) {
			t.Fatalf("size %d: wrong digest", size)
		}
		if len(chunks) != ChunkCount(int64(size)) || chunks[len(chunks)-1] != sum {
			t.Fatalf("size %d: %d chunks", size, len(chunks))
		}
		for i := range slices.Backward(chunks) {
			piece := bytes.Clone(data[i*ChunkSize : min(size, (i+1)*ChunkSize)])
			if err := CheckChunk(chunks, int64(size), i, piece); err != nil {
				t.Errorf("size %d chunk %d: %v", size, i, err)
			}
			if len(piece) > 0 {
				piece[len(piece)/2] ^= 1
				if err := CheckChunk(chunks, int64(size), i, piece); !errors.Is(err, ErrChunk) {
					t.Errorf("size %d chunk %d with a flipped bit: %v", size, i, err)
				}
			}
		}
	}
}

func TestRefsRoundTripAndHostileOnesAreRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"hub://acme/tiny": "hub://acme/tiny@main", "hub://gpt2@pr/1": "hub://gpt2@pr/1", "dir:///a/../b": "dir:///b",
	} {
		r, err := ParseRef(text)
		if err != nil || r.String() != want {
			t.Errorf("ParseRef(%q) = %s, %v; want %s", text, r, err, want)
		}
	}
	for _, text := range []string{
		"", "acme/tiny", "hub://", "hub://../x", "hub://a/b/c", "hub://a/b@../x", "hub://a/b@/x", "hub://a/b@", "hub://a--b/c",
		"dir://relative", "dir:///a\x00b", "s3://bucket/x", "hub://a/b@x.lock",
	} {
		if r, err := ParseRef(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseRef(%q) = %s, %v; want ErrInvalid", text, r, err)
		}
	}
}

func FuzzDecodeManifest(f *testing.F) {
	data, err := sample(f).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	if golden, err := os.ReadFile("testdata/manifest_v1.json"); err == nil {
		f.Add(golden)
	}
	if golden, err := os.ReadFile("testdata/manifest_v2.json"); err == nil {
		f.Add(golden)
	}
	f.Add([]byte(`{"version":3}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := DecodeManifest(data)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("error %v does not wrap ErrInvalid", err)
			}
			return
		}
		again, err := m.Encode()
		if err != nil {
			t.Fatalf("what was decoded does not encode: %v", err)
		}
		back, err := DecodeManifest(again)
		if err != nil || back.Digest != m.Digest {
			t.Errorf("round trip: %v", err)
		}
	})
}

func FuzzParseRef(f *testing.F) {
	for _, text := range []string{"hub://acme/tiny@main", "dir:///models/x", "hub://a/b@pr/1", "hub://..", "s3://x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRef(text)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("error %v does not wrap ErrInvalid", err)
			}
			return
		}
		again, err := ParseRef(r.String())
		if err != nil || again != r {
			t.Errorf("ParseRef(%q) does not round-trip: %v, %v", r.String(), again, err)
		}
		if strings.Contains(r.Revision, "..") && strings.Contains("/"+r.Revision+"/", "/../") {
			t.Errorf("revision %q leaves", r.Revision)
		}
	})
}
