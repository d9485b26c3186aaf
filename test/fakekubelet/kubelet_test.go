package fakekubelet_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/test/fakekubelet"
)

// prepared makes one call and expects every claim to be prepared.
func prepared(t *testing.T, kubelet *fakekubelet.Plugin, claims ...*resourceapi.ResourceClaim) map[string]fakekubelet.Answer {
	t.Helper()
	all := prepare(t, kubelet, claims...)
	for uid, answer := range all {
		if answer.Err != "" {
			t.Fatalf("%s: %s", uid, answer.Err)
		}
	}
	return all
}

func prepare(t *testing.T, kubelet *fakekubelet.Plugin, claims ...*resourceapi.ResourceClaim) map[string]fakekubelet.Answer {
	t.Helper()
	var names []fakekubelet.Claim
	for _, c := range claims {
		names = append(names, named(c))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := kubelet.Prepare(ctx, names...)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(claims) {
		t.Fatalf("%d answers for %d claims", len(all), len(claims))
	}
	return all
}

func unprepared(t *testing.T, kubelet *fakekubelet.Plugin, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	var names []fakekubelet.Claim
	for _, c := range claims {
		names = append(names, named(c))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := kubelet.Unprepare(ctx, names...)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range claims {
		if text, ok := all[string(c.UID)]; !ok || text != "" {
			t.Errorf("unprepare %s: answered %t, %q", c.Name, ok, text)
		}
	}
}

// spec is what of a CDI file the tests read.
type spec struct {
	Kind    string
	Devices []struct {
		Name           string
		ContainerEdits struct {
			Env         []string
			DeviceNodes []struct{ Path string }
			Mounts      []struct {
				HostPath, ContainerPath string
				Options                 []string
			}
		}
	}
}

func readSpec(t *testing.T, path string) spec {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var s spec
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func (m *machine) specFile(uid string) string {
	return filepath.Join(m.dir, "cdi", "hearth.dev-claim_"+uid+".json")
}

func TestAClaimOfGPUsWeightsAndKVGetsAllOfThem(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	answer := prepared(t, r.kubelet, c)["uid-a"]
	want := []fakekubelet.Device{
		{Requests: []string{"gpus"}, Pool: node, Name: gpuName(0)},
		{Requests: []string{"gpus"}, Pool: node, Name: gpuName(1)},
		{Requests: []string{"model"}, Pool: node + "/weights", Name: dradriver.WeightsDevice(warm.Digest), ShareID: "share-w-a"},
		{Requests: []string{"kv"}, Pool: node + "/kv", Name: "kv", ShareID: "share-k-a"},
	}
	specs := []string{m.specFile("uid-a")}
	metadata, err := filepath.Glob(filepath.Join(m.dir, "cdi/hearth.dev_metadata_*.json"))
	if err != nil || len(metadata) != 3 {
		t.Errorf("metadata of %v (%v), want one for each request", metadata, err)
	}
	specs = append(specs, metadata...)
	known := map[string]bool{}
	for _, file := range specs {
		s := readSpec(t, file)
		for _, d := range s.Devices {
			known[s.Kind+"="+d.Name] = true
		}
	}
	for i := range answer.Devices {
		for _, id := range answer.Devices[i].CDI {
			if !known[id] {
				t.Errorf("device %s has the CDI name %s, which no file defines", answer.Devices[i].Name, id)
			}
		}
		if len(answer.Devices[i].CDI) == 0 {
			t.Errorf("device %s has no CDI name", answer.Devices[i].Name)
		}
		answer.Devices[i].CDI = nil
	}
	if diff := cmp.Diff(want, answer.Devices); diff != "" {
		t.Error(diff)
	}
	var env, nodes, mounts []string
	for _, d := range readSpec(t, m.specFile("uid-a")).Devices {
		env = append(env, d.ContainerEdits.Env...)
		for _, n := range d.ContainerEdits.DeviceNodes {
			nodes = append(nodes, n.Path)
		}
		for _, mount := range d.ContainerEdits.Mounts {
			if info, err := os.Stat(mount.HostPath); err != nil || !info.IsDir() {
				t.Errorf("%s is mounted and is no directory: %v", mount.HostPath, err)
			}
			mounts = append(mounts, mount.ContainerPath+" "+strings.Join(mount.Options, ","))
		}
	}
	for what, pair := range map[string][2][]string{
		"environment": {env, {
			"HEARTH_MODEL_DIR=/hearth/model", "HEARTH_MODEL_DIGEST=" + warm.Digest.String(), "HF_HUB_CACHE=/hearth/model-hub", "HF_HUB_OFFLINE=1",
			"HEARTH_KV_DIR=/hearth/kv", "HEARTH_KV_SOCKET=/hearth/kv/kv.sock", "HEARTH_KV_MEMORY_BYTES=8589934592", "HEARTH_KV_NVME_BYTES=0",
		}},
		"device nodes": {nodes, {"/dev/null", "/dev/null"}},
		"mounts":       {mounts, {"/hearth/model ro,nosuid,nodev,rbind", "/hearth/model-hub ro,nosuid,nodev,rbind", "/hearth/kv rw,nosuid,nodev,rbind"}},
	} {
		if diff := cmp.Diff(slices.Sorted(slices.Values(pair[1])), slices.Sorted(slices.Values(pair[0]))); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestBothVersionsOfTheProtocolAreServed(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	want := prepared(t, r.kubelet, c)["uid-a"]
	older, err := r.kubelet.PrepareBeta(t.Context(), named(c))
	if err != nil {
		t.Fatal(err)
	}
	for i := range want.Devices {
		want.Devices[i].ShareID = "" // the older version has no shares
	}
	if diff := cmp.Diff(want, older["uid-a"]); diff != "" {
		t.Error(diff)
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestTheAnswerIsTheSameAgainAfterEveryRestart(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	first := prepared(t, r.kubelet, c)
	if diff := cmp.Diff(first, prepared(t, r.kubelet, c)); diff != "" {
		t.Errorf("second call: %s", diff)
	}
	// The kubelet restarts: it registers the plugin that runs, and asks again.
	again := m.register(t)
	defer func() { _ = again.Close() }()
	if diff := cmp.Diff(first, prepared(t, again, c)); diff != "" {
		t.Errorf("after a restart of the kubelet: %s", diff)
	}
	r.stop()
	// The plugin restarts.
	r = m.start(t)
	if diff := cmp.Diff(first, prepared(t, r.kubelet, c)); diff != "" {
		t.Errorf("after a restart of the plugin: %s", diff)
	}
	r.stop()
	// The node restarts, and what it had in memory is gone.
	m.boot = "boot-2"
	if err := os.RemoveAll(filepath.Join(m.dir, "cdi")); err != nil {
		t.Fatal(err)
	}
	if err := prepareFolders(m.dir); err != nil {
		t.Fatal(err)
	}
	r = m.start(t)
	if _, err := os.Stat(m.specFile("uid-a")); err != nil {
		t.Errorf("the CDI file was not made again at start: %v", err)
	}
	if diff := cmp.Diff(first, prepared(t, r.kubelet, c)); diff != "" {
		t.Errorf("after a boot: %s", diff)
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestALostCDIFileComesBackWithTheNextPrepare(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	prepared(t, r.kubelet, c)
	before := readSpec(t, m.specFile("uid-a"))
	if err := os.Remove(m.specFile("uid-a")); err != nil {
		t.Fatal(err)
	}
	prepared(t, r.kubelet, c)
	if diff := cmp.Diff(before, readSpec(t, m.specFile("uid-a"))); diff != "" {
		t.Error(diff)
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestABatchAnswersEachClaimForItself(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	good := full("good")
	bad := says(claim("bad", gpu("gpu", 2)), resourceapi.AllocationConfigSourceClaim, `{"apiVersion":"hearth.dev/v1alpha1","kind":"WeightsConfig","hostPath":"/etc"}`)
	unknown := claim("unknown", gpu("gpu", 90))
	taken := claim("taken", gpu("gpu", 1))
	for _, c := range []*resourceapi.ResourceClaim{good, bad, unknown, taken} {
		m.api.Put(c)
	}
	r := m.start(t)
	all := prepare(t, r.kubelet, good, bad, unknown, taken)
	for uid, want := range map[string]string{
		"uid-good":    "",
		"uid-bad":     `unknown field "hostPath"`,
		"uid-unknown": "device " + gpuName(90) + " is not on node node-a",
		"uid-taken":   "in use by claim team/good",
	} {
		if got := all[uid].Err; want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", uid, got, want)
		}
	}
	unprepared(t, r.kubelet, good, bad, unknown, taken)
	m.wantNothingLeft(t, r.ledger)
}

func TestClaimsOfEverySizeArePreparedAndUnprepared(t *testing.T) {
	t.Parallel()
	for _, devices := range []int{1, 8, 32} {
		m := newMachine(t)
		c := claim("many")
		for i := range devices {
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, gpu("gpus", i))
		}
		m.api.Put(c)
		r := m.start(t)
		answer := prepared(t, r.kubelet, c)["uid-many"]
		for i, d := range answer.Devices {
			if d.Name != gpuName(i) || len(d.CDI) == 0 {
				t.Errorf("device %d is %+v", i, d)
			}
		}
		if len(answer.Devices) != devices {
			t.Errorf("%d devices for %d", len(answer.Devices), devices)
		}
		unprepared(t, r.kubelet, c)
		m.wantNothingLeft(t, r.ledger)
	}
}

func TestEightClaimsOfEightDevicesInOneCall(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var claims []*resourceapi.ResourceClaim
	for i := range 4 {
		c := claim(string(rune('a' + i)))
		for j := range 8 {
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, gpu("gpus", 8*i+j))
		}
		shared := full(string(rune('s' + i)))
		shared.Status.Allocation.Devices.Results = shared.Status.Allocation.Devices.Results[2:]
		claims = append(claims, c, shared)
		m.api.Put(c)
		m.api.Put(shared)
	}
	r := m.start(t)
	prepared(t, r.kubelet, claims...)
	if got := len(r.ledger.Entries()); got != len(claims) {
		t.Errorf("the ledger has %d claims, want %d", got, len(claims))
	}
	unprepared(t, r.kubelet, claims...)
	m.wantNothingLeft(t, r.ledger)
}

func TestCallsAtOnceEndAsIfTheyCameInTurn(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	others := make([]*resourceapi.ResourceClaim, 8)
	for i := range others {
		others[i] = claim("other-"+string(rune('a'+i)), gpu("gpu", 2+i), weights("model", "share-"+string(rune('a'+i))))
		m.api.Put(others[i])
	}
	r := m.start(t)
	want := prepared(t, r.kubelet, c)
	var calls sync.WaitGroup
	for range 8 {
		calls.Go(func() {
			got, err := r.kubelet.Prepare(t.Context(), named(c))
			if err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	for _, other := range others {
		calls.Go(func() {
			for range 4 {
				all, err := r.kubelet.Prepare(t.Context(), named(other))
				if err != nil || all[string(other.UID)].Err != "" {
					t.Errorf("prepare %s: %v, %v", other.Name, all, err)
				}
				gone, err := r.kubelet.Unprepare(t.Context(), named(other))
				if err != nil || gone[string(other.UID)] != "" {
					t.Errorf("unprepare %s: %v, %v", other.Name, gone, err)
				}
			}
		})
	}
	calls.Wait()
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestAPrepareWhoseTimeIsOverDoesNothing(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	resume := m.api.Pause()
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := r.kubelet.Prepare(ctx, named(c))
		first <- err
	}()
	within(t, "the first call to read its claim", m.api.Read())
	// A second call for the claim waits for its turn, and its time ends there.
	short, end := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer end()
	if _, err := r.kubelet.Prepare(short, named(c)); err == nil {
		t.Error("a call that waited past its time was answered")
	}
	cancel()
	if err := within(t, "the first call to end", first); err == nil {
		t.Error("a call that was given up was answered")
	}
	resume()
	// The claim's turn is free again only once both are over.
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestAClaimIsPreparedAgainAfterItWasUnprepared(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	first := prepared(t, r.kubelet, c)
	for range 3 {
		unprepared(t, r.kubelet, c)
		if diff := cmp.Diff(first, prepared(t, r.kubelet, c)); diff != "" {
			t.Error(diff)
		}
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestUnprepareOfAnUnknownClaimSucceeds(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	r := m.start(t)
	unprepared(t, r.kubelet, full("never"))
	m.wantNothingLeft(t, r.ledger)
}

func TestUnprepareNeedsNeitherTheAPIServerNorTheDataRole(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	r := m.start(t)
	prepared(t, r.kubelet, c)
	m.api.SetDown(true)
	m.api.Delete(c.Namespace, c.Name)
	m.cache.SetDown(true)
	m.kv.SetDown(true)
	unprepared(t, r.kubelet, c)
	if _, err := os.Stat(m.specFile("uid-a")); !os.IsNotExist(err) {
		t.Errorf("the CDI file is left: %v", err)
	}
	if claims := r.Claims(); len(claims) != 1 || claims[0].State != dradriver.ClaimOwing {
		t.Errorf("claims %+v, want one that is owing", claims)
	}
	r.stop()
	// What was owed is released after a restart too, once the data role is back.
	r = m.start(t)
	m.cache.SetDown(false)
	m.kv.SetDown(false)
	until(t, "what was owed to be released", func() bool {
		_ = r.Recover(t.Context())
		return len(m.left(t, r.ledger)) == 0
	})
	if claims := r.Claims(); len(claims) != 0 {
		t.Errorf("claims %+v", claims)
	}
}

func TestWeightsThatAreNotThereArePulledWhileTheKubeletAsks(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := says(claim("a", gpu("gpu", 0), coldWeights("model/cold", "share-c")), resourceapi.AllocationConfigSourceClaim, refConfig("hub://org/cold@main"), "model")
	m.api.Put(c)
	r := m.start(t)
	steps := []struct {
		at   stock.Progress
		want string
	}{
		{stock.Progress{}, "pulling org/cold"},
		{stock.Progress{Present: 41 * mib(2) / 100, Size: mib(2), Left: 50 * time.Second}, "pulling org/cold, 40 %, about 50 s left"},
		{stock.Progress{Present: mib(1), Size: mib(2), Failed: "connection reset"}, "pulling org/cold, 50 %, the last try failed (connection reset) and is repeated"},
	}
	for _, step := range steps {
		if err := m.cache.Advance(cold.Ref, step.at); err != nil {
			t.Fatal(err)
		}
		got := prepare(t, r.kubelet, c)["uid-a"].Err
		if !strings.HasSuffix(got, step.want) {
			t.Errorf("at %+v the answer is %q, want %q", step.at, got, step.want)
		}
	}
	if claims := r.Claims(); len(claims) != 1 || claims[0].State != dradriver.ClaimPulling {
		t.Errorf("claims %+v, want one that pulls", claims)
	}
	if got := r.ColdTaken(); got != mib(2) {
		t.Errorf("claims have %d bytes of the cold device, want 2 MiB", got)
	}
	r.stop()
	// The pull goes on while the plugin is away, and the claim with it.
	if err := m.cache.Advance(cold.Ref, stock.Progress{Present: mib(2), Size: mib(2)}); err != nil {
		t.Fatal(err)
	}
	r = m.start(t)
	prepared(t, r.kubelet, c)
	found := false
	for _, d := range readSpec(t, m.specFile("uid-a")).Devices {
		found = found || slices.Contains(d.ContainerEdits.Env, "HEARTH_MODEL_DIGEST="+cold.Digest.String())
	}
	if !found {
		t.Error("the container does not get the artifact that was pulled")
	}
	if err := m.cache.Remove(cold.Digest); err == nil {
		t.Error("what the claim uses could be removed")
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestTheKubeletReadsTheHealthOfTheGPUs(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	r := m.start(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := r.kubelet.Health(ctx, func(pool, name, health, _ string) bool {
		return pool == node && name == gpuName(0) && health == "HEALTHY"
	})
	if err != nil {
		t.Error(err)
	}
}

func TestAClaimMayHaveAnotherDriversGPUsAndOurWeightsAndKVSpace(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	r := m.start(t)
	ours := full("a")
	m.api.Put(ours)
	prepared(t, r.kubelet, ours)
	// The other driver's device is named as one of ours that is taken, and its
	// configuration is not for us to read.
	theirs := gpu("gpus", 0)
	theirs.Driver = "gpu.nvidia.com"
	c := claim("b", theirs, weights("model", "share-w-b"), kvSpace("kv", "share-k-b", "8Gi"))
	says(c, resourceapi.AllocationConfigSourceClaim, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`, "gpus")
	c.Status.Allocation.Devices.Config[0].Opaque.Driver = theirs.Driver
	m.api.Put(c)
	var devices []string
	for _, d := range prepared(t, r.kubelet, c)[string(c.UID)].Devices {
		devices = append(devices, d.Pool+"/"+d.Name)
	}
	slices.Sort(devices)
	if len(devices) != 2 || !strings.HasSuffix(devices[0], "/kv/kv") || !strings.Contains(devices[1], "/weights/w-") {
		t.Errorf("we answered for %q, want the weights and the KV space alone", devices)
	}
	unprepared(t, r.kubelet, c)
	unprepared(t, r.kubelet, ours)
	m.wantNothingLeft(t, r.ledger)
}
