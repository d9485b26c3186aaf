package ledger

import (
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const testDir = "/var/lib/claims"

// clock is a time that tests move.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func newClock() *clock { return &clock{at: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)} }

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// open opens the ledger of a crashable file system.
func open(fsys *durabletest.FS, c *clock) (*Ledger, error) {
	return Open(Options{Dir: testDir, FS: fsys, BootID: "boot-1", Now: c.now})
}

func mustOpen(t *testing.T, fsys *durabletest.FS, c *clock) *Ledger {
	t.Helper()
	l, err := open(fsys, c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func uidOf(name string) string { return "0c1a-" + name }

// planOf is the plan of a claim for one GPU, a model and KV space.
func planOf(name, gpu string) Entry {
	return Entry{
		UID: uidOf(name), Namespace: "team", Name: name,
		Pods: []Pod{{Name: "pod-" + name, UID: "77-" + name}},
		Results: []Result{
			{Request: "gpu", Pool: "node-1", Device: gpu, Kind: KindGPU, UUID: "GPU-" + gpu},
			{Request: "model/warm", Pool: "node-1/weights", Device: "w-0123456789abcdef", ShareID: "s-" + name, Kind: KindWeights, Shared: true},
			{Request: "kv", Pool: "node-1/kv", Device: "kv", ShareID: "k-" + name, Kind: KindKV, Shared: true, Consumed: map[string]int64{"memory": 1 << 30, "nvme": 4 << 30}},
		},
		Weights: []Weight{{
			Request: "model/warm", Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}, Digest: artifact.Digest{1, 2, 3}, Size: 5 << 30,
		}},
		KV: &KV{Namespace: "team", Memory: 1 << 30, NVMe: 4 << 30},
	}
}

// doneOf is the plan after its steps.
func doneOf(plan Entry) Entry {
	done := plan.clone()
	done.KV.Dir = "/var/lib/hearth/kv/claims/" + plan.UID
	edits := []Edits{
		{DeviceNodes: []DeviceNode{{Path: "/dev/nvidia0"}, {Path: "/dev/nvidiactl", HostPath: "/run/driver/dev/nvidiactl"}}},
		{
			Env:    []string{"HEARTH_MODEL_DIR=/hearth/model"},
			Mounts: []Mount{{Host: "/var/lib/hearth/weights-views/flat/x", Container: "/hearth/model", Options: []string{"ro", "nosuid", "nodev", "rbind"}}},
		},
		{Env: []string{"HEARTH_KV_DIR=/hearth/kv"}, Mounts: []Mount{{Host: done.KV.Dir, Container: "/hearth/kv", Options: []string{"rw"}}}},
	}
	for i := range done.Results {
		r := &done.Results[i]
		r.CDI, r.Edits = plan.UID+"-"+r.Device, edits[i]
	}
	return done
}

// begin, commit and bury are the calls for one claim.
func begin(l *Ledger, e Entry) error    { return l.Begin(ctx, l.Arrive(), e)[0] }
func commit(l *Ledger, e Entry) error   { return l.Commit(ctx, e)[0] }
func bury(l *Ledger, name string) error { return l.Tombstone(ctx, uidOf(name))[0] }

// prepared makes a claim prepared.
func prepared(t *testing.T, l *Ledger, plan Entry) Entry {
	t.Helper()
	done := doneOf(plan)
	if err := errors.Join(begin(l, plan), commit(l, done)); err != nil {
		t.Fatal(err)
	}
	return done
}

// said is what a state and a plan promise of an entry, without its times.
func said(state State, e Entry) string {
	if state == Gone {
		e = e.tombstone(time.Time{})
	}
	data, err := json.Marshal([]any{state, e.Namespace, e.Name, e.Pods, e.Results, e.Weights, e.KV})
	if err != nil {
		return err.Error()
	}
	return string(data)
}

const nothing = "nothing"

// says is what a ledger says of a claim.
func says(l *Ledger, uid string) string {
	if e, ok := l.Get(uid); ok {
		return said(e.State, e)
	}
	for _, e := range l.Gone() {
		if e.UID == uid {
			return said(Gone, e)
		}
	}
	return nothing
}
