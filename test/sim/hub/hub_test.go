package hub

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

func writeRepo(t *testing.T, opts ModelOptions) string {
	t.Helper()
	root := t.TempDir()
	if err := WriteModel(filepath.Join(root, "acme", "tiny"), opts); err != nil {
		t.Fatal(err)
	}
	return root
}

func get(t *testing.T, url string, header ...string) (*http.Response, []byte, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return resp, body, err
}

func TestWriteModelIsDeterministicAndEveryShardIsValid(t *testing.T) {
	t.Parallel()
	opts := ModelOptions{Size: 2 * units.MiB, Shards: 3, Seed: 7}
	a, b := writeRepo(t, opts), writeRepo(t, opts)
	index, err := os.ReadFile(filepath.Join(a, "acme/tiny/model.safetensors.index.json"))
	if err != nil {
		t.Fatal(err)
	}
	var parsed struct {
		Metadata  struct{ Total int64 } `json:"metadata"`
		WeightMap map[string]string     `json:"weight_map"`
	}
	if err := json.Unmarshal(index, &parsed); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i := range 3 {
		name := fmt.Sprintf("model-%05d-of-00003.safetensors", i+1)
		data, err := os.ReadFile(filepath.Join(a, "acme/tiny", name))
		if err != nil {
			t.Fatal(err)
		}
		other, err := os.ReadFile(filepath.Join(b, "acme/tiny", name))
		if err != nil {
			t.Fatal(err)
		}
		if sha256.Sum256(data) != sha256.Sum256(other) {
			t.Errorf("%s differs between equal options", name)
		}
		n := binary.LittleEndian.Uint64(data)
		var head map[string]json.RawMessage
		if err := json.Unmarshal(data[8:8+n], &head); err != nil {
			t.Fatal(err)
		}
		end := int64(0)
		for tensor, raw := range head {
			if tensor == "__metadata__" {
				continue
			}
			var h header
			if err := json.Unmarshal(raw, &h); err != nil {
				t.Fatal(err)
			}
			end = max(end, h.Offsets[1])
			seen[tensor] = true
			if parsed.WeightMap[tensor] != name {
				t.Errorf("index puts %s in %q, it is in %q", tensor, parsed.WeightMap[tensor], name)
			}
		}
		if got := int64(len(data)); got != 8+int64(n)+end {
			t.Errorf("%s has %d bytes, its header wants %d", name, got, 8+int64(n)+end)
		}
	}
	if len(seen) != len(parsed.WeightMap) {
		t.Errorf("shards hold %d tensors, index names %d", len(seen), len(parsed.WeightMap))
	}
}

func TestModelSizesComeNearTheSizeAskedFor(t *testing.T) {
	t.Parallel()
	for _, size := range []int64{1 << 20, 64 << 20, 256 << 20, 16 << 30} {
		hidden, layers := modelShape(size)
		var total int64
		for _, x := range llamaTensors(hidden, layers) {
			total += x.bytes()
		}
		if off := size - total; off < 0 || off > layerBytes(hidden) {
			t.Errorf("size %d gave %d bytes: hidden %d, layers %d", size, total, hidden, layers)
		}
		for n := 1; n <= 8; n++ {
			shards := splitShards(llamaTensors(hidden, layers), n)
			if len(shards) != n {
				t.Errorf("size %d split in %d shards, want %d", size, len(shards), n)
			}
		}
	}
}

func TestOriginServesTreePagesThatAddUp(t *testing.T) {
	t.Parallel()
	o := New(Options{Dir: writeRepo(t, ModelOptions{Size: units.MiB, Shards: 2}), PageSize: 3})
	s := httptest.NewServer(o)
	defer s.Close()
	next, count := s.URL+"/api/models/acme/tiny/tree/main?recursive=true", 0
	for next != "" {
		resp, body, err := get(t, next)
		if err != nil {
			t.Fatal(err)
		}
		var page []treeEntry
		if err := json.Unmarshal(body, &page); err != nil {
			t.Fatal(err)
		}
		count += len(page)
		next = ""
		if link := resp.Header.Get("Link"); link != "" {
			if _, err := fmt.Sscanf(link, "<%s", &next); err != nil {
				t.Fatal(err)
			}
			next = next[:len(next)-2]
		}
	}
	if count != 9 {
		t.Errorf("pages hold %d entries, want 9", count)
	}
}

func TestOriginServesRangesAndCountsBodyBytes(t *testing.T) {
	t.Parallel()
	root := writeRepo(t, ModelOptions{Size: units.MiB, Shards: 2})
	for _, style := range []Redirects{Direct, RedirectAbsolute, RedirectRelative} {
		o := New(Options{Dir: root, Redirect: style})
		s := httptest.NewServer(o)
		defer s.Close()
		cdn := httptest.NewServer(o.CDN())
		defer cdn.Close()
		o.SetCDN(cdn.URL)
		want, err := os.ReadFile(filepath.Join(root, "acme/tiny/model-00001-of-00002.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		resp, body, err := get(t, s.URL+"/acme/tiny/resolve/main/model-00001-of-00002.safetensors", "Range", "bytes=100-299")
		if err != nil || resp.StatusCode != http.StatusPartialContent || string(body) != string(want[100:300]) {
			t.Errorf("style %d: status %v, %d bytes, %v", style, resp.Status, len(body), err)
		}
		if o.Bytes() != 200 {
			t.Errorf("style %d: counted %d bytes, want 200", style, o.Bytes())
		}
	}
}

func TestOriginRefusesGatedFilesWithoutTheToken(t *testing.T) {
	t.Parallel()
	o := New(Options{Dir: writeRepo(t, ModelOptions{Size: units.MiB}), Token: "hf_good", Gated: []string{"acme/tiny"}})
	s := httptest.NewServer(o)
	defer s.Close()
	for auth, want := range map[string]int{"": 401, "Bearer hf_bad": 403, "Bearer hf_good": 200} {
		resp, _, err := get(t, s.URL+"/acme/tiny/resolve/main/config.json", "Authorization", auth)
		if err != nil || resp.StatusCode != want {
			t.Errorf("authorization %q: got %v (%v), want %d", auth, resp.StatusCode, err, want)
		}
		if want != 200 && resp.Header.Get("X-Error-Code") != "GatedRepo" {
			t.Errorf("authorization %q: no GatedRepo code", auth)
		}
	}
}

func TestFaultsHappenOnceAndThenHeal(t *testing.T) {
	t.Parallel()
	o := New(Options{Dir: writeRepo(t, ModelOptions{Size: units.MiB})})
	s := httptest.NewServer(o)
	defer s.Close()
	url := s.URL + "/acme/tiny/resolve/main/model-00001-of-00004.safetensors"
	o.AddFault("/resolve/", 1, Fault{CutAfter: 1000})
	o.AddFault("/resolve/", 1, Fault{Status: 503})
	o.AddFault("/resolve/", 1, Fault{WrongBytes: true})
	if _, body, err := get(t, url); err == nil || len(body) != 1000 {
		t.Errorf("cut body gave %d bytes and %v", len(body), err)
	}
	if resp, _, err := get(t, url); err != nil || resp.StatusCode != 503 {
		t.Errorf("second answer %v %v, want 503", resp, err)
	}
	_, wrong, err := get(t, url)
	if err != nil {
		t.Fatal(err)
	}
	resp, right, err := get(t, url)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(right)
	if resp.Header.Get("Etag") != `"`+hex.EncodeToString(sum[:])+`"` {
		t.Error("etag of an LFS file is not the sha256 of its bytes")
	}
	if string(wrong) == string(right) {
		t.Error("wrong bytes were right")
	}
}

func TestCommitsFollowContentAndBranchesMayHoldSlashes(t *testing.T) {
	t.Parallel()
	root := writeRepo(t, ModelOptions{Size: units.MiB})
	if err := WriteModel(filepath.Join(root, "acme", "tiny@dev%2Fone"), ModelOptions{Size: units.MiB, Seed: 1}); err != nil {
		t.Fatal(err)
	}
	o := New(Options{Dir: root})
	main, err := o.Commit("acme/tiny", "main")
	if err != nil {
		t.Fatal(err)
	}
	dev, err := o.Commit("acme/tiny", "dev/one")
	if err != nil {
		t.Fatal(err)
	}
	byID, err := o.Commit("acme/tiny", dev)
	if err != nil || byID != dev || dev == main {
		t.Errorf("main %s, dev %s, dev by id %s, %v", main, dev, byID, err)
	}
	s := httptest.NewServer(o)
	defer s.Close()
	for path, want := range map[string]string{
		"/api/models/acme/tiny/revision/dev%2Fone": "", "/api/models/acme/none": "RepoNotFound",
		"/api/models/acme/tiny/revision/none": "RevisionNotFound", "/acme/tiny/resolve/main/none": "EntryNotFound",
		"/acme/tiny/resolve/HEAD/config.json": "", "/api/models/acme/tiny/refs": "",
	} {
		resp, _, err := get(t, s.URL+path)
		if err != nil || resp.Header.Get("X-Error-Code") != want {
			t.Errorf("%s: code %q, want %q (%v)", path, resp.Header.Get("X-Error-Code"), want, err)
		}
	}
}
