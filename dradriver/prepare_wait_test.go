package dradriver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
)

// patient is a driver that waits for pulls, in a bubble and with its clock.
func patient(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.o.PullWait, r.now.real = defaultPullWait, true
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	return r
}

// after moves the pull of an artifact once some time has passed.
func (r *rig) after(t *testing.T, d time.Duration, a stock.Artifact, p stock.Progress) {
	t.Helper()
	time.AfterFunc(d, func() {
		if err := r.cache.Advance(a.Ref, p); err != nil {
			t.Error(err)
		}
	})
}

func whole(a stock.Artifact) stock.Progress {
	return stock.Progress{Present: a.Size, Size: a.Size}
}

// going is a pull that says how long it takes yet.
func going(a stock.Artifact, left time.Duration) stock.Progress {
	return stock.Progress{Present: a.Size / 3, Size: a.Size, Left: left}
}

// took wants a call to have taken a time.
func took(t *testing.T, since time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(since); got != want {
		t.Errorf("it took %s, want %s", got, want)
	}
}

func TestAPrepareWaitsForAPullThatEndsSoonAndPreparesInTheSameCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		r.after(t, 700*time.Millisecond, vanished, going(vanished, 15*time.Second))
		r.after(t, 15300*time.Millisecond, vanished, whole(vanished))
		start := time.Now()
		r.mustPrepare(t, c)
		took(t, start, 15300*time.Millisecond) // by the signal, not by the next tick
		if s := r.Stats(); s.Calls[CallPrepare].Waiting != 0 || s.Calls[CallPrepare].Errors != 0 || s.Prepared != 1 || s.GPUSecondsWaiting != 15.3 {
			t.Errorf("stats %+v", s)
		}
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}

func TestAPrepareWaitsNoLongerThanItIsWorth(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first stock.Progress // what the pull says at once
		later stock.Progress // and after a second
		ctx   time.Duration  // of the call's deadline; 0 is none
		want  time.Duration  // that the first call takes
		again time.Duration  // that a call a minute later takes
	}{
		"a rate that says too late is learnt from once": {going(vanished, 10*time.Minute), going(vanished, 9*time.Minute), 0, learnWithin, 0},
		"a pull without a rate shows none":              {stock.Progress{}, stock.Progress{}, 0, learnWithin, learnWithin},
		"a pull that says soon and is not there":        {stock.Progress{}, going(vanished, 10*time.Second), 0, defaultPullWait, defaultPullWait},
		"one that was said to be soon slows down":       {going(vanished, time.Second), going(vanished, time.Hour), 0, defaultPullWait, 0},
		"one that is whole and being checked":           {whole3(vanished), whole3(vanished), 0, defaultPullWait, defaultPullWait},
		"a call that ends before the bound":             {going(vanished, time.Second), going(vanished, time.Second), 12 * time.Second, 7 * time.Second, 7 * time.Second},
		"a call that ends too soon for any wait":        {going(vanished, time.Second), going(vanished, time.Second), 4 * time.Second, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := patient(t)
				claim := wants(vanished)
				r.after(t, 0, vanished, c.first)
				r.after(t, time.Second, vanished, c.later)
				synctest.Wait()
				for i, want := range []time.Duration{c.want, c.again} {
					ctx, cancel := context.WithCancel(t.Context())
					if c.ctx > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), c.ctx)
					}
					start := time.Now()
					all, err := r.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim})
					if err != nil || !errors.Is(all[claim.UID].Err, errWaiting) {
						t.Errorf("call %d: %v, %v", i, all, err)
					}
					took(t, start, want)
					cancel()
					time.Sleep(time.Minute)
				}
				if s := r.Stats().Calls[CallPrepare]; s.Waiting != 2 || s.Errors != 2 || s.InFlight != 0 {
					t.Errorf("stats %+v", s)
				}
				r.mustUnprepare(t, claim.UID)
				r.wantNothing(t)
			})
		})
	}
}

// whole3 is a pull that has landed and is not Ready: its size is what the source
// says, which the artifact's own is not.
func whole3(a stock.Artifact) stock.Progress {
	return stock.Progress{Present: a.Size / 3, Size: a.Size / 3}
}

func TestTheTextOfAPrepareThatWaitedIsOfNow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		r.after(t, 2500*time.Millisecond, vanished, going(vanished, 10*time.Minute))
		err := r.prepare(t, c).Err
		if err == nil || !strings.Contains(err.Error(), "pulling org/vanished, 33 %, about 10 min left") {
			t.Errorf("answer %v", err)
		}
		r.mustUnprepare(t, c.UID)
	})
}

func TestAnUnprepareEndsTheWaitOfAPrepareAtOnceAndNothingIsPrepared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c, other := wants(vanished), withUID(allocated(gpuResult("gpu", "gpu-1")), "team", "other")
		r.after(t, 0, vanished, going(vanished, 15*time.Second))
		start := time.Now()
		answers := make(chan kubeletplugin.PrepareResult, 2)
		call := func() {
			// One call of two claims, of which one is prepared at once.
			all, err := r.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c, other})
			if err != nil {
				t.Error(err)
			}
			answers <- all[c.UID]
		}
		go call()
		synctest.Wait()
		if entry, _ := r.o.Ledger.Get(string(other.UID)); entry.State != ledger.Prepared {
			t.Errorf("while the call waits for another claim, this one is %q", entry.State)
		}
		go call() // as after a kubelet's restart; it waits for its turn
		time.Sleep(5 * time.Second)
		synctest.Wait()
		// An Unprepare of either claim ends the wait of the call that has both;
		// the call behind it then waits for the claim that it can prepare yet.
		r.mustUnprepare(t, other.UID)
		took(t, start, 5*time.Second)
		first := <-answers
		synctest.Wait()
		r.mustUnprepare(t, c.UID)
		took(t, start, 5*time.Second)
		for _, answer := range []kubeletplugin.PrepareResult{first, <-answers} {
			if !errors.Is(answer.Err, errWaiting) {
				t.Errorf("answer %v", answer.Err)
			}
		}
		r.wantNothing(t)
	})
}

func TestAPrepareThatQueuedBehindAnUnprepareIsTooLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		late := r.o.Ledger.Arrive()
		r.after(t, 0, vanished, going(vanished, 15*time.Second))
		first := make(chan kubeletplugin.PrepareResult, 1)
		go func() { first <- r.prepare(t, c) }()
		synctest.Wait()
		r.mustUnprepare(t, c.UID)
		<-first
		visit, err := r.calls.enter(t.Context(), []string{string(c.UID)}, rankPrepare)
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.WithValue(t.Context(), arrivalKey{}, arrival{ticket: late, at: time.Now(), visit: visit})
		all, err := r.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
		visit.leave()
		if err != nil || !errors.Is(all[c.UID].Err, ledger.ErrUnprepared) {
			t.Errorf("answer %v, %v", all, err)
		}
		synctest.Wait()
		r.wantNothing(t)
	})
}

func TestClaimsOfOneCallWaitSideBySide(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		var claims []*resourceapi.ResourceClaim
		var uids []types.UID
		for i := range byte(3 * maxHolds) {
			a := simstock.Sample(fmt.Sprintf("m%d", i), 10+i)
			r.cache.Offer(a.Ref, simstock.Origin{Artifact: a, Manual: true})
			r.after(t, 0, a, going(a, 9*time.Second))
			r.after(t, time.Duration(9000-100*int(i))*time.Millisecond, a, whole(a))
			c := withUID(configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"ref":"`+a.Ref.String()+`"`)), "team", a.Model)
			claims, uids = append(claims, c), append(uids, c.UID)
		}
		start := time.Now()
		all, err := r.PrepareResourceClaims(t.Context(), claims)
		if err != nil {
			t.Fatal(err)
		}
		took(t, start, 9*time.Second)
		for uid, result := range all {
			if result.Err != nil {
				t.Errorf("%s: %v", uid, result.Err)
			}
		}
		r.mustUnprepare(t, uids...)
		r.wantNothing(t)
	})
}

func TestAPullThatFailsWhileAPrepareWaitsIsAnsweredAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		r.after(t, 0, vanished, going(vanished, 10*time.Second))
		time.AfterFunc(4200*time.Millisecond, func() {
			r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Failed: "no space", Reason: "NoSpace", Final: true})
			r.cache.SetDown(false) // signals
		})
		start := time.Now()
		err := r.prepare(t, c).Err
		if err == nil || errors.Is(err, errWaiting) || !strings.Contains(err.Error(), "no space (NoSpace)") {
			t.Errorf("answer %v", err)
		}
		took(t, start, 4200*time.Millisecond)
		if len(r.cluster.events) != 2 {
			t.Errorf("events %q", r.cluster.events)
		}
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}

func TestADataRoleThatGoesWhileAPrepareWaitsIsWhatTheAnswerSays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		r.after(t, 0, vanished, going(vanished, 10*time.Second))
		time.AfterFunc(4200*time.Millisecond, func() { r.cache.SetDown(true) })
		start := time.Now()
		if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrUnavailable) {
			t.Errorf("answer %v", err)
		}
		took(t, start, 4200*time.Millisecond)
		r.cache.SetDown(false)
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}

func TestAClaimThatLacksMoreThanWeightsOnTheirWayIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, kvResult("kv", "64Gi", "0"))
		r.after(t, 0, vanished, going(vanished, 10*time.Second))
		synctest.Wait()
		start := time.Now()
		if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrNoSpace) {
			t.Errorf("answer %v", err)
		}
		took(t, start, 0)
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}

func TestNobodyElseAsksForAPullThatAPrepareWaitsForAndRecoveryPassesItBy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := wants(vanished)
		r.after(t, 0, vanished, going(vanished, 10*time.Second))
		r.after(t, 10*time.Second, vanished, whole(vanished))
		answer := make(chan kubeletplugin.PrepareResult, 1)
		go func() { answer <- r.prepare(t, c) }()
		synctest.Wait()
		start := time.Now()
		r.pulls.poll(t.Context())
		r.mustRecover(t)
		took(t, start, 0)
		if result := <-answer; result.Err != nil {
			t.Error(result.Err)
		}
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}
