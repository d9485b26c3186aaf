package dradriver

import (
	"cmp"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/units"
)

// States of a ClaimStatus.
const (
	ClaimPulling  = "pulling"  // begun, waits for weights
	ClaimBegun    = "begun"    // begun, waits for the kubelet's next call
	ClaimPrepared = "prepared" // the kubelet was told that it is ready
	ClaimOwing    = "owing"    // gone; what it held is not released yet
	ClaimRefused  = "refused"  // it has nothing: its last Prepare failed before anything was taken
)

// ClaimStatus is one claim as this node knows it.
type ClaimStatus struct {
	Namespace string          `json:"namespace"`
	Name      string          `json:"name"`
	UID       string          `json:"uid"`
	Pods      []string        `json:"pods,omitempty"` // that it is or was reserved for
	State     string          `json:"state"`          // ClaimPulling, ClaimBegun, ClaimPrepared, ClaimOwing or ClaimRefused
	Devices   []ClaimDevice   `json:"devices,omitempty"`
	Artifacts []ClaimArtifact `json:"artifacts,omitempty"`
	KV        *ledger.KV      `json:"kv,omitempty"`
	Since     time.Time       `json:"since"` // of the state
	Progress  string          `json:"progress,omitempty"`
	Err       string          `json:"error,omitempty"` // of the last Prepare
}

// ClaimDevice is one device that a claim has.
type ClaimDevice struct {
	Request string `json:"request"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
	ShareID string `json:"shareID,omitempty"`
	Kind    string `json:"kind"` // a Kind of package ledger; empty in a refused claim
	UUID    string `json:"uuid,omitempty"`
	CDI     string `json:"cdi,omitempty"` // unqualified
}

// ClaimArtifact is one artifact that a claim holds or pulls.
type ClaimArtifact struct {
	Ref     string        `json:"ref"`
	Digest  string        `json:"digest,omitempty"` // empty until it is resolved
	Present units.Bytes   `json:"present"`
	Size    units.Bytes   `json:"size"` // 0: not known
	Left    time.Duration `json:"left,omitempty"`
}

// Claims lists the claims that this node knows, by namespace and name, and those
// that it refused of late.
func (d *Driver) Claims() []ClaimStatus {
	var list []ClaimStatus
	for _, entry := range d.o.Ledger.Entries() {
		list = append(list, d.statusOf(&entry))
	}
	for _, uid := range d.owed.all() {
		if at := slices.IndexFunc(d.o.Ledger.Gone(), func(e ledger.Entry) bool { return e.UID == uid }); at >= 0 {
			entry := d.o.Ledger.Gone()[at]
			status := ClaimStatus{Namespace: entry.Namespace, Name: entry.Name, UID: uid, State: ClaimOwing, Since: entry.Gone, KV: entry.KV}
			status.Progress = "what it held is released as soon as the data role answers"
			list = append(list, status)
		}
	}
	for _, status := range d.answers.all(d.o.Now()) {
		if !slices.ContainsFunc(list, func(has ClaimStatus) bool { return has.UID == status.UID }) {
			list = append(list, status)
		}
	}
	slices.SortFunc(list, func(a, b ClaimStatus) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return list
}

func (d *Driver) statusOf(entry *ledger.Entry) ClaimStatus {
	status := ClaimStatus{Namespace: entry.Namespace, Name: entry.Name, UID: entry.UID, KV: entry.KV, State: ClaimPrepared, Since: entry.Prepared}
	for _, pod := range entry.Pods {
		status.Pods = append(status.Pods, pod.Name)
	}
	for _, r := range entry.Results {
		status.Devices = append(status.Devices, ClaimDevice{Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, Kind: r.Kind, UUID: r.UUID, CDI: r.CDI})
	}
	if entry.State == ledger.Begun {
		status.State, status.Since = ClaimBegun, entry.Begun
	}
	d.pulls.mu.Lock()
	defer d.pulls.mu.Unlock()
	opening := d.pulls.claims[entry.UID]
	for _, w := range entry.Weights {
		artifact := ClaimArtifact{Ref: w.Ref.String(), Size: units.Bytes(w.Size)}
		if !w.Digest.IsZero() {
			artifact.Digest = w.Digest.String()
		}
		if entry.State == ledger.Prepared {
			artifact.Present = artifact.Size
		}
		if opening != nil { // it is being prepared, or again what it was before a boot
			if pull := opening.pulls[w.Request]; pull != nil {
				artifact.Present, artifact.Size, artifact.Left = pull.progress.Present, pull.progress.Size, pull.progress.Left
				if !pull.verdict.ready {
					status.Progress = join(status.Progress, pull.verdict.text)
				}
				if !pull.verdict.ready && entry.State == ledger.Begun {
					status.State = ClaimPulling
				}
			}
		}
		status.Artifacts = append(status.Artifacts, artifact)
	}
	status.Err = d.answers.errorOf(entry.UID, d.o.Now())
	return status
}

func join(text, more string) string {
	if text == "" {
		return more
	}
	return text + "; " + more
}

// Stats are the driver's counters since it started.
type Stats struct {
	Calls             map[Call]CallStats `json:"calls"`
	GPUSecondsWaiting float64            `json:"gpuSecondsWaiting"` // GPUs times seconds that claims waited for weights
	Prepared          int                `json:"prepared"`          // claims now
	Begun             int                `json:"begun"`             // claims now
	Owing             int                `json:"owing"`             // claims that are gone and hold something yet
	PullsFailed       uint64             `json:"pullsFailed"`       // pulls for claims that could not succeed
	RecoverFailed     uint64             `json:"recoverFailed"`     // recoveries that left something for the next
}

// Stats gives the counters.
func (d *Driver) Stats() Stats {
	s := Stats{Calls: d.calls.snapshot(), Owing: len(d.owed.all()), RecoverFailed: d.recoverFailed.Load()}
	for _, entry := range d.o.Ledger.Entries() {
		if entry.State == ledger.Prepared {
			s.Prepared++
		} else {
			s.Begun++
		}
	}
	now := d.o.Now()
	d.pulls.mu.Lock()
	defer d.pulls.mu.Unlock()
	s.GPUSecondsWaiting, s.PullsFailed = d.pulls.waited, d.pulls.failures
	for _, c := range d.pulls.claims {
		s.GPUSecondsWaiting += c.gpuSeconds(now)
	}
	return s
}

// HeldChanged holds a signal, for one reader, after DevicesOfPod may give others.
func (d *Driver) HeldChanged() <-chan struct{} { return d.held }

// DevicesOfPod gives the GPUs of the claims that are reserved for a pod, sorted.
func (d *Driver) DevicesOfPod(podUID string) []string {
	var devices []string
	for _, entry := range d.o.Ledger.Entries() {
		if !slices.ContainsFunc(entry.Pods, func(p ledger.Pod) bool { return p.UID == podUID }) {
			continue
		}
		for _, r := range entry.Results {
			if r.Kind == ledger.KindGPU && !r.AdminAccess {
				devices = append(devices, r.Device)
			}
		}
	}
	slices.Sort(devices)
	return slices.Compact(devices)
}
