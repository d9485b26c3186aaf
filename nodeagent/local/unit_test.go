package local

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

func TestAFailedPullHasAReasonAndIsFinalOnlyWhereTryingAgainCannotHelp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err    error
		reason string
		final  bool
	}{
		{weightcache.ErrNotAllowed, "NotAllowed", true},
		{weightcache.ErrRestricted, "Restricted", true},
		{weightcache.ErrNoSpace, "NoSpace", true},
		{weightcache.ErrMismatch, "BadDigest", true},
		{weightcache.ErrBroken, "BadDigest", true},
		{&source.Error{Err: source.ErrForbidden, Status: 403}, "Forbidden", true},
		{&source.Error{Err: source.ErrUnauthorized, Status: 401}, "Forbidden", true},
		{&source.Error{Err: source.ErrNoRevision, Status: 404}, "NotFound", true},
		{source.ErrThrottled, "Unreachable", false},
		{source.ErrUnavailable, "Unreachable", false},
		{source.ErrChanged, "Unreachable", false},
		{errors.New("drive is tired"), "Unreachable", false},
	} {
		if reason, final := classify(fmt.Errorf("pull: %w", c.err)); reason != c.reason || final != c.final {
			t.Errorf("%v is %s, final %v, want %s, %v", c.err, reason, final, c.reason, c.final)
		}
	}
}

func TestTheTimeLeftIsByTheRateOfLate(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	for _, c := range []struct {
		name          string
		landed        []sample
		present, size int64
		after         time.Duration
		want          time.Duration
	}{
		{"NothingKnown", nil, 10, 100, 0, 0},
		{"FirstLook", []sample{{start, 10}}, 10, 100, 0, 0},
		{"Stalled", []sample{{start, 10}}, 10, 100, 5 * time.Second, 0},
		{"TenPerSecond", []sample{{start, 10}, {start.Add(time.Second), 20}}, 30, 100, 2 * time.Second, 7 * time.Second},
		{"AfterASlowBeginning", []sample{{start, 10}, {start.Add(time.Second), 10}, {start.Add(2 * time.Second), 10}}, 20, 100, 3 * time.Second, 8 * time.Second},
		{"Done", []sample{{start, 10}}, 100, 100, 2 * time.Second, 0},
		{"HardlyMoving", []sample{{start, 0}}, 1, 1 << 62, time.Hour, maxLeft},
	} {
		if got := left(c.landed, c.present, c.size, start.Add(c.after)); got != c.want {
			t.Errorf("%s: %v left, want %v", c.name, got, c.want)
		}
	}
}

func TestQuantizationIsTheMethodOrElseTheTypeOfTheTensors(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{"torch_dtype":"bfloat16"}`: "bfloat16",
		`{"dtype":"torch.float16"}`:  "float16",
		`{"torch_dtype":"bfloat16","quantization_config":{"quant_method":"fp8","fmt":"e4m3"}}`: "fp8",
		`{"text_config":{"dtype":"bfloat16"},"vision_config":{"dtype":"float32"}}`:             "bfloat16",
		`{"quantization_config":{"quant_method":"` + strings.Repeat("x", 65) + `"}}`:           "",
		`{"model_type":"llama"}`: "",
	} {
		if got, err := quantizationOf([]byte(text)); err != nil || got != want {
			t.Errorf("%s gave %q, %v, want %q", text, got, err, want)
		}
	}
	if got, err := quantizationOf([]byte(`["no object"]`)); err == nil {
		t.Errorf("no object gave %q", got)
	}
}

// gguf makes a header: version, then keys with values.
type gguf struct{ bytes.Buffer }

func (g *gguf) put(values ...any) *gguf {
	for _, v := range values {
		if text, ok := v.(string); ok {
			_ = binary.Write(g, binary.LittleEndian, uint64(len(text)))
			g.WriteString(text)
			continue
		}
		_ = binary.Write(g, binary.LittleEndian, v)
	}
	return g
}

func newGGUF(version uint32, keys uint64) *gguf {
	g := &gguf{}
	g.WriteString("GGUF")
	return g.put(version, uint64(2), keys)
}

func TestTheTypeOfAGGUFFileIsInItsHeader(t *testing.T) {
	t.Parallel()
	key := func(g *gguf, kind uint32) *gguf { return g.put("general.file_type", uint32(4), kind) }
	many := newGGUF(3, 5).put("a", uint32(8), "text", "b", uint32(9), uint32(8), uint64(2), "x", "yy", "c", uint32(9), uint32(5), uint64(3), [3]int32{}, "d", uint32(12), float64(1))
	for name, c := range map[string]struct {
		data []byte
		want string
		bad  bool
	}{
		"AtOnce":       {key(newGGUF(3, 1), 15).Bytes(), "Q4_K_M", false},
		"Version2":     {key(newGGUF(2, 1), 32).Bytes(), "BF16", false},
		"AfterOthers":  {key(many, 7).Bytes(), "Q8_0", false},
		"UnknownType":  {key(newGGUF(3, 1), 999).Bytes(), "", false},
		"NoType":       {newGGUF(3, 1).put("a", uint32(7), true).Bytes(), "", false},
		"CutShort":     {newGGUF(3, 2).put("a", uint32(7), true).Bytes(), "", false},
		"HugeArray":    {newGGUF(3, 2).put("a", uint32(9), uint32(4), uint64(1)<<62).Bytes(), "", false},
		"HugeText":     {newGGUF(3, 2).put("a", uint32(8), uint64(1)<<62).Bytes(), "", false},
		"OldVersion":   {key(newGGUF(1, 1), 15).Bytes(), "", true},
		"OtherFile":    {[]byte("PK\x03\x04 and so on, and so on"), "", true},
		"UnknownValue": {newGGUF(3, 2).put("a", uint32(77)).Bytes(), "", true},
		"HugeKey":      {newGGUF(3, 2).put(uint64(1) << 40).Bytes(), "", true},
		"HugeCount":    {newGGUF(3, 1<<40).Bytes(), "", true},
	} {
		got, err := readGGUF(bytes.NewReader(c.data))
		if got != c.want || errors.Is(err, errGGUF) != c.bad || err != nil && !c.bad {
			t.Errorf("%s gave %q, %v, want %q", name, got, err, c.want)
		}
	}
}

func FuzzNoGGUFHeaderTakesMoreThanItsBound(f *testing.F) {
	f.Add(newGGUF(3, 1).put("general.file_type", uint32(4), uint32(15)).Bytes())
	f.Add(newGGUF(3, 2).put("a", uint32(9), uint32(9), uint64(1)<<40, uint32(9), uint64(1)<<40).Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		if kind, err := readGGUF(bytes.NewReader(data)); err != nil && kind != "" {
			t.Errorf("both %q and %v", kind, err)
		}
	})
}

func TestAnArtifactSaysWhatItIsByItsOwnFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put := func(name string, data []byte) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	put("config.json", []byte(`{"torch_dtype":"bfloat16"}`))
	put("sub/m-Q4.gguf", newGGUF(3, 1).put("general.file_type", uint32(4), uint32(15)).Bytes())
	for name, c := range map[string]struct {
		files []string
		want  description
		bad   bool
	}{
		"Safetensors":   {[]string{"config.json", "m.safetensors"}, description{"safetensors", "bfloat16"}, false},
		"Both":          {[]string{"config.json", "m.safetensors", "sub/m-Q4.gguf"}, description{"safetensors", "bfloat16"}, false},
		"GGUF":          {[]string{"README.md", "sub/m-Q4.gguf"}, description{"gguf", "Q4_K_M"}, false},
		"NoWeights":     {[]string{"README.md"}, description{}, false},
		"AFileThatLies": {[]string{"gone.gguf"}, description{format: "gguf"}, true},
	} {
		m := &artifact.Manifest{}
		for _, path := range c.files {
			m.Files = append(m.Files, artifact.File{Path: path})
		}
		if got, err := describe(m, dir); got != c.want || (err != nil) != c.bad {
			t.Errorf("%s is %+v, %v, want %+v", name, got, err, c.want)
		}
	}
}

// sysfs lays out the kernel's view of devices: links by their paths, and files.
func sysfs(t *testing.T, links, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		full := filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(text+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for path, target := range links {
		full := filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.MkdirAll(filepath.Join(root, target), 0o755)); err != nil {
			t.Fatal(err)
		}
		rel, err := filepath.Rel(filepath.Dir(full), filepath.Join(root, target))
		if err := errors.Join(err, os.Symlink(rel, full)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestWhatADriveIsComesFromTheKernelsViewOfIt(t *testing.T) {
	t.Parallel()
	node := func(n int) *int { return &n }
	const (
		first  = "devices/pci0000:17/0000:17:00.0/0000:18:00.0/nvme/nvme0/nvme0n1"
		second = "devices/pci0000:97/0000:97:00.0/0000:98:00.0/nvme/nvme1/nvme1n1"
		disk   = "devices/pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda"
		shared = "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1"
	)
	numa := map[string]string{
		"devices/pci0000:17/0000:17:00.0/0000:18:00.0/numa_node": "0", "devices/pci0000:97/0000:97:00.0/0000:98:00.0/numa_node": "1",
		"devices/pci0000:00/0000:00:1f.2/numa_node": "-1", "devices/pci0000:00/numa_node": "-1",
	}
	for name, c := range map[string]struct {
		links map[string]string
		want  stock.Drive
	}{
		"NVMe":      {map[string]string{"dev/block/8:1": first}, stock.Drive{Tier: "nvme", PCIRoot: "pci0000:17", NUMA: node(0)}},
		"Partition": {map[string]string{"dev/block/8:1": second + "/nvme1n1p1"}, stock.Drive{Tier: "nvme", PCIRoot: "pci0000:97", NUMA: node(1)}},
		"Disk":      {map[string]string{"dev/block/8:1": disk + "/sda1"}, stock.Drive{Tier: "disk", PCIRoot: "pci0000:00"}},
		"VolumeOfOne": {map[string]string{
			"dev/block/8:1": "devices/virtual/block/dm-0", "devices/virtual/block/dm-0/slaves/nvme0n1": first,
		}, stock.Drive{Tier: "nvme", PCIRoot: "pci0000:17", NUMA: node(0)}},
		"VolumeOfTwo": {map[string]string{
			"dev/block/8:1": "devices/virtual/block/md0", "devices/virtual/block/md0/slaves/nvme0n1": first, "devices/virtual/block/md0/slaves/nvme1n1": second,
		}, stock.Drive{Tier: "nvme"}},
		"VolumeOfVolumes": {map[string]string{
			"dev/block/8:1": "devices/virtual/block/dm-1", "devices/virtual/block/dm-1/slaves/md0": "devices/virtual/block/md0",
			"devices/virtual/block/md0/slaves/nvme0n1": first, "devices/virtual/block/md0/slaves/sda": disk,
		}, stock.Drive{Tier: "disk"}},
		"ManyPathsToOne": {map[string]string{
			"dev/block/8:1": shared, "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0": filepath.Dir(first),
		}, stock.Drive{Tier: "nvme", PCIRoot: "pci0000:17", NUMA: node(0)}},
		"Unknown": {nil, stock.Drive{Tier: "disk"}},
	} {
		got := deviceFacts(sysfs(t, c.links, numa), 8, 1)
		if got.Tier != c.want.Tier || got.PCIRoot != c.want.PCIRoot || (got.NUMA == nil) != (c.want.NUMA == nil) || got.NUMA != nil && *got.NUMA != *c.want.NUMA {
			t.Errorf("%s is %+v, want %+v", name, got, c.want)
		}
	}
	if got := driveOf(t.TempDir(), t.TempDir()); got.Tier == "" || got.PCIRoot != "" || got.NUMA != nil {
		t.Errorf("a drive that the kernel shows nothing of is %+v", got)
	}
}

func TestAllThatIsToldOfAModelCrossesTheSocket(t *testing.T) {
	t.Parallel()
	status := weightcache.Status{
		Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}, Digest: artifact.Digest{1}, Commit: "ab", Source: "hub",
		Access: artifact.AccessGated, State: weightcache.Filling, Size: 5, Present: 4, Files: 3, Detail: "d", BytesFetched: 2, Views: []string{"/v"},
		ViewsWithheld: true, Leases: 1, MetadataReady: true, LastUsed: time.Unix(5, 0).UTC(),
	}
	r := NewRemote(DialOptions{Socket: "/nowhere"})
	data, err := encode(line{
		Epoch: 7, Models: []model{modelOf(status)}, Space: Space{Capacity: 3 * units.GiB, Used: 1, Free: 2}, PullsEnded: 3, Problems: []string{"p"},
		Weights: &stock.Weights{Artifacts: []stock.Artifact{{Ref: status.Ref, Digest: status.Digest, Model: "name", Size: 9}}, Drive: stock.Drive{Tier: "nvme", Free: 8}},
		KV:      stock.Space{Memory: 4 * units.GiB},
	})
	if err := errors.Join(err, r.take(data)); err != nil {
		t.Fatal(err)
	}
	state, ok := r.Snapshot()
	want := State{Epoch: 7, Models: []weightcache.Status{status}, Space: Space{Capacity: 3 * units.GiB, Used: 1, Free: 2}, PullsEnded: 3, Problems: []string{"p"}}
	if !ok || fmt.Sprintf("%+v", state) != fmt.Sprintf("%+v", want) {
		t.Errorf("state\n%+v, want\n%+v", state, want)
	}
	if w, ok := r.Cache().Weights(); !ok || w.Artifacts[0].Model != "name" || w.Drive.Free != 8 {
		t.Errorf("weights are %+v", w)
	}
	if kv, ok := r.KV().Space(); !ok || kv.Memory != 4*units.GiB {
		t.Errorf("KV space is %+v", kv)
	}
}

// golden is testdata/state_v1.json.
var golden = line{
	Epoch: 7,
	Models: []model{{
		Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}, Digest: artifact.Digest{1}, Commit: "ab", Source: "hub",
		Access: artifact.AccessOpen, State: weightcache.Ready, Size: 5, Present: 5, Files: 3, Views: []string{"/v/flat/01"}, MetadataReady: true,
		LastUsed: time.Unix(5, 0).UTC(),
	}},
	Space: Space{Capacity: 3 * units.GiB, Used: 1, Free: 2}, PullsEnded: 3, Problems: []string{"p"},
	Weights: &stock.Weights{
		Artifacts: []stock.Artifact{{
			Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}, Digest: artifact.Digest{1}, Commit: "ab",
			Model: "name", Format: "safetensors", Quantization: "bfloat16", Size: 5,
		}},
		Drive: stock.Drive{Tier: "nvme", Free: units.GiB, PCIRoot: "pci0000:17"},
	},
	KV:      stock.Space{Memory: 4 * units.GiB, NVMe: 40 * units.GiB},
	Network: &Network{Sight: "partial", Reason: "seed: no", Off: []Sensor{{Name: "seed", Reason: "no"}}},
	ScaleOuts: []scaleout.Record{{
		ID: "1z", Node: "n", State: scaleout.StateRunning, Ref: "hub://org/name@main", Digest: "01", Reason: "claim", Start: time.Unix(6, 0).UTC(),
		SizeBytes: 5, MissingBytes: 4, Sources: []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin, Bytes: 3}},
		Connections: scaleout.Bytes{Received: 4, Transmitted: 1}, Visible: "partial", Unseen: "seed: no",
		Shares: []scaleout.Share{{Pod: "a/b", Class: "serving", Locality: "off_node", Bytes: scaleout.Bytes{Received: 2}}},
	}},
}

func TestALineOfStateIsWhatItsPageSays(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile("testdata/state_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := encode(golden); err != nil || string(got)+"\n" != string(want) {
		t.Errorf("a line is\n%s%v, want\n%s", got, err, want)
	}
}

func FuzzNoLineBreaksTheControlRole(f *testing.F) {
	data, err := encode(golden)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"epoch":-1,"models":[{"ref":"x"}],"weights":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := NewRemote(DialOptions{Socket: "/nowhere"})
		err := r.take(data)
		if _, ok := r.Snapshot(); ok && err != nil {
			t.Errorf("a line that gave %v was taken", err)
		}
		_, _ = r.Cache().Weights()
	})
}
