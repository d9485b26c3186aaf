package kvtier

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/units"
)

const patience = time.Minute

var budget = Budget{Memory: 10 * units.MiB, NVMe: 10 * units.MiB, NamespaceMemory: 6 * units.MiB}

func share(claim string) Reservation {
	return Reservation{Claim: claim, Namespace: "n", Memory: units.MiB, NVMe: 2 * units.MiB}
}

func mustOpen(t *testing.T, dir string, b Budget) *Space {
	t.Helper()
	s, err := Open(Options{Dir: dir, Budget: b})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func names(list []Reservation) []string {
	var all []string
	for _, r := range list {
		all = append(all, r.Claim)
	}
	return all
}

func TestNothingIsMadeWhileNoSpaceIsConfigured(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	s := mustOpen(t, dir, Budget{})
	if _, err := s.Reserve(t.Context(), share("a")); !errors.Is(err, ErrNoSpace) {
		t.Errorf("reserve gave %v, want ErrNoSpace", err)
	}
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "a", Namespace: "n"}); !errors.Is(err, ErrNoSpace) {
		t.Errorf("reserve of nothing gave %v, want ErrNoSpace", err)
	}
	if err := s.Release(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory was made: %v", err)
	}
}

func TestWhatClaimsHaveStaysWhenTheBudgetIsTakenAway(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	s := mustOpen(t, dir, budget)
	at, err := s.Reserve(t.Context(), share("a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, dir, Budget{})
	if again, err := s.Reserve(t.Context(), share("a")); err != nil || again != at {
		t.Errorf("the claim has %q, %v, want %q", again, err, at)
	}
	if _, err := s.Reserve(t.Context(), share("b")); !errors.Is(err, ErrNoSpace) {
		t.Errorf("another claim gave %v, want ErrNoSpace", err)
	}
	if err := s.Release(t.Context(), "a"); err != nil || len(s.Reservations()) != 0 {
		t.Errorf("release gave %v and %v is left", err, s.Reservations())
	}
}

func TestAFullSpaceSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, filepath.Join(t.TempDir(), "kv"), budget)
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "a", Namespace: "n", Memory: 5 * units.MiB}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		r    Reservation
		want string
	}{
		{Reservation{Claim: "b", Namespace: "other", Memory: 6 * units.MiB}, "want 6.0 MiB of memory, 5.0 MiB of 10.0 MiB is left"},
		{Reservation{Claim: "b", Namespace: "other", NVMe: 11 * units.MiB}, "want 11.0 MiB of NVMe, 10.0 MiB of 10.0 MiB is left"},
		{Reservation{Claim: "b", Namespace: "n", Memory: 2 * units.MiB}, "want 2.0 MiB of memory for namespace \"n\", 1.0 MiB of 6.0 MiB is left"},
	} {
		if _, err := s.Reserve(t.Context(), c.r); !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("reserve gave %v, want ErrNoSpace and %q", err, c.want)
		}
	}
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "a", Namespace: "n", Memory: units.MiB}); !errors.Is(err, ErrDiffers) {
		t.Errorf("another size gave %v, want ErrDiffers", err)
	}
	for _, r := range []Reservation{{Claim: "x"}, {Claim: "x", Namespace: "n", Memory: -1}, {Claim: "../x", Namespace: "n"}} {
		if _, err := s.Reserve(t.Context(), r); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v gave %v, want ErrInvalid", r, err)
		}
	}
}

func TestOnlyTheMountLeadsIntoAClaimsDirectory(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, filepath.Join(t.TempDir(), "kv"), budget)
	dir, err := s.Reserve(t.Context(), share("a"))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{dir: 0o777, filepath.Dir(dir): 0o700, s.dir: 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
}

func TestReleasedDirectoriesAreRemovedBesidesWhateverIsInThem(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	outside := filepath.Join(root, "outside")
	s := mustOpen(t, filepath.Join(root, "kv"), budget)
	dir, err := s.Reserve(t.Context(), share("a"))
	if err != nil {
		t.Fatal(err)
	}
	deep := filepath.Join(dir, strings.Repeat("d/", 50))
	if err := errors.Join(os.MkdirAll(deep, 0o700), os.MkdirAll(outside, 0o755), os.WriteFile(filepath.Join(outside, "f"), nil, 0o600),
		os.Symlink(outside, filepath.Join(dir, "link")), os.WriteFile(filepath.Join(dir, "block"), []byte("kv"), 0o400)); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is there after Release: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	deadline, tick := time.NewTimer(patience), time.NewTicker(time.Millisecond)
	defer deadline.Stop()
	defer tick.Stop()
	for {
		left, err := os.ReadDir(s.path(trashDir))
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			break
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("the trash is not emptied")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(outside, "f")); err != nil {
		t.Errorf("what a link led to is gone: %v", err)
	}
}

// life reserves and releases; it notes what was promised.
type life struct{ reserved, waived, released, again bool }

func (l *life) live(fsys durable.FS) error {
	ctx := context.Background()
	s, err := Open(Options{Dir: "/var/kv", Budget: budget, FS: fsys})
	if err != nil {
		return err
	}
	if _, err := s.Reserve(ctx, share("a")); err != nil {
		return err
	}
	l.reserved = true
	if _, err := s.Reserve(ctx, share("b")); err != nil {
		return err
	}
	l.waived = true
	if err := s.Release(ctx, "b"); err != nil {
		return err
	}
	l.released = true
	if err := s.sweep(ctx); err != nil {
		return err
	}
	if _, err := s.Reserve(ctx, Reservation{Claim: "b", Namespace: "other", Memory: units.MiB}); err != nil {
		return err
	}
	l.again = true
	return s.Close()
}

func TestReservationsOutliveACrashAtEveryChange(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"OnlySyncedSurvives", "SomeUnsyncedSurvives"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			for n := 1; ; n++ {
				var random *rand.Rand
				if mode == "SomeUnsyncedSurvives" {
					random = rand.New(rand.NewPCG(uint64(n), 11))
				}
				fsys := durabletest.New()
				if err := errors.Join(fsys.MkdirAll("/var", 0o755), fsys.SyncDir("/")); err != nil {
					t.Fatal(err)
				}
				fsys.CrashAt(fsys.Changes()+n, n%2 == 0)
				var l life
				done := l.live(fsys) == nil
				checkLife(t, n, fsys.Crash(random), l)
				if done {
					return
				}
			}
		})
	}
}

// checkLife opens the space as the next boot does.
func checkLife(t *testing.T, n int, fsys durable.FS, l life) {
	t.Helper()
	s, err := Open(Options{Dir: "/var/kv", Budget: budget, FS: fsys})
	if err != nil {
		t.Fatalf("crash at change %d: the space does not open: %v", n, err)
	}
	held := s.Reservations()
	has := func(r Reservation) bool { return slices.Contains(held, r) }
	other := Reservation{Claim: "b", Namespace: "other", Memory: units.MiB}
	if l.reserved && !has(share("a")) || l.released && has(share("b")) || l.again && !has(other) || len(s.Bad()) > 0 {
		t.Errorf("crash at change %d after %+v: reserved is %+v, bad is %v", n, l, held, s.Bad())
	}
	for _, r := range held {
		if r.Namespace == "" {
			t.Errorf("crash at change %d: the directory of %s has no record", n, r.Claim)
		}
		if info, err := fsys.Stat(s.claimDir(r.Claim)); err != nil || !info.IsDir() || info.Mode().Perm() != claimMode {
			t.Errorf("crash at change %d: the directory of %s: %v", n, r.Claim, err)
		}
		if err := s.Release(context.Background(), r.Claim); err != nil {
			t.Errorf("crash at change %d: release: %v", n, err)
		}
	}
	if err := s.sweep(context.Background()); err != nil || len(s.Reservations()) != 0 {
		t.Errorf("crash at change %d: sweep %v, left %v", n, err, s.Reservations())
	}
	for _, dir := range []string{claimsDir, trashDir} {
		if left, err := fsys.ReadDir(s.path(dir)); err != nil || len(left) != 0 {
			t.Errorf("crash at change %d: %s holds %v, %v", n, dir, left, err)
		}
	}
}

func TestADirectoryWhoseRecordIsLostIsListedAndMayBeTakenAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	s := mustOpen(t, dir, budget)
	for _, claim := range []string{"a", "b"} {
		at, err := s.Reserve(t.Context(), share(claim))
		if err := errors.Join(err, os.WriteFile(filepath.Join(at, "block"), []byte("kv"), 0o600), os.WriteFile(s.recordPath(claim), []byte("{"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(s.Close(), os.WriteFile(s.path(claimsDir, "no directory"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, dir, budget)
	if got := s.Reservations(); !slices.Equal(got, []Reservation{{Claim: "a"}, {Claim: "b"}}) || len(s.Bad()) != 2 {
		t.Fatalf("reserved is %+v, bad is %v", got, s.Bad())
	}
	at, err := s.Reserve(t.Context(), share("a"))
	if err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(at, "block")); err != nil || string(data) != "kv" {
		t.Errorf("the claim's directory was emptied: %q, %v", data, err)
	}
	if err := s.Release(t.Context(), "b"); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := names(mustOpen(t, dir, budget).Reservations()); !slices.Equal(got, []string{"a"}) {
		t.Errorf("reserved is %v, want a", got)
	}
}

func TestOneProcessOwnsASpaceAndNewerOnesAreLeftAlone(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	s := mustOpen(t, dir, budget)
	if _, err := Open(Options{Dir: dir, Budget: budget}); !errors.Is(err, durable.ErrLocked) {
		t.Errorf("a second open gave %v, want ErrLocked", err)
	}
	if err := errors.Join(os.WriteFile(s.path(reservationsDir, "new.json"), []byte(`{"version":2,"claim":"new"}`), 0o600), s.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir, Budget: budget}); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer record gave %v, want ErrNewer", err)
	}
	if err := os.WriteFile(s.path(formatFile), []byte("hearth kvtier 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir, Budget: budget}); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer space gave %v, want ErrNewer", err)
	}
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: foreign, Budget: budget}); err == nil {
		t.Error("a directory with other files became a KV space")
	}
}

func TestAReservationThatTheDriveRefusedIsWrittenWhenItIsAskedAgain(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := errors.Join(fsys.MkdirAll("/var", 0o755), fsys.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Options{Dir: "/var/kv", Budget: budget, FS: fsys})
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("drive is tired")
	fsys.FailWhen(func(op, path string) error {
		if strings.Contains(path, reservationsDir) && op == "rename" {
			return refused
		}
		return nil
	})
	if _, err := s.Reserve(t.Context(), share("a")); !errors.Is(err, refused) {
		t.Fatalf("reserve gave %v, want the drive's error", err)
	}
	fsys.FailWhen(nil)
	if _, err := s.Reserve(t.Context(), share("a")); err != nil {
		t.Fatal(err)
	}
	next, err := Open(Options{Dir: "/var/kv", Budget: budget, FS: fsys.Crash(nil)})
	if err != nil {
		t.Fatal(err)
	}
	if got := next.Reservations(); !slices.Equal(got, []Reservation{share("a")}) {
		t.Errorf("after a crash %v is reserved", got)
	}
}

func TestARecordIsWhatItsPageSays(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/reservation_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	want := Reservation{Claim: "9f8d3c1e-claim", Namespace: "team-a", Memory: 4 * units.GiB, NVMe: 40 * units.GiB}
	if r, err := decode(golden, "9f8d3c1e-claim.json"); err != nil || r != want {
		t.Errorf("read %+v, %v", r, err)
	}
	if again, err := encode(want); err != nil || string(again) != string(golden) {
		t.Errorf("written it is\n%s%v", again, err)
	}
}

func FuzzARecordThatIsReadIsValid(f *testing.F) {
	f.Add([]byte(`{"version":1,"claim":"a","namespace":"n","memory":1,"nvme":2}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"claim":"a","namespace":"n","memory":-1,"nvme":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode(data, "a.json")
		if err == nil && (r.check() != nil || r.Claim != "a") {
			t.Errorf("%q was read as %+v", data, r)
		}
		if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrNewer) {
			t.Errorf("%q gave %v, which says not what it is", data, err)
		}
	})
}

func TestASpaceMakesNothingThatItsNamesLeaveOut(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	mustOpen(t, dir, budget)
	c, err := OpenCache(CacheOptions{Dir: dir, Memory: units.MiB, Wear: WearOptions{WritesPerDay: 1}, SegmentSize: 4 << 20, Buffered: true})
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 16 * units.MiB}), 1, []byte("x"))
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(Names(), e.Name()) {
			t.Errorf("%s would stay when the space is removed", e.Name())
		}
	}
	if len(entries) != len(Names()) {
		t.Errorf("the space has %d entries, its names are %q", len(entries), Names())
	}
}
