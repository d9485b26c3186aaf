package safetensors

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

var classes = map[string]error{
	"header_too_small": ErrHeaderTooSmall, "header_too_large": ErrHeaderTooLarge, "header_beyond_file": ErrHeaderBeyond,
	"header_utf8": ErrHeaderUTF8, "header_json": ErrHeaderJSON, "tensor_size_mismatch": ErrTensorSize,
	"offset_not_contiguous": ErrNotContiguous, "file_size_mismatch": ErrFileSize, "size_overflow": ErrSizeOverflow,
	"subbyte_alignment": ErrSubByteAlign,
}

type fileCase struct {
	Name    string `json:"name"`
	Base64  string `json:"base64"`
	Verdict struct {
		Accept  bool     `json:"accept"`
		Class   string   `json:"class"`
		Tensors []string `json:"tensors"`
	} `json:"verdict"`
	Recipe *struct {
		Header  string `json:"header"`
		PadTo   int    `json:"pad_to"`
		PadByte string `json:"pad_byte"`
		DataHex string `json:"data_hex"`
	} `json:"recipe"`
}

func (c fileCase) bytes(t testing.TB) []byte {
	t.Helper()
	if c.Recipe == nil {
		data, err := base64.StdEncoding.DecodeString(c.Base64)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	tail, err := hex.DecodeString(c.Recipe.DataHex)
	if err != nil {
		t.Fatal(err)
	}
	data := binary.LittleEndian.AppendUint64(nil, uint64(c.Recipe.PadTo))
	data = append(data, c.Recipe.Header...)
	data = append(data, bytes.Repeat([]byte(c.Recipe.PadByte), c.Recipe.PadTo-len(c.Recipe.Header))...)
	return append(data, tail...)
}

func load[T any](t testing.TB, name string) []T {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Cases []T `json:"cases"`
	}
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	if len(all.Cases) == 0 {
		t.Fatalf("%s holds no case", name)
	}
	return all.Cases
}

func TestVerdictsAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	for _, c := range load[fileCase](t, "cases.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			data := c.bytes(t)
			h, err := ReadHeader(bytes.NewReader(data), int64(len(data)))
			if !c.Verdict.Accept {
				if want := classes[c.Verdict.Class]; want == nil || !errors.Is(err, want) {
					t.Fatalf("ReadHeader: %v, want class %s", err, c.Verdict.Class)
				}
				return
			}
			if err != nil {
				t.Fatalf("ReadHeader: %v, the library accepts", err)
			}
			if got := slices.Sorted(maps.Keys(h.Tensors)); !slices.Equal(got, slices.Sorted(slices.Values(c.Verdict.Tensors))) {
				t.Errorf("tensors %q, want %q", got, c.Verdict.Tensors)
			}
		})
	}
}

type indexCase struct {
	Name   string            `json:"name"`
	Files  map[string][]byte `json:"files"`
	Should string            `json:"cache_should"`
}

// judge is what the weight cache does with a checkpoint's files.
func judge(files map[string][]byte) error {
	headers := map[string]*Header{}
	for name, data := range files {
		if strings.HasSuffix(name, ".safetensors") {
			h, err := ReadHeader(bytes.NewReader(data), int64(len(data)))
			if err != nil {
				return err
			}
			headers[name] = h
		}
	}
	for name, data := range files {
		if !strings.HasSuffix(name, IndexSuffix) {
			continue
		}
		idx, err := ParseIndex(data)
		if err != nil {
			return err
		}
		if err := idx.CheckFiles(func(shard string) bool { return files[shard] != nil }); err != nil {
			return err
		}
		for _, shard := range idx.Shards {
			if err := idx.CheckShard(shard, headers[shard]); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestIgnoredValuesHaveTheLibrarysLimits(t *testing.T) {
	t.Parallel()
	nested := func(depth int) string { return strings.Repeat("[", depth) + strings.Repeat("]", depth) }
	for extra, accepted := range map[string]bool{
		nested(1): true, nested(125): true, nested(126): false, nested(10_000): false,
		"1e300": true, "-1e400": false, "1e-400": true, "18446744073709551616": true,
	} {
		header := `{"a":{"extra":` + extra + `,"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`
		file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
		file = append(append(file, header...), 0)
		_, err := ReadHeader(bytes.NewReader(file), int64(len(file)))
		if accepted != (err == nil) || err != nil && !errors.Is(err, ErrHeaderJSON) {
			t.Errorf("an ignored value %.40s gave %v, want it accepted: %t", extra, err, accepted)
		}
	}
}

func TestShardedCheckpointsAreJudgedBeforeTheyArePublished(t *testing.T) {
	t.Parallel()
	for _, c := range load[indexCase](t, "index_cases.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			err := judge(c.Files)
			if rejected := strings.HasPrefix(c.Should, "reject"); rejected != (err != nil) {
				t.Errorf("judged %v, want %q", err, c.Should)
			}
		})
	}
}

func TestIndexThatPlacesATensorInTheWrongShardIsRefused(t *testing.T) {
	t.Parallel()
	idx, err := ParseIndex([]byte(`{"weight_map":{"a":"x.safetensors","b":"x.safetensors"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := idx.CheckShard("x.safetensors", &Header{Tensors: map[string]Tensor{"a": {}}}); !errors.Is(err, ErrIndex) {
		t.Errorf("CheckShard: %v, want ErrIndex", err)
	}
}

func FuzzSafetensorsHeader(f *testing.F) {
	for _, c := range load[fileCase](f, "cases.json") {
		if c.Recipe == nil {
			f.Add(c.bytes(f))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := ReadHeader(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return
		}
		// What is accepted covers the file exactly.
		var total uint64
		for _, tensor := range h.Tensors {
			total += tensor.End - tensor.Begin
		}
		if uint64(h.DataOffset)+total != uint64(len(data)) {
			t.Errorf("header covers %d bytes of %d", uint64(h.DataOffset)+total, len(data))
		}
	})
}

func FuzzShardedIndex(f *testing.F) {
	for _, c := range load[indexCase](f, "index_cases.json") {
		for name, data := range c.Files {
			if strings.HasSuffix(name, IndexSuffix) {
				f.Add(data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		idx, err := ParseIndex(data)
		if err == nil && len(idx.Shards) == 0 {
			t.Error("an index without shards was accepted")
		}
	})
}
