package dradriver

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

const (
	// maxRefused bounds the claims whose last answer is remembered; of more the
	// oldest answer goes.
	maxRefused = 256
	// refusedFor is how long an answer counts: the kubelet asks again within
	// minutes for as long as a pod waits, and tells nobody when it ceases to.
	refusedFor = 10 * time.Minute
)

// refused is the error with which the last Prepare of a claim ended.
type refused struct {
	claim ClaimStatus // as the call had it; its Err is the answer
	at    time.Time
}

// answers remembers the claims whose last Prepare failed. Most of them are in
// the ledger; one whose plan or devices were refused is nowhere else.
type answers struct {
	mu     sync.Mutex
	claims map[string]refused // by UID
}

func newAnswers() *answers { return &answers{claims: map[string]refused{}} }

// failed notes an answer that was an error.
func (a *answers) failed(claim *resourceapi.ResourceClaim, err error, at time.Time) {
	status := ClaimStatus{Namespace: claim.Namespace, Name: claim.Name, UID: string(claim.UID), State: ClaimRefused, Since: at, Err: err.Error()}
	for _, pod := range PodsOf(claim) {
		status.Pods = append(status.Pods, pod.Name)
	}
	for _, r := range ourResults(claim) {
		status.Devices = append(status.Devices, ClaimDevice{Request: r.Request, Pool: r.Pool, Device: r.Device})
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if had, ok := a.claims[status.UID]; ok {
		status.Since = had.claim.Since
	}
	a.claims[status.UID] = refused{claim: status, at: at}
	if len(a.claims) > maxRefused {
		oldest := slices.MinFunc(slices.Sorted(maps.Keys(a.claims)), func(x, y string) int {
			return cmp.Or(a.claims[x].at.Compare(a.claims[y].at), cmp.Compare(x, y))
		})
		delete(a.claims, oldest)
	}
}

// forget ends what is remembered of a claim that is prepared, or unprepared.
func (a *answers) forget(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.claims, uid)
}

// errorOf is the last answer to a claim, empty where it was none or was long ago.
func (a *answers) errorOf(uid string, now time.Time) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if had, ok := a.claims[uid]; ok && now.Sub(had.at) < refusedFor {
		return had.claim.Err
	}
	return ""
}

// all gives the claims whose last answer counts yet.
func (a *answers) all(now time.Time) []ClaimStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.claims, func(_ string, r refused) bool { return now.Sub(r.at) >= refusedFor })
	list := make([]ClaimStatus, 0, len(a.claims))
	for _, r := range a.claims {
		list = append(list, r.claim)
	}
	return list
}

// withPods are the pods that an entry has, those that have come since, and of
// those that went that they did: the kubelet does not ask again for a pod that
// shares a prepared claim. Past 256 those that went go first.
func withPods(had, now []ledger.Pod, at time.Time) []ledger.Pod {
	pods := slices.Clone(had)
	for i := range pods {
		there := slices.ContainsFunc(now, func(p ledger.Pod) bool { return p.UID == pods[i].UID })
		switch {
		case there:
			pods[i].Left = time.Time{}
		case pods[i].Left.IsZero():
			pods[i].Left = at.Round(0).UTC()
		}
	}
	for _, pod := range now {
		if !slices.ContainsFunc(pods, func(p ledger.Pod) bool { return p.UID == pod.UID }) {
			pods = append(pods, pod)
		}
	}
	for over := len(pods) - ledger.MaxPods; over > 0; over-- {
		ended := slices.IndexFunc(pods, func(p ledger.Pod) bool { return !p.Left.IsZero() })
		pods = slices.Delete(pods, max(ended, 0), max(ended, 0)+1)
	}
	return pods
}
