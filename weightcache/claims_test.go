package weightcache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const claimA, claimB = "0f0e-a", "0f0e-b"

// promised is what a process was told before it crashed.
type promised struct {
	held, wished, released, waived bool
	digest                         artifact.Digest
}

// holdAndRelease holds an artifact for two claims, has one wish for another
// ref, and releases the other.
func (s *session) holdAndRelease(p *promised) error {
	ctx := context.Background()
	claims, err := OpenClaimLeases(s.store)
	if err != nil {
		return err
	}
	m, err := s.puller.Ensure(ctx, testRef, EnsureOptions{})
	if err != nil {
		return err
	}
	p.digest = m.Digest
	if err := claims.Set(ctx, claimA, ClaimLease{Digest: m.Digest, Ready: true}); err != nil {
		return err
	}
	p.held = true
	if err := claims.Set(ctx, claimA, ClaimLease{Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/next", Revision: "main"}}); err != nil {
		return err
	}
	p.wished = true
	if err := claims.Set(ctx, claimB, ClaimLease{Digest: m.Digest, Ready: true}); err != nil {
		return err
	}
	p.waived = true
	if err := claims.Release(ctx, claimB); err != nil {
		return err
	}
	p.released = true
	return nil
}

func TestWhatAClaimHoldsIsHeldAfterACrashAtEveryChange(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment+100))
	for _, mode := range []string{"OnlySyncedSurvives", "SomeUnsyncedSurvives"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			for n := 1; ; n++ {
				var random *rand.Rand
				if mode == "SomeUnsyncedSurvives" {
					random = rand.New(rand.NewPCG(uint64(n), 7))
				}
				var p promised
				finished := crashRun(t, n, random, src, func(s *session) error { return s.holdAndRelease(&p) }, func(s *session) {
					checkPromised(t, n, s, p)
				})
				if finished {
					return
				}
			}
		})
	}
}

func checkPromised(t *testing.T, n int, s *session, p promised) {
	t.Helper()
	claims, err := OpenClaimLeases(s.store)
	if err != nil {
		t.Fatalf("crash at change %d: the claims do not open: %v", n, err)
	}
	if bad := claims.Bad(); len(bad) > 0 {
		t.Errorf("crash at change %d: files %v are bad", n, bad)
	}
	names := claims.Claims()
	if p.held && (!slices.Contains(names, claimA) || !s.store.leased(p.digest) || !errors.Is(s.store.removeRef(testRef), ErrLeased)) {
		t.Errorf("crash at change %d: what was held is not: claims %v", n, names)
	}
	if p.wished && len(claims.Of(claimA)) != 2 {
		t.Errorf("crash at change %d: claim holds %v, want a digest and a wish", n, claims.Of(claimA))
	}
	if p.released && slices.Contains(names, claimB) {
		t.Errorf("crash at change %d: what was released is held", n)
	}
	for _, claim := range []string{claimA, claimB} {
		if err := claims.Release(context.Background(), claim); err != nil {
			t.Errorf("crash at change %d: release: %v", n, err)
		}
	}
	if p.held && s.store.leased(p.digest) {
		t.Errorf("crash at change %d: a lease is left", n)
	}
}

func TestNothingEvictsWhatAClaimHoldsRightAfterTheStart(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 4*testSegment))
	budget := func(o *Options, _ *PullerOptions) { o.Budget = 6 * testSegment }
	r := newRig(t, src, budget)
	claims := mustClaims(t, r)
	m := r.ensure(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(claims.Set(t.Context(), claimA, ClaimLease{Digest: m.Digest, Ready: true}))
	r.reopen(t, budget)
	claims = mustClaims(t, r)
	other := newMemSource(model(1, 4*testSegment+8))
	src.mu.Lock()
	src.files = other.files
	src.mu.Unlock()
	next := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/next", Revision: "main"}
	if _, err := r.puller.Ensure(t.Context(), next, EnsureOptions{}); !errors.Is(err, ErrNoSpace) || !r.store.Ready(m.Digest) {
		t.Fatalf("a pull beside a held artifact gave %v, want ErrNoSpace and the artifact in its place", err)
	}
	if room, err := r.store.Room(); err != nil || room > 2*testSegment {
		t.Errorf("room beside what is held is %s, %v", room, err)
	}
	must(claims.Release(t.Context(), claimA))
	if room, err := r.store.Room(); err != nil || room < 5*testSegment {
		t.Errorf("room with everything to evict is %s, %v", room, err)
	}
	_, err := r.puller.Ensure(t.Context(), next, EnsureOptions{})
	must(err)
}

func mustClaims(t *testing.T, r *rig) *ClaimLeases {
	t.Helper()
	claims, err := OpenClaimLeases(r.store)
	if err != nil {
		t.Fatal(err)
	}
	return claims
}

func TestAWishFollowsItsRefAndIsOneLease(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	claims := mustClaims(t, r)
	m := r.ensure(t)
	for _, l := range []ClaimLease{{Ref: testRef}, {Ref: testRef, Digest: m.Digest}, {Ref: testRef, Digest: m.Digest, Ready: true}} {
		for range 2 {
			if err := claims.Set(t.Context(), claimA, l); err != nil {
				t.Fatal(err)
			}
		}
		if got := claims.Of(claimA); len(got) != 1 || got[0] != l || r.store.leased(m.Digest) == l.Digest.IsZero() {
			t.Errorf("after %+v the claim holds %+v", l, got)
		}
	}
	if err := claims.Set(t.Context(), claimA, ClaimLease{Ref: testRef}); err != nil || r.store.leased(m.Digest) {
		t.Errorf("a wish without a digest leases one (%v)", err)
	}
	if err := claims.Set(t.Context(), claimA, ClaimLease{Digest: artifact.Digest{1}}); !errors.Is(err, ErrUnknown) || len(claims.Of(claimA)) != 1 {
		t.Errorf("an unknown artifact gave %v, and the claim holds %v", err, claims.Of(claimA))
	}
}

func TestAClaimGetsItsLeaseOnceTheStoreKnowsTheArtifact(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	claims := mustClaims(t, r)
	m := r.ensure(t)
	if err := claims.Set(t.Context(), claimA, ClaimLease{Digest: m.Digest, Ready: true}); err != nil {
		t.Fatal(err)
	}
	record := r.store.recordPath(testRef)
	r.close(t)
	if err := os.WriteFile(record, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.open(t)
	claims = mustClaims(t, r)
	if r.store.leased(m.Digest) || !slices.Equal(claims.Claims(), []string{claimA}) {
		t.Fatalf("the artifact is known, or the claim %v forgot it", claims.Claims())
	}
	r.ensure(t)
	claims.Retake()
	if !r.store.leased(m.Digest) {
		t.Error("the artifact is back and its claim does not hold it")
	}
}

func TestClaimFilesThatNobodyUnderstandsArePutAside(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	dir := r.store.path(claimsDir)
	good := `{"version":1,"claim":"good","leases":[{"ref":"hub://acme/tiny@main"}]}`
	for name, text := range map[string]string{
		"good.json": good, "a.json": "", "b.json": `{"version":1,"claim":"other"}`, "c.json": `{"version":1,"claim":"c","odd":1}`,
		"..json": `{"version":1,"claim":"."}`, "d.json": strings.Repeat(" ", maxClaimBytes+1), "e.txt": good, ".tmp-1-1-good.json": good,
		"f.json": `{"version":0,"claim":"f"}`, "g.json": `{"version":1,"claim":"g","leases":[{"digest":"00"}]}`,
	} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	claims := mustClaims(t, r)
	if got := claims.Claims(); !slices.Equal(got, []string{"good"}) || len(claims.Bad()) != 8 {
		t.Errorf("claims %v and bad files %v, want good alone and 8 bad ones", got, claims.Bad())
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("the folder holds %v, %v", left, err)
	}
}

func TestAClaimOfANewerVersionStopsTheOpenUntouched(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	dir := r.store.path(claimsDir)
	for name, text := range map[string]string{"new.json": `{"version":2,"claim":"new","more":[]}`, "bad.json": "{"} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := OpenClaimLeases(r.store); !errors.Is(err, ErrNewer) {
		t.Errorf("open gave %v, want ErrNewer", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("the folder holds %v, %v", left, err)
	}
}

func TestAClaimsFileIsWhatItsPageSays(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/claim_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	r, err := decodeClaim(golden, "9f8d3c1e-claim.json")
	if err != nil || r.Claim != "9f8d3c1e-claim" || len(r.Leases) != 3 {
		t.Fatalf("read %+v, %v", r, err)
	}
	again, err := encodeClaim(r.Claim, r.Leases)
	if err != nil || string(again) != string(golden) {
		t.Errorf("written again it is\n%s%v", again, err)
	}
}

func FuzzAClaimsFileThatIsReadIsValid(f *testing.F) {
	f.Add([]byte(`{"version":1,"claim":"a","leases":[{"ref":"hub://acme/tiny@main","ready":true}]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeClaim(data, "a.json")
		if err == nil && (r.Claim != "a" || len(r.Leases) > maxClaimLeases) {
			t.Errorf("%q was read as %+v", data, r)
		}
		if err != nil && !errors.Is(err, artifact.ErrInvalid) && !errors.Is(err, ErrNewer) {
			t.Errorf("%q gave %v, which says not what it is", data, err)
		}
	})
}

func TestClaimsAreBoundedAndNamedSafely(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	claims := mustClaims(t, r)
	for _, name := range []string{"", ".", "..", "a/b", "-a", "_", "a\x00", strings.Repeat("a", maxClaimName+1), "é"} {
		if err := claims.Set(t.Context(), name, ClaimLease{Ref: testRef}); !errors.Is(err, artifact.ErrInvalid) {
			t.Errorf("claim %q gave %v, want ErrInvalid", name, err)
		}
	}
	for i := range maxClaimLeases + 1 {
		ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: fmt.Sprintf("acme/m%d", i), Revision: "main"}
		err := claims.Set(t.Context(), claimA, ClaimLease{Ref: ref})
		if wantErr := i == maxClaimLeases; errors.Is(err, ErrTooMany) != wantErr || err != nil != wantErr {
			t.Errorf("lease %d of a claim gave %v", i, err)
		}
	}
	if len(claims.claims) != 1 {
		t.Errorf("%d claims are remembered, want 1", len(claims.claims))
	}
}

func TestAReleaseThatTheDriveRefusesKeepsTheLease(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := fsys.MkdirAll("/var", 0o755); err != nil {
		t.Fatal(err)
	}
	src := newMemSource(model(1, testSegment))
	s, err := startSession(fsys, src)
	if err != nil {
		t.Fatal(err)
	}
	var p promised
	if err := s.holdAndRelease(&p); err != nil {
		t.Fatal(err)
	}
	claims, err := OpenClaimLeases(s.store)
	if err != nil {
		t.Fatal(err)
	}
	fsys.FailWhen(func(op, path string) error {
		if op == "remove" && strings.HasSuffix(path, claimFileSuffix) {
			return os.ErrPermission
		}
		return nil
	})
	if err := claims.Release(t.Context(), claimA); !errors.Is(err, os.ErrPermission) || !slices.Equal(claims.Claims(), []string{claimA}) {
		t.Errorf("release gave %v and the claims are %v", err, claims.Claims())
	}
	fsys.FailWhen(nil)
	if err := claims.Release(t.Context(), claimA); err != nil || len(claims.Claims()) != 0 {
		t.Errorf("release after mending gave %v and the claims are %v", err, claims.Claims())
	}
}

func TestAReleaseOfAnUnknownClaimSucceedsThoughThereAreAsManyClaimsAsThereMayBe(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	claims := mustClaims(t, r)
	for i := range maxClaims {
		claims.claims[fmt.Sprintf("c-%d", i)] = &claimed{slot: make(chan struct{}, 1), taken: map[artifact.Digest]*Lease{}, leases: []ClaimLease{{Ref: testRef}}}
	}
	if err := claims.Release(t.Context(), "unknown"); err != nil {
		t.Errorf("release of an unknown claim: %v", err)
	}
	if err := claims.Set(t.Context(), "unknown", ClaimLease{Ref: testRef}); !errors.Is(err, ErrTooMany) {
		t.Errorf("one claim more: %v, want ErrTooMany", err)
	}
	if err := claims.Release(t.Context(), "c-7"); err != nil || len(claims.Of("c-7")) > 0 {
		t.Errorf("release of a known claim: %v, it holds %v", err, claims.Of("c-7"))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := claims.Release(ended, "unknown"); !errors.Is(err, context.Canceled) {
		t.Errorf("release with an ended context: %v", err)
	}
	if err := claims.Release(t.Context(), "../unknown"); !errors.Is(err, artifact.ErrInvalid) {
		t.Errorf("release of a name that is none: %v", err)
	}
}
