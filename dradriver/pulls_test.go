package dradriver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
)

// wants is a claim of a GPU and of a model that is not there.
func wants(a stock.Artifact) *resourceapi.ResourceClaim {
	return configured(allocated(gpuResult("gpu", "gpu-0"), coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"ref":"`+a.Ref.String()+`"`))
}

func signalled(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAPullThatCannotSucceedIsToldOnceToAllWhoWait(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Failed: "403: accept the license first", Reason: "Forbidden", Final: true})
	c := wants(vanished)
	for range 3 {
		err := r.prepare(t, c).Err
		if err == nil || !strings.Contains(err.Error(), "cannot pull hub://org/vanished@main: 403: accept the license first (Forbidden)") || errors.Is(err, errWaiting) {
			t.Fatalf("answer %v", err)
		}
	}
	const text = "WeightsPullFailed: cannot pull hub://org/vanished@main: 403: accept the license first"
	if diff := cmp.Diff([]string{"ResourceClaim claim: " + text, "Pod pod: " + text}, r.cluster.events); diff != "" {
		t.Error(diff)
	}
	want := []DeviceCondition{{Pool: "n1/weights", Device: "cold", ShareID: "share-cold", Condition: metav1.Condition{
		Type: "Prepared", Status: metav1.ConditionFalse, Reason: "Forbidden", Message: "cannot pull hub://org/vanished@main: 403: accept the license first",
	}}}
	if diff := cmp.Diff(want, r.cluster.conditions); diff != "" {
		t.Error(diff)
	}
	if len(r.cluster.deleted) > 0 {
		t.Errorf("pods %v were deleted, and no class asks for it", r.cluster.deleted)
	}
	failure, counts := r.ColdFailure()
	if !counts || failure.Reason != "Forbidden" || !failure.Since.Equal(planNow) || !signalled(r.ColdFailureChanged()) {
		t.Errorf("cold failure %+v (%t)", failure, counts)
	}
	if s := r.Stats(); s.PullsFailed != 1 || s.Calls[CallPrepare].Errors != 3 || s.Calls[CallPrepare].Waiting != 0 {
		t.Errorf("stats %+v", s)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestAFailedPullCountsForTheColdDeviceForTenMinutes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Failed: "404", Reason: "NotFound", Final: true})
	r.prepare(t, wants(vanished))
	r.now.add(coldFailureFor - time.Second)
	if _, counts := r.ColdFailure(); !counts {
		t.Error("the failure counts no more before its time")
	}
	r.now.add(time.Second)
	if _, counts := r.ColdFailure(); counts {
		t.Error("the failure counts after its time")
	}
}

func TestAPullThatSucceedsClearsTheColdDeviceAndTheCondition(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Failed: "no space", Reason: "NoSpace", Final: true})
	c := wants(vanished)
	r.prepare(t, c)
	signalled(r.ColdFailureChanged())
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished})
	r.prepare(t, c)
	r.mustPrepare(t, c)
	if failure, counts := r.ColdFailure(); counts || !signalled(r.ColdFailureChanged()) {
		t.Errorf("cold failure %+v still counts", failure)
	}
	last := r.cluster.conditions[len(r.cluster.conditions)-1]
	if last.Condition.Status != metav1.ConditionTrue || last.Device != "cold" {
		t.Errorf("last condition %+v", last)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestAConditionOfAnEarlierLifeIsTakenBack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := allocated(gpuResult("gpu", "gpu-0"))
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: Name, Pool: testNode, Device: "gpu-0", Conditions: []metav1.Condition{{Type: ConditionPrepared, Status: metav1.ConditionFalse}},
	}}
	r.mustPrepare(t, c)
	if len(r.cluster.conditions) != 1 || r.cluster.conditions[0].Condition.Status != metav1.ConditionTrue {
		t.Errorf("conditions %+v", r.cluster.conditions)
	}
}

func TestAPullThatTakesTooLongFailsAndGoesOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	if err := r.cache.Advance(vanished.Ref, stock.Progress{Present: 1 << 20, Size: vanished.Size}); err != nil {
		t.Fatal(err)
	}
	c := configured(wants(vanished), fromClass, Name, kind("ClassConfig", `,"pullDeadline":"5m","deletePodOnPullFailure":true`), "model")
	if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
		t.Fatalf("first answer %v", err)
	}
	r.now.add(5 * time.Minute)
	// Nobody asks; the driver looks by itself.
	r.pulls.poll(t.Context())
	const text = "not there within its time: pulling org/vanished, 33 %"
	if len(r.cluster.events) != 2 || !strings.HasSuffix(r.cluster.events[0], text) {
		t.Errorf("events %q, want %q", r.cluster.events, text)
	}
	if diff := cmp.Diff([]string{"pod"}, r.cluster.deleted); diff != "" {
		t.Error(diff)
	}
	if failure, counts := r.ColdFailure(); !counts || failure.Reason != ReasonDeadline {
		t.Errorf("cold failure %+v (%t)", failure, counts)
	}
	if err := r.prepare(t, c).Err; err == nil || errors.Is(err, errWaiting) || !strings.Contains(err.Error(), text+" ("+ReasonDeadline+")") {
		t.Errorf("answer past the deadline %v", err)
	}
	if err := r.cache.Advance(vanished.Ref, stock.Progress{Present: vanished.Size, Size: vanished.Size}); err != nil {
		t.Fatal(err)
	}
	r.mustPrepare(t, c)
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestADeadlineOutlivesARestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	c := wants(vanished)
	r.prepare(t, c)
	r.now.add(29 * time.Minute)
	r.reopen(t)
	if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
		t.Errorf("a minute before the deadline: %v", err)
	}
	r.now.add(time.Minute)
	if err := r.prepare(t, c).Err; err == nil || errors.Is(err, errWaiting) {
		t.Errorf("at the deadline: %v", err)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestTheWaitOfGPUsForWeightsIsCounted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	c := wants(vanished)
	foreign := resourceapi.DeviceRequestAllocationResult{Request: "theirs", Driver: "gpu.nvidia.com", Pool: testNode, Device: "gpu-7"}
	c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, foreign)
	r.prepare(t, c)
	r.now.add(10 * time.Second)
	if got := r.Stats().GPUSecondsWaiting; got != 20 {
		t.Errorf("%v GPU seconds after 10 s of two GPUs", got)
	}
	if err := r.cache.Advance(vanished.Ref, stock.Progress{Present: vanished.Size, Size: vanished.Size}); err != nil {
		t.Fatal(err)
	}
	r.mustPrepare(t, c)
	r.now.add(time.Hour)
	if got := r.Stats().GPUSecondsWaiting; got != 20 {
		t.Errorf("%v GPU seconds long after the claim was prepared", got)
	}
}

func TestNothingIsPulledForAClaimThatWasUnprepared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	c := wants(vanished)
	r.prepare(t, c)
	r.mustUnprepare(t, c.UID)
	r.pulls.poll(t.Context())
	r.pulls.look(t.Context(), string(c.UID))
	r.wantNothing(t)
}

func TestARefThatMovedIsNotTakenForWhatWasAllocated(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	moved := simstock.Sample("vanished", 9)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: moved})
	c := configured(allocated(weightsResult("model", vanished)), fromClaim, Name, kind("WeightsConfig", `,"ref":"`+vanished.Ref.String()+`"`))
	r.prepare(t, c)
	err := r.prepare(t, c).Err
	if err == nil || !strings.Contains(err.Error(), "now means artifact "+moved.Digest.String()) {
		t.Errorf("answer %v", err)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestWhatWentBetweenAllocationAndPrepareIsPulledAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	at := llama.Ref
	at.Revision = llama.Commit
	again := llama
	again.Ref = at
	r.cache.Offer(at, simstock.Origin{Artifact: again})
	if err := r.cache.Remove(llama.Digest); err != nil {
		t.Fatal(err)
	}
	c := allocated(weightsResult("model", llama))
	if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
		t.Fatalf("first answer %v", err)
	}
	r.mustPrepare(t, c)
	entry, _ := r.o.Ledger.Get(string(c.UID))
	if entry.State != ledger.Prepared || entry.Weights[0].Digest != llama.Digest {
		t.Errorf("entry %+v", entry)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestTheLoopTellsWhenAFailureCountsNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.now.real = true
		r.cache.Offer(vanished.Ref, simstock.Origin{Failed: "404", Reason: "NotFound", Final: true})
		r.prepare(t, wants(vanished))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.pulls.run(ctx)
		}()
		time.Sleep(pollEvery + time.Second)
		signalled(r.ColdFailureChanged())
		time.Sleep(coldFailureFor - 2*pollEvery - time.Second)
		if signalled(r.ColdFailureChanged()) {
			t.Error("a signal came while the failure counts")
		}
		time.Sleep(3 * pollEvery)
		if _, counts := r.ColdFailure(); counts || !signalled(r.ColdFailureChanged()) {
			t.Error("no signal told that the failure counts no more")
		}
		cancel()
		<-ended
	})
}
