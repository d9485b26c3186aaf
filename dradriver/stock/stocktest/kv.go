package stocktest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// KVSpace is the space that a KVRig has: room for four claims of KVShare, of
// which one namespace may have three.
var KVSpace = stock.Space{Memory: 4 << 20, NVMe: 8 << 20, NamespaceMemory: 3 << 20, NamespaceNVMe: 6 << 20}

// KVShare is what a claim of the suite reserves.
var KVShare = stock.Reservation{Memory: 1 << 20, NVMe: 2 << 20}

// KVRig is one node to test a KV on, with the space KVSpace and nothing
// reserved.
type KVRig struct {
	KV stock.KV
	// Reopen gives the KV tier as it is after a crash of the role that has it.
	Reopen func(t *testing.T) stock.KV
}

// KV checks that an implementation does what stock.KV promises. open gives a
// fresh rig.
func KV(t *testing.T, open func(t *testing.T) KVRig) {
	t.Helper()
	for name, check := range map[string]func(t *testing.T, rig KVRig){
		"SpaceIsWhatWasConfigured":               checkSpace,
		"ReserveGivesTheSameDirectoryEachTime":   checkReserve,
		"AClaimCannotChangeItsSizes":             checkOtherSizes,
		"EachClaimHasADirectoryOfItsOwn":         checkOwnDirectory,
		"MoreThanTheNodeHasIsRefused":            checkNoSpace,
		"MoreThanANamespaceMayHaveIsRefused":     checkNamespace,
		"ReleaseRemovesTheDirectoryAndItsFiles":  checkReleaseKV,
		"WhatWasReleasedCanBeReserved":           checkReuse,
		"ReservationsOutliveACrash":              checkReopenKV,
		"ReserveEndsWithItsContext":              checkContextKV,
		"ClaimsAtOnceNeverHaveMoreThanThereIs":   checkConcurrentKV,
		"AClaimNameThatIsNoFileNameEscapesNoDir": checkClaimName,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, open(t))
		})
	}
}

// share is KVShare for a claim of a namespace.
func share(claim, namespace string) stock.Reservation {
	r := KVShare
	r.Claim, r.Namespace = claim, namespace
	return r
}

func wantReserved(t *testing.T, kv stock.KV, want ...stock.Reservation) {
	t.Helper()
	got, err := kv.Reservations(t.Context())
	must(t, err)
	byClaim := func(a, b stock.Reservation) int { return strings.Compare(a.Claim, b.Claim) }
	if !slices.IsSortedFunc(got, byClaim) {
		t.Errorf("reservations are not sorted by claim: %v", got)
	}
	slices.SortFunc(want, byClaim)
	if !slices.Equal(got, want) {
		t.Errorf("reserved %v, want %v", got, want)
	}
}

func checkSpace(t *testing.T, rig KVRig) {
	until(t, "the space", func() bool { _, ok := rig.KV.Space(); return ok })
	if got, _ := rig.KV.Space(); got != KVSpace {
		t.Errorf("space %+v, want %+v", got, KVSpace)
	}
}

func checkReserve(t *testing.T, rig KVRig) {
	first, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	again, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	if first != again || !filepath.IsAbs(first) {
		t.Errorf("directory %q, then %q", first, again)
	}
	info, err := os.Lstat(first)
	must(t, err)
	if !info.IsDir() {
		t.Errorf("%s is %v, want a directory", first, info.Mode())
	}
	wantReserved(t, rig.KV, share("a", "n"))
}

func checkOtherSizes(t *testing.T, rig KVRig) {
	_, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	for _, change := range []func(*stock.Reservation){
		func(r *stock.Reservation) { r.Memory-- },
		func(r *stock.Reservation) { r.NVMe++ },
		func(r *stock.Reservation) { r.Namespace = "other" },
	} {
		r := share("a", "n")
		change(&r)
		if _, err := rig.KV.Reserve(t.Context(), r); err == nil {
			t.Errorf("a claim changed its reservation to %+v", r)
		}
	}
	wantReserved(t, rig.KV, share("a", "n"))
}

func checkOwnDirectory(t *testing.T, rig KVRig) {
	a, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	b, err := rig.KV.Reserve(t.Context(), share("b", "n"))
	must(t, err)
	if a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/") {
		t.Errorf("two claims have the directories %q and %q", a, b)
	}
}

func checkNoSpace(t *testing.T, rig KVRig) {
	for _, r := range []stock.Reservation{
		{Claim: "m", Namespace: "n", Memory: KVSpace.Memory + 1},
		{Claim: "v", Namespace: "n", NVMe: KVSpace.NVMe + 1},
	} {
		if _, err := rig.KV.Reserve(t.Context(), r); !errors.Is(err, stock.ErrNoSpace) {
			t.Errorf("reserve %+v: %v, want ErrNoSpace", r, err)
		}
	}
	for i, claim := range []string{"a", "b", "c", "d"} {
		_, err := rig.KV.Reserve(t.Context(), share(claim, []string{"n", "o"}[i%2]))
		must(t, err)
	}
	if _, err := rig.KV.Reserve(t.Context(), share("e", "p")); !errors.Is(err, stock.ErrNoSpace) {
		t.Errorf("reserve on a full node: %v, want ErrNoSpace", err)
	}
	_, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
}

func checkNamespace(t *testing.T, rig KVRig) {
	for _, claim := range []string{"a", "b", "c"} {
		_, err := rig.KV.Reserve(t.Context(), share(claim, "n"))
		must(t, err)
	}
	_, err := rig.KV.Reserve(t.Context(), share("d", "n"))
	if !errors.Is(err, stock.ErrNoSpace) || !strings.Contains(err.Error(), `"n"`) && !strings.Contains(err.Error(), " n ") {
		t.Errorf("a fourth claim of one namespace: %v, want ErrNoSpace that names the namespace", err)
	}
	_, err = rig.KV.Reserve(t.Context(), share("d", "other"))
	must(t, err)
}

func checkReleaseKV(t *testing.T, rig KVRig) {
	must(t, rig.KV.Release(t.Context(), "nobody"))
	dir, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(dir, "sub/folder"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "sub/folder/blocks"), []byte("kv"), 0o600))
	must(t, rig.KV.Release(t.Context(), "a"))
	must(t, rig.KV.Release(t.Context(), "a"))
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
	wantReserved(t, rig.KV)
}

func checkReuse(t *testing.T, rig KVRig) {
	whole := stock.Reservation{Claim: "a", Namespace: "n", Memory: KVSpace.NamespaceMemory, NVMe: KVSpace.NamespaceNVMe}
	_, err := rig.KV.Reserve(t.Context(), whole)
	must(t, err)
	must(t, rig.KV.Release(t.Context(), "a"))
	whole.Claim = "b"
	dir, err := rig.KV.Reserve(t.Context(), whole)
	must(t, err)
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 0 {
		t.Errorf("a fresh directory holds %v", entries)
	}
}

func checkReopenKV(t *testing.T, rig KVRig) {
	dir, err := rig.KV.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "blocks"), []byte("kv"), 0o600))
	_, err = rig.KV.Reserve(t.Context(), share("b", "n"))
	must(t, err)
	must(t, rig.KV.Release(t.Context(), "b"))
	again := rig.Reopen(t)
	wantReserved(t, again, share("a", "n"))
	same, err := again.Reserve(t.Context(), share("a", "n"))
	must(t, err)
	if data, err := os.ReadFile(filepath.Join(same, "blocks")); same != dir || err != nil || string(data) != "kv" {
		t.Errorf("after a crash the claim has %q with %q (%v), before it %q", same, data, err, dir)
	}
}

func checkContextKV(t *testing.T, rig KVRig) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := rig.KV.Reserve(ended, share("a", "n")); !errors.Is(err, context.Canceled) {
		t.Errorf("reserve: %v, want the context's error", err)
	}
	wantReserved(t, rig.KV)
}

func checkConcurrentKV(t *testing.T, rig KVRig) {
	var calls sync.WaitGroup
	for i := range 12 {
		calls.Go(func() {
			claim := string(rune('a' + i))
			_, err := rig.KV.Reserve(t.Context(), share(claim, claim))
			if err != nil && !errors.Is(err, stock.ErrNoSpace) {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	reserved, err := rig.KV.Reservations(t.Context())
	must(t, err)
	var memory, nvme units.Bytes
	for _, r := range reserved {
		memory, nvme = memory+r.Memory, nvme+r.NVMe
	}
	if memory != KVSpace.Memory || nvme != KVSpace.NVMe {
		t.Errorf("%d claims took %d and %d bytes of %+v", len(reserved), memory, nvme, KVSpace)
	}
}

func checkClaimName(t *testing.T, rig KVRig) {
	plain, err := rig.KV.Reserve(t.Context(), share("plain", "n"))
	must(t, err)
	for _, claim := range []string{"..", ".", "", "a/b", "../plain", "a\x00b"} {
		if dir, err := rig.KV.Reserve(t.Context(), share(claim, "n")); err == nil {
			t.Errorf("claim %q has the directory %q", claim, dir)
		}
		_ = rig.KV.Release(t.Context(), claim)
	}
	if _, err := os.Lstat(plain); err != nil {
		t.Errorf("the directory of another claim is gone: %v", err)
	}
	wantReserved(t, rig.KV, share("plain", "n"))
}
