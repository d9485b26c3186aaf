package dradriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// journalled gives the journal's lines of a claim, "event pods sharers".
func (r *rig) journalled(t *testing.T, uid string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(r.dir, "claims", "journal", "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			var l struct {
				Event, Claim  string
				Pods, Sharers []string
			}
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
			if l.Claim == uid {
				lines = append(lines, fmt.Sprint(l.Event, l.Pods, l.Sharers))
			}
		}
	}
	return lines
}

func TestPodsThatShareAPreparedClaimLaterAreKnownAndJournalled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	uid := string(c.UID)
	r.mustPrepare(t, c)
	// The kubelet does not ask again for the second pod; the API server knows it.
	r.cluster.states[uid] = ClaimState{Exists: true, AllocatedHere: true, Pods: []ledger.Pod{{Name: "pod", UID: "pod-uid"}, {Name: "second", UID: "second-uid"}}}
	r.mustRecover(t)
	if devices := r.DevicesOfPod("second-uid"); !slices.Equal(devices, []string{"gpu-0"}) {
		t.Errorf("devices of the second pod: %v", devices)
	}
	// A kubelet that was restarted asks again, and the first pod has ended.
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: "second", UID: "second-uid"}, {Resource: "pods", Name: "third", UID: "third-uid"},
	}
	r.mustPrepare(t, c)
	r.reopen(t)
	if got := r.Claims(); len(got) != 1 || !slices.Equal(got[0].Pods, []string{"pod", "second", "third"}) {
		t.Errorf("claims %+v", got)
	}
	r.mustPrepare(t, withUID(allocated(weightsResult("model", llama)), "team", "sharer"))
	r.mustUnprepare(t, c.UID)
	want := []string{"prepared[pod] []", "pods[pod second] []", "pods[second third] []", "unprepared[pod second third] [uid-sharer]"}
	if got := r.journalled(t, uid); !slices.Equal(got, want) {
		t.Errorf("journal %q, want %q", got, want)
	}
	r.mustUnprepare(t, "uid-sharer")
	r.wantNothing(t)
}

func TestRecoverTakesNoClaimOfAnEarlierBootForOneOfThisBoot(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	uid := string(c.UID)
	r.mustPrepare(t, c)
	r.boot = "boot-2"
	r.reopen(t)
	// The boot numbered the device nodes anew, and another pod waits for the claim.
	devices := twoGPUs()
	devices[0].Device.Nodes = []string{"/dev/nvidia7"}
	r.devices.set(devices)
	r.cluster.states[uid] = ClaimState{Exists: true, AllocatedHere: true, Pods: []ledger.Pod{{Name: "second", UID: "second-uid"}}}
	r.mustRecover(t)
	if entry, known := r.o.Ledger.Get(uid); !known || entry.Boot != "boot-1" {
		t.Errorf("known %t, of boot %s", known, entry.Boot)
	}
	// It goes before the kubelet asks for it again; nobody unprepares it.
	r.cluster.states[uid] = ClaimState{}
	r.mustRecover(t)
	r.wantNothing(t)
}

func TestABegunClaimLearnsThePodsThatCame(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := withUID(wants(vanished), "team", "cold")
	if err := r.prepare(t, c).Err; err == nil {
		t.Fatal("a pull that only began is no success")
	}
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: "second-uid"})
	_ = r.prepare(t, c)
	if entry, _ := r.o.Ledger.Get(string(c.UID)); !slices.Contains(entry.Pods, ledger.Pod{Name: "second", UID: "second-uid"}) {
		t.Errorf("pods %+v", entry.Pods)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestThePodsOfAClaimAreBoundedAndThoseThatEndedGoFirst(t *testing.T) {
	t.Parallel()
	pod := func(n int) ledger.Pod { return ledger.Pod{Name: fmt.Sprint("pod-", n), UID: fmt.Sprint("uid-", n)} }
	var had, now []ledger.Pod
	for n := range ledger.MaxPods {
		had = append(had, pod(n))
	}
	now = append(now, pod(0), pod(1000), pod(1001))
	left := pod(3)
	left.Left = planNow
	got := withPods(had, now, planNow)
	if has := func(n int) bool {
		return slices.ContainsFunc(got, func(p ledger.Pod) bool { return p.UID == pod(n).UID })
	}; len(got) != ledger.MaxPods || has(1) || has(2) || !slices.Contains(got, left) {
		t.Errorf("%d pods, %+v", len(got), got[:3])
	}
	for _, p := range now {
		if !slices.Contains(got, p) {
			t.Errorf("%s is missing", p.Name)
		}
	}
	if again := withPods(got, now, planNow.Add(time.Hour)); !slices.Equal(again, got) {
		t.Error("the same pods are others")
	}
	if back := withPods(got, []ledger.Pod{pod(3)}, planNow); !slices.Contains(back, pod(3)) {
		t.Error("a pod that is there again counts as gone")
	}
}

func TestARefusedClaimIsListedWithTheReasonUntilItIsPreparedOrEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.mustPrepare(t, withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "first"))
	second := withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "second")
	refusedNow := func() []ClaimStatus {
		return slices.DeleteFunc(r.Claims(), func(c ClaimStatus) bool { return c.State != ClaimRefused })
	}
	if r.prepare(t, second).Err == nil {
		t.Fatal("a GPU of two claims")
	}
	got := refusedNow()
	if len(got) != 1 || got[0].Name != "second" || !strings.Contains(got[0].Err, "in use by claim team/first") ||
		!slices.Equal(got[0].Pods, []string{"pod"}) || len(got[0].Devices) != 1 || got[0].Devices[0].Device != "gpu-0" {
		t.Errorf("refused %+v", got)
	}
	since := got[0].Since
	r.now.add(time.Minute)
	_ = r.prepare(t, second)
	if got := refusedNow(); len(got) != 1 || !got[0].Since.Equal(since) {
		t.Errorf("asked again: %+v", got)
	}
	r.now.add(refusedFor)
	if got := refusedNow(); len(got) != 0 {
		t.Errorf("long after: %+v", got)
	}
	_ = r.prepare(t, second)
	r.mustUnprepare(t, "uid-first")
	r.mustPrepare(t, second)
	if got := refusedNow(); len(got) != 0 {
		t.Errorf("prepared: %+v", got)
	}
	third := withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "third")
	_ = r.prepare(t, third)
	r.mustUnprepare(t, third.UID, second.UID)
	if got := r.Claims(); len(got) != 0 {
		t.Errorf("unprepared: %+v", got)
	}
	for n := range maxRefused + 3 {
		r.now.add(time.Second)
		_ = r.prepare(t, withUID(allocated(gpuResult("gpu", "none")), "team", fmt.Sprint("many-", n)))
	}
	if got := refusedNow(); len(got) != maxRefused || slices.ContainsFunc(got, func(c ClaimStatus) bool { return c.Name == "many-2" }) {
		t.Errorf("%d are remembered", len(got))
	}
	r.wantNothing(t)
}

func TestALateClaimGainsNothingFromAnotherOfItsCallThatHadToBeUndone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.mustPrepare(t, withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "moved"))
	early := context.WithValue(t.Context(), arrivalKey{}, arrival{ticket: r.o.Ledger.Arrive()})
	late := withUID(allocated(weightsResult("model", llama)), "team", "late")
	r.mustPrepare(t, late)
	r.mustUnprepare(t, late.UID)
	moved := withUID(allocated(gpuResult("gpu", "gpu-1")), "team", "moved")
	all, err := r.PrepareResourceClaims(early, []*resourceapi.ResourceClaim{moved, late})
	if err != nil || all[moved.UID].Err != nil || !errors.Is(all[late.UID].Err, ledger.ErrUnprepared) {
		t.Errorf("moved: %v, late: %v, %v", all[moved.UID].Err, all[late.UID].Err, err)
	}
	r.mustUnprepare(t, types.UID("uid-moved"))
	r.wantNothing(t)
}

func TestPodsOfWhichNobodyKnowsDidNotLeave(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	uid := string(c.UID)
	r.mustPrepare(t, c)
	r.cluster.err = errors.New("no answer")
	r.mustRecover(t)
	r.cluster.err, r.cluster.states[uid] = nil, ClaimState{} // force-deleted; its containers may run
	r.mustRecover(t)
	// A call that comes while the API server is asked knows better than its answer.
	r.cluster.states[uid] = ClaimState{Exists: true, AllocatedHere: true, Pods: []ledger.Pod{{Name: "pod", UID: "pod-uid"}}}
	r.cluster.asking, r.cluster.answering = make(chan struct{}), make(chan struct{})
	ended := make(chan error, 1)
	go func() { ended <- r.Recover(t.Context()) }()
	<-r.cluster.asking
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: "second-uid"})
	r.mustPrepare(t, c)
	close(r.cluster.answering)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	entry, _ := r.o.Ledger.Get(uid)
	if want := []ledger.Pod{{Name: "pod", UID: "pod-uid"}, {Name: "second", UID: "second-uid"}}; !slices.Equal(entry.Pods, want) {
		t.Errorf("pods %+v", entry.Pods)
	}
	if got, want := r.journalled(t, uid), []string{"prepared[pod] []", "pods[pod second] []"}; !slices.Equal(got, want) {
		t.Errorf("journal %q, want %q", got, want)
	}
}
