package fakekubelet_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/test/fakekubelet"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
	"github.com/hearth-dev/hearth/units"
)

const node = "node-a"

// patience bounds the wait for what comes by itself.
const patience = time.Minute

var (
	warm  = simstock.Sample("warm", 1)
	cold  = simstock.Sample("cold", 2)
	space = stock.Space{Memory: 64 << 30, NVMe: 512 << 30}
	drive = stock.Drive{Tier: "nvme", Free: 1 << 40}
)

// machine is one node with all that outlives its driver: the folders, the stock
// and the API server.
type machine struct {
	dir     string
	api     *fakekubelet.API
	cache   *simstock.Cache
	kv      *simstock.KV
	boot    string
	cluster dradriver.Cluster
	fsys    durable.FS
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "fk") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	m := &machine{dir: dir, api: fakekubelet.StartAPI(), boot: "boot-1", fsys: durable.OS}
	t.Cleanup(m.api.Close)
	if err := prepareFolders(dir); err != nil {
		t.Fatal(err)
	}
	if m.cache, m.kv, err = openStock(dir); err != nil {
		t.Fatal(err)
	}
	if err := m.cache.Add(warm); err != nil {
		t.Fatal(err)
	}
	m.cache.Offer(cold.Ref, simstock.Origin{Artifact: cold, Manual: true})
	return m
}

func prepareFolders(dir string) error {
	for _, sub := range []string{"reg", "cdi"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func openStock(dir string) (*simstock.Cache, *simstock.KV, error) {
	cache, err := simstock.OpenCache(filepath.Join(dir, "weights"), drive)
	if err != nil {
		return nil, nil, err
	}
	kv, err := simstock.OpenKV(filepath.Join(dir, "kv"), space)
	return cache, kv, err
}

// gpus is the inventory: as many GPUs as a claim may have.
func gpus() dradriver.Inventory {
	var devices []device.Device
	for i := range 32 {
		devices = append(devices, device.Device{
			ID: device.ID(gpuName(i)), Product: "NVIDIA H200",
			Facts: device.Facts{UUID: fmt.Sprintf("GPU-%d", i), Nodes: []string{"/dev/null"}, Memory: 141 << 30},
		})
	}
	return dradriver.StaticInventory(devices)
}

func gpuName(i int) string { return fmt.Sprintf("gpu-0000-%02x-00-0", i+1) }

// built is one life of the driver.
type built struct {
	*dradriver.Driver
	ledger *ledger.Ledger
	specs  *cdi.Specs
}

// build makes a driver of the machine's folders; nothing runs.
func (m *machine) build() (*built, error) { return m.buildWith(func(*dradriver.Options) {}) }

// buildWith makes one that is told something else in part.
func (m *machine) buildWith(change func(*dradriver.Options)) (*built, error) {
	return buildDriver(m.dir, m.api.URL(), m.boot, m.fsys, m.cache, m.kv, m.cluster, change)
}

func buildDriver(
	dir, url, boot string, fsys durable.FS, cache stock.Cache, kv stock.KV, cluster dradriver.Cluster, changes ...func(*dradriver.Options),
) (*built, error) {
	quiet := slog.New(slog.DiscardHandler)
	client, err := fakekubelet.ClientOf(url)
	if err != nil {
		return nil, err
	}
	b := &built{specs: cdi.New(cdi.Options{Dir: filepath.Join(dir, "cdi"), FS: fsys, Log: quiet})}
	if b.ledger, err = ledger.Open(ledger.Options{Dir: filepath.Join(dir, "claims"), FS: fsys, BootID: boot, Log: quiet}); err != nil {
		return nil, err
	}
	o := dradriver.Options{
		Node: node, Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true}, Kube: client,
		Ledger: b.ledger, CDI: b.specs, Cache: cache, KV: kv, Devices: gpus(), Cluster: cluster,
		PluginDir: filepath.Join(dir, "plugin"), RegistrarDir: filepath.Join(dir, "reg"), CDIDir: filepath.Join(dir, "cdi"),
		PullWait: -1, Log: quiet,
	}
	for _, change := range changes {
		change(&o)
	}
	b.Driver, err = dradriver.New(o)
	return b, err
}

// running is a driver that serves.
type running struct {
	*built
	kubelet *fakekubelet.Plugin
	stop    func()
}

// start builds and runs a driver and registers it. stop, which also comes by
// itself, ends it as a signal does.
func (m *machine) start(t *testing.T) *running {
	t.Helper()
	return m.startWith(t, func(*dradriver.Options) {})
}

// startWith starts one that is told something else in part.
func (m *machine) startWith(t *testing.T, change func(*dradriver.Options)) *running {
	t.Helper()
	b, err := m.buildWith(change)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	r := &running{built: b}
	done := false
	r.stop = func() {
		if done {
			return
		}
		done = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run driver: %v", err)
		}
		if err := r.kubelet.Close(); err != nil {
			t.Error(err)
		}
		if err := b.ledger.Close(); err != nil {
			t.Error(err)
		}
	}
	r.kubelet = m.register(t)
	t.Cleanup(r.stop)
	within(t, "the driver to see its registration", b.Started())
	return r
}

func (m *machine) register(t *testing.T) *fakekubelet.Plugin {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	plugin, err := fakekubelet.Register(ctx, filepath.Join(m.dir, "reg"), dradriver.Name)
	if err != nil {
		t.Fatal(err)
	}
	return plugin
}

// within waits for a channel.
func within[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable: Fatalf ends the test" + what)
	}
}

// until polls a condition.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-timer.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// result is one allocated device of the driver.
func result(request, pool, name string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: dradriver.Name, Pool: pool, Device: name}
}

func gpu(request string, i int) resourceapi.DeviceRequestAllocationResult {
	return result(request, dradriver.PoolGPUs(node), gpuName(i))
}

func shared(r resourceapi.DeviceRequestAllocationResult, share string) resourceapi.DeviceRequestAllocationResult {
	id := types.UID(share)
	r.ShareID = &id
	return r
}

func weights(request, share string) resourceapi.DeviceRequestAllocationResult {
	return shared(result(request, dradriver.PoolWeights(node), dradriver.WeightsDevice(warm.Digest)), share)
}

func coldWeights(request, share string) resourceapi.DeviceRequestAllocationResult {
	r := shared(result(request, dradriver.PoolWeights(node), dradriver.DeviceCold), share)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"size": resource.MustParse("2Mi")}
	return r
}

func kvSpace(request, share, memory string) resourceapi.DeviceRequestAllocationResult {
	r := shared(result(request, dradriver.PoolKV(node), dradriver.DeviceKV), share)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory), "nvme": resource.MustParse("0")}
	return r
}

// claim makes a claim as the scheduler leaves it.
func claim(name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name + "-pod", UID: types.UID("pod-" + name)}},
		},
	}
}

// says adds opaque configuration to a claim.
func says(c *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, config string, requests ...string) *resourceapi.ResourceClaim {
	devices := &c.Status.Allocation.Devices
	devices.Config = append(devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: dradriver.Name, Parameters: runtime.RawExtension{Raw: []byte(config)},
		}},
	})
	return c
}

func refConfig(ref string) string {
	return `{"apiVersion":"hearth.dev/v1alpha1","kind":"WeightsConfig","ref":"` + ref + `"}`
}

func named(c *resourceapi.ResourceClaim) fakekubelet.Claim {
	return fakekubelet.Claim{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID)}
}

// full is a claim of everything: two GPUs, a model and KV space.
func full(name string) *resourceapi.ResourceClaim {
	return claim(name, gpu("gpus", 0), gpu("gpus", 1), weights("model", "share-w-"+name), kvSpace("kv", "share-k-"+name, "8Gi"))
}

// left lists what a machine still has of claims: nothing, at the end of a test.
func (m *machine) left(t *testing.T, l *ledger.Ledger) []string {
	t.Helper()
	var found []string
	for _, entry := range l.Entries() {
		found = append(found, "ledger entry "+entry.UID+" "+string(entry.State))
	}
	holds, err := m.cache.Holds(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range holds {
		found = append(found, "hold of weights by "+uid)
	}
	reserved, err := m.kv.Reservations(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range reserved {
		found = append(found, "reservation of KV by "+r.Claim)
	}
	for _, folder := range []string{"cdi", "plugin/dra-device-metadata", "kv/claims"} {
		path := filepath.Join(m.dir, folder)
		entries, err := m.fsys.ReadDir(path)
		if err != nil {
			entries, _ = os.ReadDir(path) // the library's files are on the real drive
		}
		for _, entry := range entries {
			found = append(found, folder+"/"+entry.Name())
		}
	}
	slices.Sort(found)
	return found
}

func (m *machine) wantNothingLeft(t *testing.T, l *ledger.Ledger) {
	t.Helper()
	if found := m.left(t, l); len(found) > 0 {
		t.Errorf("left at the end:\n%s", strings.Join(found, "\n"))
	}
}

// mib is a size of the samples.
func mib(n int) units.Bytes { return units.Bytes(n) << 20 }
