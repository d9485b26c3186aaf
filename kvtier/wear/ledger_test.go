package wear

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

const path = "/wear.json"

// clock is time that a test moves.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Duration { return time.Duration(c.at.Load()) }

func (c *clock) move(d time.Duration) { c.at.Add(int64(d)) }

func open(t testing.TB, fsys durable.FS, c *clock, rate, burst, first int64) *Ledger {
	t.Helper()
	l, err := Open(Options{FS: fsys, Path: path, Rate: rate, Burst: burst, First: first, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func onDrive(t testing.TB, fsys durable.FS) record {
	t.Helper()
	data, err := durable.ReadFile(fsys, path, maxRecord)
	if err != nil {
		t.Fatal(err)
	}
	r, err := decode(data)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func spend(t testing.TB, l *Ledger, who Tenant, n int64) bool {
	t.Helper()
	ok, err := l.Spend(who, n)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func TestAGrantIsWrittenBeforeItIsSpent(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), &clock{}
	l := open(t, fsys, c, 0, 10*gib, 10*gib)
	if _, err := fsys.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opening wrote: %v", err)
	}
	if !spend(t, l, tenant(1), mib) {
		t.Fatal("nothing is spent of a full bucket")
	}
	// A hundredth of the burst, and what was asked for.
	grant := int64(10*gib/100 + mib)
	if got := onDrive(t, fsys); got != (record{1, 0, grant, 10*gib - grant}) {
		t.Errorf("the file says %+v", got)
	}
	before := fsys.Changes()
	for range 100 {
		spend(t, l, tenant(1), mib)
	}
	if fsys.Changes() != before {
		t.Error("what is granted is written down again")
	}
	// Killed: the whole grant counts as written, and is gone.
	l = open(t, fsys, c, 0, 10*gib, 10*gib)
	if l.Written() != grant || l.bucket.Level(0) != 10*gib-grant {
		t.Errorf("after a kill %d are written and %d are left", l.Written(), l.bucket.Level(0))
	}
	// Ended: what was written counts, and the rest stays.
	spend(t, l, tenant(1), 5)
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if got := onDrive(t, fsys); got != (record{1, grant + 5, 0, 10*gib - grant - 5}) {
		t.Errorf("after the end the file says %+v", got)
	}
	if _, err := l.Spend(tenant(1), 1); !errors.Is(err, ErrClosed) || !errors.Is(l.Save(), ErrClosed) {
		t.Errorf("a closed ledger spends: %v", err)
	}
}

func TestGrantsAreSizedByTheBurst(t *testing.T) {
	t.Parallel()
	for burst, want := range map[int64]int64{0: 16 * mib, gib: 16 * mib, 10 * gib: 10 * gib / 100, 1000 * gib: gib} {
		l := open(t, durabletest.New(), &clock{}, 0, 1, 0)
		l.SetRate(0, burst)
		if l.grant != want || l.lump > burst/2 || l.lump > want {
			t.Errorf("a burst of %d gives grants of %d, lumps of %d, want %d", burst, l.grant, l.lump, want)
		}
	}
}

func TestTokensGatherBeforeASyncIsWorthIt(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), &clock{}
	l := open(t, fsys, c, mib, 10*gib, 0)
	l.SetShare(tenant(1), 1)
	syncs, spent := fsys.Changes(), 0
	for range 1000 { // s
		c.move(time.Second)
		if spend(t, l, tenant(1), mib) {
			spent++
		}
		for spend(t, l, tenant(1), mib) {
			spent++
		}
	}
	perGrant := 6 // open, write, chmod, sync, rename, syncdir
	if grants := (fsys.Changes() - syncs) / perGrant; grants > 1000/10 || spent < 980 {
		t.Errorf("%d MiB of 1000 in %d grants", spent, grants)
	}
}

func TestNoTimeCountsInWhichNoProcessRan(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), &clock{}
	l := open(t, fsys, c, mib, 100*gib, 50*gib)
	c.move(time.Hour)
	if err := errors.Join(l.Save(), l.Save()); err != nil {
		t.Fatal(err)
	}
	want := record{1, 0, 0, 50*gib + 3600*mib}
	if got := onDrive(t, fsys); got != want {
		t.Errorf("the file says %+v, want %+v", got, want)
	}
	c.move(time.Hour) // lost by a kill
	l = open(t, fsys, c, mib, 100*gib, 50*gib)
	c.move(time.Second)
	if got := l.bucket.Level(c.now()); got != want.Credit+mib {
		t.Errorf("%d are left, want %d", got, want.Credit+mib)
	}
	// Save keeps a grant as it is.
	spend(t, l, tenant(1), mib)
	before := onDrive(t, fsys)
	if err := l.Save(); err != nil {
		t.Fatal(err)
	}
	if got := onDrive(t, fsys); got.Written != mib || got.Granted != before.Granted-mib || got.Credit != before.Credit {
		t.Errorf("the file says %+v after %+v", got, before)
	}
}

func TestADriveThatTakesNoRecordIsNotWrittenTo(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), &clock{}
	l := open(t, fsys, c, 0, gib, gib)
	fsys.FailWhen(func(op, _ string) error {
		if op == "rename" {
			return syscall.EROFS
		}
		return nil
	})
	for range 3 {
		if ok, err := l.Spend(tenant(1), mib); ok || !errors.Is(err, syscall.EROFS) {
			t.Errorf("spent %v, %v", ok, err)
		}
	}
	if err := l.Save(); !errors.Is(err, syscall.EROFS) {
		t.Errorf("save: %v", err)
	}
	if l.Written() != 0 || l.bucket.Level(0) != gib {
		t.Errorf("%d are written, %d left", l.Written(), l.bucket.Level(0))
	}
	fsys.Heal()
	if !spend(t, l, tenant(1), mib) || l.Written() != mib {
		t.Error("nothing is spent once the drive takes records again")
	}
	fsys.SetReadOnly(true)
	if err := l.Close(); !errors.Is(err, syscall.EROFS) {
		t.Errorf("close: %v", err)
	}
}

func TestARecordThatIsNoneIsToldApartFromANewerOne(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]error{
		"":                           ErrUnreadable,
		"{":                          ErrUnreadable,
		"null":                       ErrUnreadable,
		`{"written":1}`:              ErrUnreadable,
		`{"version":0}`:              ErrUnreadable,
		`{"version":1,"other":1}`:    ErrUnreadable,
		`{"version":1} {}`:           ErrUnreadable,
		`{"version":1,"written":-1}`: ErrUnreadable,
		`{"version":1,"credit":-1152921504606846977}`:      ErrUnreadable,
		`{"version":1,"credit":1152921504606846977}`:       ErrUnreadable,
		`{"version":1,"granted":1e30}`:                     ErrUnreadable,
		`{"version":2,"other":1}`:                          ErrNewer,
		`{"version":1}` + string(make([]byte, maxRecord)):  ErrUnreadable,
		`{"version":1,"written":5,"granted":6,"credit":7}`: nil,
	} {
		fsys := durabletest.New()
		if err := durable.WriteFile(fsys, path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Open(Options{FS: fsys, Path: path, Rate: 1, Burst: 100, First: 100})
		if !errors.Is(err, want) || (want == nil) != (err == nil) {
			t.Errorf("%.60q: %v, want %v", text, err, want)
		}
		if want == nil && (l.Written() != 11 || l.bucket.level != 7) {
			t.Errorf("%q: %d written, %d left", text, l.Written(), l.bucket.level)
		}
	}
	fsys := durabletest.New()
	fsys.FailReadAt(1, syscall.EIO)
	if _, err := Open(Options{FS: fsys, Path: path}); !errors.Is(err, syscall.EIO) || errors.Is(err, ErrUnreadable) {
		t.Errorf("a drive that does not read: %v, want EIO", err)
	}
}

func TestWhatMustBeWrittenComesOutOfWhatMayBeLater(t *testing.T) {
	t.Parallel()
	for _, kill := range []bool{false, true} {
		fsys, c := durabletest.New(), &clock{}
		l := open(t, fsys, c, mib, 100*mib, 0)
		l.SetShare(tenant(0), 1)
		if err := l.Charge(tenant(0), 10*mib); err != nil {
			t.Fatal(err)
		}
		if r := onDrive(t, fsys); r.Granted < 10*mib || r.Credit > -10*mib {
			t.Errorf("a kill would forget some of it: %+v", r)
		}
		c.move(9 * time.Second)
		if l.Fill() != 0 || l.FillFor(tenant(0)) != 0 || spend(t, l, tenant(0), 1) {
			t.Error("something is spent before that has come")
		}
		if !kill {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		l = open(t, fsys, c, mib, 100*mib, 100*mib)
		if got := l.bucket.Level(c.now()); got >= 0 || !kill && got != -mib {
			t.Errorf("after it ended (killed: %v) the level is %d", kill, got)
		}
		if l.Written() < 10*mib {
			t.Errorf("%d bytes are said to be written", l.Written())
		}
		c.move(time.Minute)
		l.SetShare(tenant(0), 1)
		c.move(time.Minute)
		if !spend(t, l, tenant(0), mib) {
			t.Error("nothing is spent once it has come")
		}
	}
}

func TestTheFormatIsWhatItsPageSays(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/wear_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	r, err := decode(golden)
	if want := (record{1, 7_340_032_000, gib, 158_913_789_952}); err != nil || r != want {
		t.Fatalf("the golden file is %+v, %v", r, err)
	}
	again, err := r.encode()
	if err != nil || string(again) != string(golden) {
		t.Errorf("written anew it is %s, %v", again, err)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"written":5,"granted":6,"credit":7}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode(data)
		if err != nil {
			if !errors.Is(err, ErrUnreadable) && !errors.Is(err, ErrNewer) {
				t.Errorf("no kind of error: %v", err)
			}
			return
		}
		again, err := r.encode()
		if err != nil || !json.Valid(again) {
			t.Fatal(err)
		}
		if back, err := decode(again); err != nil || back != r {
			t.Errorf("%+v became %+v, %v", r, back, err)
		}
	})
}

func TestCloseWaitsForWhatIsBeingSpentAndTurnsTheRestAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		fsys, c := durabletest.New(), &clock{}
		l := open(t, fsys, c, 0, gib, gib)
		reached, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		fsys.FailWhen(func(op, _ string) error {
			if op == "sync" {
				once.Do(func() { close(reached); <-release })
			}
			return nil
		})
		type result struct {
			ok  bool
			err error
		}
		results := make(chan result, 2)
		ask := func(n int64) {
			ok, err := l.Spend(tenant(1), n)
			results <- result{ok, err}
		}
		go ask(mib)
		<-reached
		go ask(100 * mib) // more than the first's grant
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- l.Close() }()
		synctest.Wait()
		close(release)
		first, second := <-results, <-results
		if second.ok {
			first, second = second, first
		}
		if !first.ok || first.err != nil || second.ok || !errors.Is(second.err, ErrClosed) {
			t.Errorf("the first: %+v, the second: %+v", first, second)
		}
		if err := <-closed; err != nil {
			t.Fatal(err)
		}
		if got := onDrive(t, fsys); got != (record{1, mib, 0, gib - mib}) {
			t.Errorf("the file says %+v", got)
		}
	})
}

func TestClosingAmidManySpendersEnds(t *testing.T) {
	t.Parallel()
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			const first = 100 * gib
			fsys := durabletest.New()
			l := open(t, fsys, &clock{}, 0, first, first)
			began := make(chan struct{}, 4)
			for range 4 {
				go func() {
					for {
						// Each needs a grant of its own.
						_, err := l.Spend(tenant(1), 3*gib/2)
						began <- struct{}{}
						if err != nil {
							return
						}
					}
				}()
			}
			go func() {
				for range began {
				}
			}()
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			synctest.Wait()
			close(began)
			if got := onDrive(t, fsys); got.Granted != 0 || got.Written != l.Written() || got.Written+got.Credit != first {
				t.Errorf("the file says %+v", got)
			}
		})
	}
}

// slowFS says when a file is to be made, and makes it when it may.
type slowFS struct {
	durable.FS
	reached, release chan struct{}
}

func (s slowFS) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	close(s.reached)
	<-s.release
	return s.FS.OpenFile(path, flag, perm)
}

func TestWhatIsSpentWhileTheRecordIsWrittenIsInIt(t *testing.T) {
	t.Parallel()
	for name, burst := range map[string]int64{"as it was": 4 * gib, "made smaller": 8 * mib} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fsys, c := durabletest.New(), &clock{}
			l := open(t, fsys, c, 0, 4*gib, 4*gib)
			spend(t, l, tenant(1), mib) // about 41 MiB are granted beyond
			l.SetRate(8*mib, burst)
			l.SetShare(tenant(1), 1)
			c.move(time.Second)
			slow := slowFS{FS: fsys, reached: make(chan struct{}), release: make(chan struct{})}
			l.fs = slow
			saved := make(chan error, 1)
			go func() { saved <- l.Save() }()
			<-slow.reached
			some := func() { // 6 MiB
				for range 6 {
					spend(t, l, tenant(1), mib)
				}
				c.move(time.Second)
			}
			for range 5 {
				some()
			}
			close(slow.release)
			if err := <-saved; err != nil {
				t.Fatal(err)
			}
			l.fs = fsys
			some()
			some()
			if r := onDrive(t, fsys); r.Written+r.Granted < l.Written() || l.Written() != 43*mib {
				t.Errorf("%d are written, the file says %+v", l.Written(), r)
			}
		})
	}
}

func TestManySpendersNeverSpendWhatIsNotGranted(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), &clock{}
	const first = 4 * gib
	l := open(t, fsys, c, 0, first, first)
	l.SetShare(tenant(1), 1)
	var all sync.WaitGroup
	var spent atomic.Int64
	for who := range 8 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(who), 1))
			for range 400 {
				n := random.Int64N(8 * mib)
				ok, err := l.Spend(tenant(who), n)
				if err != nil {
					t.Error(err)
				}
				if ok {
					spent.Add(n)
				}
				if r := onDrive(t, fsys); r.Written+r.Granted > first || r.Granted+r.Credit+r.Written > first {
					t.Errorf("the file says %+v of %d", r, int64(first))
				}
			}
		})
	}
	all.Wait()
	if r := onDrive(t, fsys); l.Written() != spent.Load() || r.Written+r.Granted < spent.Load() || spent.Load() < first/2-8*mib {
		t.Errorf("%d are spent, %d written, the file says %+v", spent.Load(), l.Written(), r)
	}
}
