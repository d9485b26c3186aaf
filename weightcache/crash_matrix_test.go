package weightcache

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// CRASH=full tries every crash of every change (`make crash`); without it a
// sample of them takes seconds.
var everyCrash = os.Getenv("CRASH") == "full"

func crashRef(name string) artifact.Ref {
	return artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/" + name, Revision: "main"}
}

var (
	refA, refB = crashRef("a"), crashRef("b")
	versionA   = newVersion("a", model(1, 2*testSegment+100))
	// versionB shares its small files with versionA, and not its weights.
	versionB = newVersion("b", map[string][]byte{
		"config.json": versionA.files["config.json"], "tokenizer.json": versionA.files["tokenizer.json"],
		"b.safetensors": tensorFile("b", testSegment+500, 77),
	})
	// versionNext is what acme/a means after it moved.
	versionNext = newVersion("a, next", map[string][]byte{
		"config.json": []byte(`{"model_type":"next"}`), "README.md": versionA.files["README.md"],
		"next.safetensors": tensorFile("n", 2*testSegment, 78),
	})
)

// scene is a piece of work that crashes at each of its changes in turn;
// before happens undisturbed.
type scene struct {
	name    string
	options func(*Options)
	before  func(w *world) error
	work    func(w *world) error
}

var scenes = []scene{
	{name: "Landing", work: func(w *world) error { return w.pull(refA, versionA) }},
	{name: "Resuming", before: func(w *world) error {
		w.origin.cut = testSegment + 600
		if err := w.pull(refA, versionA); err == nil {
			return errors.New("the first pull was to fail half way")
		}
		w.origin.cut = 0
		return w.puller.Wait(context.Background())
	}, work: func(w *world) error { return w.pull(refA, versionA) }},
	{name: "Publishing", before: func(w *world) error { return w.pull(refA, versionA) }, work: func(w *world) error { return w.view(refA) }},
	{name: "ViewThatFills", before: func(w *world) error {
		if err := errors.Join(w.pull(refA, versionA), w.view(refA), w.damage(refA, shard1)); err != nil {
			return err
		}
		return w.verify(refA)
	}, work: func(w *world) error { return w.pull(refA, versionA) }},
	{name: "Removing", before: func(w *world) error {
		return errors.Join(w.pull(refA, versionA), w.view(refA), w.pull(refB, versionB), w.view(refB))
	}, work: func(w *world) error { return w.remove(refA) }},
	{name: "Verifying", before: func(w *world) error {
		return errors.Join(w.pull(refA, versionA), w.view(refA), w.pull(refB, versionB), w.damage(refA, "config.json"), w.damage(refA, shard1))
	}, work: func(w *world) error {
		if err := w.verify(refA); err != nil {
			return err
		}
		if len(w.damaged) > 0 {
			return errors.New("damage was not found")
		}
		return w.pull(refA, versionA)
	}},
	{name: "Refreshing", before: func(w *world) error { return errors.Join(w.pull(refA, versionA), w.view(refA)) }, work: func(w *world) error {
		if err := w.refresh(refA, versionNext); err != nil {
			return err
		}
		return w.view(refA)
	}},
	{name: "Evicting", options: func(o *Options) { o.Budget = 300 << 10 }, before: func(w *world) error {
		return errors.Join(w.pull(refA, versionA), w.view(refA))
	}, work: func(w *world) error {
		big := newVersion("big", map[string][]byte{"config.json": []byte(`{}`), "big.safetensors": tensorFile("x", 3*testSegment, 5)})
		return w.pull(refB, big, refA)
	}},
}

// start plays a scene up to the crash at change n of its work; finished says
// that the work ended before.
func (sc *scene) start(n int, tear bool) (w *world, finished bool, err error) {
	if w, err = newWorld(sc.options); err != nil {
		return nil, false, err
	}
	if sc.before != nil {
		if err := w.open(); err != nil {
			return nil, false, err
		}
		if err := errors.Join(sc.before(w), w.close()); err != nil {
			return nil, false, err
		}
	}
	w.fs.CrashAt(w.fs.Changes()+n, tear)
	if err := w.open(); err != nil {
		return w, false, crashOnly(err)
	}
	err = sc.work(w)
	if waitErr := w.puller.Wait(context.Background()); waitErr != nil {
		return nil, false, waitErr
	}
	return w, err == nil, crashOnly(err)
}

// crashOnly passes on what did not come of the crash.
func crashOnly(err error) error {
	if errors.Is(err, durabletest.ErrCrashed) {
		return nil
	}
	return err
}

// stride is how many changes lie between two that are tried, and how many of
// their fates are.
func stride() (changes, most int) {
	switch {
	case everyCrash:
		return 1, 1 << 30
	case testing.Short():
		return 67, 1
	}
	return 23, 2
}

// eachChange plays every scene to a crash at each change in turn.
func eachChange(t *testing.T, try func(t *testing.T, sc *scene, w *world, n int, random *rand.Rand)) {
	t.Helper()
	for i := range scenes {
		sc := &scenes[i]
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(uint64(i), 11))
			step, _ := stride()
			for n := 1 + random.IntN(step); ; n += step {
				w, finished, err := sc.start(n, n%2 == 0)
				if err != nil {
					t.Fatalf("crash at change %d: %v", n, err)
				}
				try(t, sc, w, n, random)
				if finished || t.Failed() {
					return
				}
			}
		})
	}
}

func TestCrashAtAnyChangeBreaksNoPromise(t *testing.T) {
	t.Parallel()
	_, most := stride()
	var tried atomic.Int64
	t.Cleanup(func() { t.Logf("%d crashes were recovered from", tried.Load()) })
	eachChange(t, func(t *testing.T, _ *scene, w *world, n int, random *rand.Rand) {
		t.Helper()
		left := most
		for fate, crash := range w.fs.Fates(random, uint64(n), everyCrash) {
			if left--; left < 0 {
				return
			}
			tried.Add(1)
			if err := w.after(crash(), "second").recover(); err != nil {
				t.Errorf("crash at change %d, %s survived: %v", n, fate, err)
				return
			}
		}
	})
}

func TestCrashWhileRecoveringFromACrashBreaksNoPromise(t *testing.T) {
	t.Parallel()
	eachChange(t, func(t *testing.T, _ *scene, w *world, n int, random *rand.Rand) {
		t.Helper()
		for k := 1; ; k++ {
			seeds := [2]uint64{random.Uint64(), random.Uint64()}
			crash := func(f *durabletest.FS, seed uint64) *durabletest.FS {
				return f.Crash(rand.New(rand.NewPCG(seed, 1)))
			}
			second := w.after(crash(w.fs, seeds[0]), "second")
			second.fs.CrashAt(second.fs.Changes()+k, k%2 == 0)
			err := second.open()
			if crashOnly(err) != nil {
				t.Errorf("crash at change %d, open: %v", n, err)
				return
			}
			if recoverErr := second.after(crash(second.fs, seeds[1]), "third").recover(); recoverErr != nil {
				t.Errorf("crash at change %d, then at change %d of the open: %v", n, k, recoverErr)
				return
			}
			if err == nil || !everyCrash && k >= 2 {
				return
			}
		}
	})
}

func TestPowerCutAfterAKilledProcessWasSucceededBreaksNoPromise(t *testing.T) {
	t.Parallel()
	eachChange(t, func(t *testing.T, _ *scene, w *world, n int, _ *rand.Rand) {
		t.Helper()
		// The process is killed and the kernel goes on: the successor trusts
		// what it sees, and is to have made it durable before it says so.
		w.fs.Revive()
		next := w.after(w.fs, "first")
		if err := next.open(); err != nil {
			t.Errorf("killed at change %d: %v", n, err)
			return
		}
		if err := next.converge(); err != nil {
			t.Errorf("killed at change %d: %v", n, err)
			return
		}
		if err := next.puller.Wait(context.Background()); err != nil {
			t.Error(err)
			return
		}
		if err := next.after(w.fs.CrashWith(durabletest.PageSector, durabletest.Nothing), "second").recover(); err != nil {
			t.Errorf("killed at change %d, then the power failed: %v", n, err)
		}
	})
}
