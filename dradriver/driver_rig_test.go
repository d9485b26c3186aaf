package dradriver

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
)

// told is a Cluster that keeps what it was told.
type told struct {
	mu         sync.Mutex
	events     []string // "Kind name: reason: text"
	conditions []DeviceCondition
	deleted    []string
	states     map[string]ClaimState // by UID; absent: as it was
	err        error
	asking     chan struct{} // where set, Claim tells here that it was asked
	answering  chan struct{} // and waits here
	takes      time.Duration // of each answer
}

func (c *told) Event(on Object, _ bool, reason, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, on.Kind+" "+on.Name+": "+reason+": "+text)
}

func (c *told) SetConditions(_ Object, conditions []DeviceCondition) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conditions = append(c.conditions, conditions...)
}

func (c *told) DeletePod(pod Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deleted = append(c.deleted, pod.Name)
}

func (c *told) Claim(ctx context.Context, claim Object) (ClaimState, error) {
	if c.asking != nil {
		c.asking <- struct{}{}
		select {
		case <-c.answering:
		case <-ctx.Done():
			return ClaimState{}, ctx.Err()
		}
	}
	if c.takes > 0 {
		select {
		case <-time.After(c.takes):
		case <-ctx.Done():
			return ClaimState{}, ctx.Err()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if state, ok := c.states[claim.UID]; ok || c.err != nil {
		return state, c.err
	}
	return ClaimState{Exists: true, AllocatedHere: true}, nil
}

// rig is a driver without a kubelet: its calls are made directly.
type rig struct {
	*Driver
	dir     string
	boot    string
	now     *fakeClock
	cache   *simstock.Cache
	kv      *simstock.KV
	cluster *told
	devices *movable
}

type fakeClock struct {
	mu   sync.Mutex
	at   time.Time
	real bool // of the bubble, where one is
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real {
		return time.Now()
	}
	return c.at
}

func (c *fakeClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// movable is an inventory that a test changes.
type movable struct {
	mu      sync.Mutex
	state   device.Snapshot
	known   bool
	changed chan struct{}
}

func (m *movable) Devices() (device.Snapshot, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state, m.known
}

func (m *movable) Subscribe() (<-chan struct{}, func()) { return m.changed, func() {} }

func (m *movable) set(state device.Snapshot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state, m.known = state, true
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

func twoGPUs() device.Snapshot {
	return device.Snapshot{
		{Device: device.Device{ID: "gpu-0", Facts: device.Facts{UUID: "GPU-0", Nodes: []string{"/dev/nvidia0"}}}},
		{Device: device.Device{ID: "gpu-1", Facts: device.Facts{UUID: "GPU-1", Nodes: []string{"/dev/nvidia1"}}}},
	}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{
		dir: t.TempDir(), boot: "boot-1", now: &fakeClock{at: planNow}, cluster: &told{states: map[string]ClaimState{}},
		devices: &movable{state: twoGPUs(), known: true, changed: make(chan struct{}, 1)},
	}
	var err error
	if r.cache, err = simstock.OpenCache(filepath.Join(r.dir, "weights"), stock.Drive{Tier: "nvme", Free: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	if r.kv, err = simstock.OpenKV(filepath.Join(r.dir, "kv"), stock.Space{Memory: 8 << 30, NVMe: 8 << 30}); err != nil {
		t.Fatal(err)
	}
	for _, a := range []stock.Artifact{llama, mistral} {
		if err := r.cache.Add(a); err != nil {
			t.Fatal(err)
		}
	}
	r.open(t)
	return r
}

// open makes the driver anew, as a restart does.
func (r *rig) open(t *testing.T) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	l, err := ledger.Open(ledger.Options{Dir: filepath.Join(r.dir, "claims"), BootID: r.boot, Now: r.now.Now, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	r.Driver, err = New(Options{
		Node: testNode, Pools: Pools{GPUs: true, Weights: true, KV: true}, Ledger: l,
		CDI:   cdi.New(cdi.Options{Dir: filepath.Join(r.dir, "cdi"), Log: quiet}),
		Cache: r.cache, KV: r.kv, Devices: r.devices, Cluster: r.cluster, Now: r.now.Now, Log: quiet,
		PluginDir: filepath.Join(r.dir, "plugin"), CDIDir: filepath.Join(r.dir, "cdi"), PullWait: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.note()
	r.Restore()
}

// reopen ends one life of the driver and begins the next.
func (r *rig) reopen(t *testing.T) {
	t.Helper()
	if err := r.o.Ledger.Close(); err != nil {
		t.Fatal(err)
	}
	r.open(t)
}

// prepare prepares one claim.
func (r *rig) prepare(t *testing.T, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	t.Helper()
	all, err := r.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil {
		t.Fatal(err)
	}
	return all[c.UID]
}

func (r *rig) mustPrepare(t *testing.T, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	t.Helper()
	result := r.prepare(t, c)
	if result.Err != nil {
		t.Fatal(result.Err)
	}
	return result
}

func (r *rig) mustUnprepare(t *testing.T, uids ...types.UID) {
	t.Helper()
	var claims []kubeletplugin.NamespacedObject
	for _, uid := range uids {
		claims = append(claims, kubeletplugin.NamespacedObject{UID: uid})
	}
	all, err := r.UnprepareResourceClaims(t.Context(), claims)
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range uids {
		if err, answered := all[uid]; err != nil || !answered {
			t.Fatalf("unprepare %s: answered %t, %v", uid, answered, err)
		}
	}
}

// wantNothing checks that no claim has anything.
func (r *rig) wantNothing(t *testing.T) {
	t.Helper()
	held, err := r.heldBy(t.Context())
	specs, specsErr := r.o.CDI.List()
	if err := errors.Join(err, specsErr); err != nil {
		t.Fatal(err)
	}
	if entries := r.o.Ledger.Entries(); len(held)+len(specs)+len(entries) > 0 {
		t.Errorf("left: held by %v, CDI files of %v, in the ledger %+v", held, specs, entries)
	}
}

// withUID gives a claim another identity.
func withUID(c *resourceapi.ResourceClaim, namespace, name string) *resourceapi.ResourceClaim {
	c.Namespace, c.Name, c.UID = namespace, name, types.UID("uid-"+name)
	return c
}
