//go:build outside

package outside

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/weightcache/safetensors"
)

// mutants is how many damaged files the library is asked about.
const mutants = 3000

// The installed library is the oracle: for each recorded case, and for files
// damaged at random, our reader accepts what the library loads and refuses
// what it refuses, and both see the same tensors.
func TestFastSafetensorsVerdictsAreTheLibrarys(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	dir := filepath.Join(r.Dir, "files")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	recorded := recordedCases(t, r)
	seeds := [][]byte{}
	for _, name := range slices.Sorted(maps.Keys(recorded)) {
		file := recorded[name]
		writeFile(t, filepath.Join(dir, "recorded-"+name), string(file))
		if _, err := safetensors.ReadHeader(bytes.NewReader(file), int64(len(file))); err == nil && len(file) < 4096 {
			seeds = append(seeds, file)
		}
	}
	if len(recorded) < 50 || len(seeds) < 10 {
		t.Fatalf("%d recorded cases, %d of them small and good: the list was not read", len(recorded), len(seeds))
	}
	rng := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a seed makes the run repeatable
	for i := range mutants {
		file := mutate(rng, seeds[rng.IntN(len(seeds))])
		writeFile(t, filepath.Join(dir, fmt.Sprintf("mutant-%04d", i)), string(file))
	}
	var verdicts map[string]*[]string
	runJSON(ctx, t, r, pythonCommand(r, "safetensors_verdicts", nil, dir), &verdicts)
	accepted, refused, wrong := 0, 0, 0
	for _, name := range slices.Sorted(maps.Keys(verdicts)) {
		file, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		header, err := safetensors.ReadHeader(bytes.NewReader(file), int64(len(file)))
		library := verdicts[name]
		switch {
		case library == nil && err != nil:
			refused++
			continue
		case library != nil && err == nil && slices.Equal(*library, slices.Sorted(maps.Keys(header.Tensors))):
			accepted++
			continue
		}
		if wrong++; wrong > 10 {
			continue
		}
		said := "refused"
		if library != nil {
			said = fmt.Sprintf("accepted with tensors %q", *library)
		}
		t.Errorf("%s: the library %s it, we said %v: %q", name, said, err, file[:min(len(file), 400)])
	}
	if len(verdicts) != len(recorded)+mutants || accepted < 50 || refused < 50 {
		t.Errorf("%d verdicts: %d accepted and %d refused by both, %d differ; want %d with many of each kind", len(verdicts), accepted, refused, wrong, len(recorded)+mutants)
	}
}

// recordedCases builds the files whose verdicts were recorded from safetensors
// 0.8.0 for the reader's own tests.
func recordedCases(t *testing.T, r *rig.Rig) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(r.Root, "weightcache", "safetensors", "testdata", "cases.json"))
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		Cases []struct {
			Name   string
			Base64 string
			Recipe *struct {
				Header  string
				PadTo   int    `json:"pad_to"`
				DataHex string `json:"data_hex"`
			}
		}
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, c := range list.Cases {
		if c.Recipe == nil {
			if files[c.Name], err = base64.StdEncoding.DecodeString(c.Base64); err != nil {
				t.Fatal(err)
			}
			continue
		}
		data, err := hex.DecodeString(c.Recipe.DataHex)
		if err != nil {
			t.Fatal(err)
		}
		header := c.Recipe.Header + strings.Repeat(" ", max(0, c.Recipe.PadTo-len(c.Recipe.Header)))
		files[c.Name] = assemble([]byte(header), data)
	}
	return files
}

// assemble makes a file of a header's text and tensor data.
func assemble(header, data []byte) []byte {
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(file, header...), data...)
}

// scraps are pieces of headers that readers of JSON disagree about.
var scraps = []string{
	`"a"`, `"b"`, `"dtype"`, `"F32"`, `"F16"`, `"BF16"`, `"F4"`, `"f32"`, `"shape"`, `"data_offsets"`, `[0,8]`, `[0,0]`, `[8,16]`, `[]`, `[2]`,
	`[-1]`, `[2.0]`, `[2e0]`, `[02]`, `[18446744073709551615]`, `[18446744073709551616]`, `[4294967296,4294967296]`, `-0`, `null`, `true`, `{}`,
	`"__metadata__":{"k":"v"},`, `"__metadata__":{"k":1},`, `"__metadata__":null,`, `,`, `:`, `{`, `}`, `[`, `]`, ` `, "\t", "\n", "\x00", "\xff",
	"\xc3\xa9", `\u0061`, `\ud800`, `\ud83d\ude00`, `\/`, `\x`, `"x":{"dtype":"U8","shape":[0],"data_offsets":[8,8]},`,
	`"extra":1,`, `"extra":[{}],`, `"extra":1e400,`, `"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`, `//`, `NaN`, `Infinity`, "\uFEFF",
}

// mutate damages a file in one to three places. Most mutants keep a true
// length field, so that the header itself is what is judged.
func mutate(rng *rand.Rand, file []byte) []byte {
	n := int(binary.LittleEndian.Uint64(file))
	header, data := slices.Clone(file[8:8+n]), slices.Clone(file[8+n:])
	for range 1 + rng.IntN(3) {
		at := rng.IntN(len(header) + 1)
		switch rng.IntN(9) {
		case 0: // another byte
			if at < len(header) {
				header[at] = byte(rng.UintN(256))
			}
		case 1: // a digit
			if digits := indexAll(header, "0123456789"); len(digits) > 0 {
				header[digits[rng.IntN(len(digits))]] = byte('0' + rng.IntN(10))
			}
		case 2: // a run removed
			end := min(len(header), at+1+rng.IntN(8))
			header = slices.Delete(header, at, end)
		case 3: // a run repeated
			end := min(len(header), at+1+rng.IntN(40))
			header = slices.Insert(header, at, slices.Clone(header[at:end])...)
		case 4: // a piece put in at a place where JSON may have one
			if marks := indexAll(header, "{[,:\""); len(marks) > 0 {
				at = marks[rng.IntN(len(marks))] + 1
			}
			header = slices.Insert(header, at, []byte(scraps[rng.IntN(len(scraps))])...)
		case 5: // a piece exchanged
			old, fresh := scraps[rng.IntN(len(scraps))], scraps[rng.IntN(len(scraps))]
			header = bytes.Replace(header, []byte(old), []byte(fresh), 1)
		case 6: // more or less data
			if rng.IntN(2) == 0 && len(data) > 0 {
				data = data[:rng.IntN(len(data))]
			} else {
				data = append(data, make([]byte, 1+rng.IntN(16))...)
			}
		case 7: // white space around it
			header = append(bytes.Repeat([]byte{" \t\n\r\x00"[rng.IntN(5)]}, rng.IntN(3)), header...)
			header = append(header, bytes.Repeat([]byte{" \t\n\r\x00"[rng.IntN(5)]}, rng.IntN(3))...)
		case 8: // deep nesting in a field nobody reads
			if i := bytes.IndexByte(header, '{'); i >= 0 {
				depth := 100 + rng.IntN(60)
				deep := strings.Repeat("[", depth) + strings.Repeat("]", depth)
				j := bytes.IndexByte(header[i+1:], '{')
				if j >= 0 {
					header = slices.Insert(header, i+1+j+1, []byte(`"deep":`+deep+`,`)...)
				}
			}
		}
		if len(header) == 0 {
			header = []byte("{}")
		}
	}
	file = assemble(header, data)
	if rng.IntN(12) == 0 { // a false length
		binary.LittleEndian.PutUint64(file, uint64(int64(len(header))+int64(rng.IntN(5))-2))
	}
	return file
}

// indexAll gives the places of any of the bytes of set.
func indexAll(text []byte, set string) []int {
	var at []int
	for i, c := range text {
		if strings.IndexByte(set, c) >= 0 {
			at = append(at, i)
		}
	}
	return at
}
