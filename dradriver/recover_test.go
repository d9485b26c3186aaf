package dradriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
)

func (r *rig) mustRecover(t *testing.T) {
	t.Helper()
	if err := r.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestRecoverGivesAPreparedClaimBackWhatItLacks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	uid := string(c.UID)
	entry, _ := r.o.Ledger.Get(uid)
	if err := errors.Join(r.o.CDI.Remove(uid), r.cache.Release(t.Context(), uid), r.kv.Release(t.Context(), uid)); err != nil {
		t.Fatal(err)
	}
	r.mustRecover(t)
	held, err := r.heldBy(t.Context())
	if err != nil || !slices.Equal(held, []string{uid}) {
		t.Errorf("held by %v, %v", held, err)
	}
	if same, err := r.o.CDI.Matches(uid, cdi.DevicesOf(entry)); err != nil || !same {
		t.Errorf("the CDI file is the same: %t, %v", same, err)
	}
	if _, err := os.Stat(entry.KV.Dir); err != nil {
		t.Errorf("the KV directory: %v", err)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestRecoverReleasesWhatNobodyKnows(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if _, err := r.cache.Hold(t.Context(), llama.Digest, "stranger"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.kv.Reserve(t.Context(), stock.Reservation{Claim: "other-stranger", Namespace: "n", Memory: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.o.CDI.Write("third-stranger", []cdi.Device{{Name: "d", Edits: ledger.Edits{Env: []string{"A=b"}}}}); err != nil {
		t.Fatal(err)
	}
	r.mustRecover(t)
	r.wantNothing(t)
}

func TestRecoverUndoesABegunClaimThatNobodyWants(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]ClaimState{
		"gone":             {},
		"allocated anew":   {Exists: true},
		"still what it is": {Exists: true, AllocatedHere: true},
	} {
		r := newRig(t)
		r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
		c := wants(vanished)
		r.prepare(t, c)
		uid := string(c.UID)
		// While the API server does not answer, nothing is undone.
		r.cluster.err = errors.New("no answer")
		r.mustRecover(t)
		if _, known := r.o.Ledger.Get(uid); !known {
			t.Fatalf("%s: undone without an answer of the API server", name)
		}
		r.cluster.err, r.cluster.states = nil, map[string]ClaimState{uid: state}
		r.mustRecover(t)
		if state.AllocatedHere {
			if _, known := r.o.Ledger.Get(uid); !known {
				t.Errorf("%s: undone", name)
			}
			continue
		}
		r.wantNothing(t)
	}
}

func TestAQuestionToTheAPIServerKeepsNoClaimWaiting(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.SetDown(true)
	c := everything()
	r.prepare(t, c)
	r.cache.SetDown(false)
	r.cluster.states[string(c.UID)] = ClaimState{}
	r.cluster.asking, r.cluster.answering = make(chan struct{}), make(chan struct{})
	ended := make(chan error, 1)
	go func() { ended <- r.Recover(t.Context()) }()
	<-r.cluster.asking
	// The claim is prepared while the answer, which says that it is gone, is on
	// its way: the answer is of a claim that was not prepared.
	r.mustPrepare(t, c)
	close(r.cluster.answering)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if entry, known := r.o.Ledger.Get(string(c.UID)); !known || entry.State != ledger.Prepared {
		t.Errorf("a claim that was prepared meanwhile is %+v", entry)
	}
	r.cluster.asking = nil
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestRecoverHearsASlowAPIServerAndWaitsForItWithWhatNeedsNoAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		const claims = 12
		for i := range claims {
			r.mustPrepare(t, withUID(allocated(weightsResult("model", llama)), "llm", fmt.Sprint("c", i)))
		}
		r.boot = "boot-2"
		r.reopen(t)
		if _, err := r.cache.Hold(t.Context(), llama.Digest, "stranger"); err != nil {
			t.Fatal(err)
		}
		for i := range claims {
			r.cluster.states[fmt.Sprint("uid-c", i)] = ClaimState{}
		}
		r.cluster.takes = 20 * time.Second
		done := make(chan error, 1)
		go func() { done <- r.Recover(t.Context()) }()
		time.Sleep(time.Second)
		if held, err := r.heldBy(t.Context()); err != nil || slices.Contains(held, "stranger") {
			t.Errorf("after 1 s held by %v, %v; what nobody knows waits for no answer", held, err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		r.wantNothing(t)
	})
}

func TestRecoverLeavesAPreparedClaimOfThisBootToTheKubelet(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	uid := string(c.UID)
	r.cluster.states[uid] = ClaimState{}
	r.mustRecover(t)
	if _, known := r.o.Ledger.Get(uid); !known {
		t.Fatal("a claim whose containers may run was undone")
	}
	// No container outlives a boot.
	r.boot = "boot-2"
	r.reopen(t)
	r.mustRecover(t)
	r.wantNothing(t)
}

func TestAPreparedClaimOutlivesABootWhileItIsWanted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	first := r.mustPrepare(t, c)
	r.boot = "boot-2"
	r.reopen(t)
	r.mustRecover(t)
	second := r.mustPrepare(t, c)
	for i := range first.Devices {
		if !slices.Equal(first.Devices[i].CDIDeviceIDs, second.Devices[i].CDIDeviceIDs) {
			t.Errorf("device %d: %v, then %v", i, first.Devices[i].CDIDeviceIDs, second.Devices[i].CDIDeviceIDs)
		}
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestWhatIsOwedIsReleasedBeforeTheClaimIsPreparedAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	entry, _ := r.o.Ledger.Get(string(c.UID))
	if err := os.WriteFile(filepath.Join(entry.KV.Dir, "old"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.kv.SetDown(true)
	r.mustUnprepare(t, c.UID)
	if err := r.prepare(t, c).Err; err == nil || !strings.Contains(err.Error(), "not released yet") {
		t.Errorf("prepare while a release is owed: %v", err)
	}
	r.kv.SetDown(false)
	r.mustPrepare(t, c)
	if _, err := os.Stat(filepath.Join(entry.KV.Dir, "old")); !os.IsNotExist(err) {
		t.Errorf("the claim sees what it had before it was unprepared: %v", err)
	}
	r.mustRecover(t)
	if _, err := os.Stat(entry.KV.Dir); err != nil {
		t.Errorf("recovery took the directory of a prepared claim: %v", err)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestADamagedEntryKeepsItsHoldsUntilItIsUnprepared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	if err := os.WriteFile(filepath.Join(r.dir, "claims", string(c.UID)+".json"), []byte("rubbish\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.reopen(t)
	r.mustRecover(t)
	held, err := r.heldBy(t.Context())
	specs, specsErr := r.o.CDI.List()
	if err := errors.Join(err, specsErr); err != nil || len(held) != 1 || len(specs) != 1 {
		t.Errorf("held by %v, CDI files of %v, %v; a container may use them", held, specs, err)
	}
	r.mustUnprepare(t, c.UID)
	r.mustRecover(t)
	r.wantNothing(t)
}

func TestMetadataOfClaimsThatNobodyKnowsIsSwept(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	spec := func(uid string) string { return filepath.Join(r.dir, "cdi", Name+"_metadata_"+uid+"_gpu.json") }
	folder := func(name string) string { return filepath.Join(r.dir, "plugin", metadataFolder, "team_"+name) }
	for _, path := range []string{folder("claim"), folder("stranger")} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{spec(string(c.UID)), spec("uid-stranger")} {
		if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.mustRecover(t)
	for path, want := range map[string]bool{spec(string(c.UID)): true, folder("claim"): true, spec("uid-stranger"): false, folder("stranger"): false} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s is there: %t, want %t", path, err == nil, want)
		}
	}
	r.mustUnprepare(t, c.UID)
}

func TestAfterABootNothingIsAnsweredBeforeItIsHeldAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	first := r.mustPrepare(t, c)
	uid := string(c.UID)
	before, _ := r.o.Ledger.Get(uid)
	r.boot = "boot-2"
	r.reopen(t)
	if err := errors.Join(r.cache.Release(t.Context(), uid), r.kv.Release(t.Context(), uid)); err != nil {
		t.Fatal(err)
	}
	r.cache.SetDown(true)
	if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrUnavailable) {
		t.Errorf("answer while nothing can be held: %v", err)
	}
	r.cache.SetDown(false)
	// The claim's class is asked for nothing that it was not asked for before.
	r.o.Pools.Weights = false
	second := r.mustPrepare(t, c)
	r.o.Pools.Weights = true
	if diff := cmp.Diff(first.Devices, second.Devices); diff != "" {
		t.Error(diff)
	}
	held, err := r.heldBy(t.Context())
	if err != nil || !slices.Equal(held, []string{uid}) {
		t.Errorf("held by %v, %v", held, err)
	}
	after, _ := r.o.Ledger.Get(uid)
	if _, err := os.Stat(after.KV.Dir); err != nil {
		t.Errorf("the KV directory: %v", err)
	}
	want := before
	want.Boot = "boot-2"
	if diff := cmp.Diff(want, after); diff != "" {
		t.Errorf("the entry: %s", diff)
	}
	// It is of this boot now: the data role is not asked, and only the kubelet ends it.
	r.cache.SetDown(true)
	r.mustPrepare(t, c)
	r.cache.SetDown(false)
	r.cluster.states[uid] = ClaimState{}
	r.mustRecover(t)
	if _, known := r.o.Ledger.Get(uid); !known {
		t.Error("a claim whose containers may run was undone")
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestWeightsThatABootTookArePulledAgainBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	at := vanished.Ref
	other := simstock.Sample("vanished", 9)
	other.Ref = at
	for name, origin := range map[string]simstock.Origin{"the same": {Artifact: vanished}, "another": {Artifact: other}} {
		r := newRig(t)
		r.cache.Offer(at, simstock.Origin{Artifact: vanished})
		c := wants(vanished)
		r.prepare(t, c)
		first := r.mustPrepare(t, c)
		r.boot = "boot-2"
		r.reopen(t)
		r.seen = newMemory() // its commit is not known
		if err := r.cache.Lose(vanished.Digest); err != nil {
			t.Fatal(err)
		}
		r.cache.Offer(at, origin)
		if name == "another" {
			if err := r.prepare(t, c).Err; err == nil || !strings.Contains(err.Error(), "now means artifact "+other.Digest.String()) {
				t.Errorf("a ref that moved: %v", err)
			}
		} else {
			if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
				t.Errorf("first answer %v", err)
			}
			if diff := cmp.Diff(first.Devices, r.mustPrepare(t, c).Devices); diff != "" {
				t.Error(diff)
			}
		}
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	}
}

func TestThePullOfWhatABootTookIsShownAndHasOneDeadlineHoweverOftenTheKubeletAsks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished})
	c := wants(vanished)
	r.prepare(t, c)
	r.mustPrepare(t, c)
	r.boot = "boot-2"
	r.reopen(t)
	r.seen = newMemory() // its commit is not known
	if err := r.cache.Lose(vanished.Digest); err != nil {
		t.Fatal(err)
	}
	r.cache.Offer(vanished.Ref, simstock.Origin{Artifact: vanished, Manual: true})
	if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
		t.Fatal(err)
	}
	if err := r.cache.Advance(vanished.Ref, going(vanished, time.Minute)); err != nil {
		t.Fatal(err)
	}
	r.pulls.poll(t.Context())
	if has := r.Claims()[0]; has.State != ClaimPrepared || has.Artifacts[0].Present != vanished.Size/3 || !strings.Contains(has.Progress, "about 60 s left") {
		t.Errorf("it is shown as %+v", has)
	}
	for asked := range 30 {
		if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
			t.Fatalf("after %d minutes: %v", asked, err)
		}
		r.now.add(time.Minute)
	}
	if err := r.prepare(t, c).Err; err == nil || errors.Is(err, errWaiting) {
		t.Errorf("at the deadline: %v", err)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestOnlyWhatIsOwedIsShownAfterARestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	released, owing := everything(), withUID(allocated(weightsResult("model", mistral)), "team", "owing")
	r.mustPrepare(t, released)
	r.mustPrepare(t, owing)
	r.mustUnprepare(t, released.UID)
	r.cache.SetDown(true)
	r.mustUnprepare(t, owing.UID)
	r.reopen(t)
	claims := r.Claims()
	if len(claims) != 1 || claims[0].Name != "owing" || claims[0].State != ClaimOwing || r.Stats().Owing != 1 {
		t.Errorf("claims %+v, stats %+v", claims, r.Stats())
	}
	r.cache.SetDown(false)
	r.mustRecover(t)
	r.reopen(t)
	if claims := r.Claims(); len(claims) != 0 || r.Stats().Owing != 0 {
		t.Errorf("claims %+v, stats %+v", claims, r.Stats())
	}
	r.wantNothing(t)
}

func TestAnUnprepareReleasesAtOnceWhatTheLedgerDoesNotKnow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if _, err := r.cache.Hold(t.Context(), llama.Digest, "stranger"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.kv.Reserve(t.Context(), stock.Reservation{Claim: "stranger", Namespace: "n", Memory: 1}); err != nil {
		t.Fatal(err)
	}
	r.mustUnprepare(t, "stranger")
	r.wantNothing(t)
}
