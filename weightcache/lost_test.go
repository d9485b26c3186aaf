package weightcache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestAStoreWhoseDirectoryIsRemovedSaysSoAndServesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, 100)))
	m := r.ensure(t)
	if err := os.RemoveAll(r.store.Dir()); err != nil {
		t.Fatal(err)
	}
	if rd, err := r.puller.Open(t.Context(), m, "config.json", OpenOptions{}); !errors.Is(err, ErrLost) {
		t.Errorf("open: %v, %v; want ErrLost", rd, err)
	}
	if st, _ := r.puller.Status(testRef); st.State != Failed || st.Detail == "" {
		t.Errorf("status: %+v", st)
	}
	if _, err := r.puller.Ensure(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/more", Revision: "main"}, EnsureOptions{}); err == nil {
		t.Error("a pull into nothing ended well")
	}
	// Whoever starts anew has a store again.
	r.reopen(t)
	r.ensure(t)
}

func TestNothingReadyIsEvictedOnADriveThatTakesNoWrites(t *testing.T) {
	t.Parallel()
	w, err := newWorld(func(o *Options) { o.Budget = 1 })
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.open()); err != nil {
		t.Fatal(err)
	}
	w.store.budget = 0
	if err := w.pull(refA, versionA); err != nil {
		t.Fatal(err)
	}
	w.store.budget = w.store.usedLocked() // room for no more
	w.fs.SetReadOnly(true)
	if _, err := w.store.reserve(t.Context(), 1, "a test"); !errors.Is(err, syscall.EROFS) {
		t.Errorf("reserve: %v, want EROFS", err)
	}
	if !w.store.Ready(versionA.digest()) {
		t.Error("the artifact was given up")
	}
	w.fs.SetReadOnly(false)
	room, err := w.store.reserve(t.Context(), 1, "a test")
	if err != nil {
		t.Fatal(err)
	}
	room.release()
	if w.store.Ready(versionA.digest()) {
		t.Error("nothing was evicted once the drive takes writes")
	}
}

// killedInMidSegment pulls a shard until three segments and a half are written,
// and gives what a killed process leaves of it: the drive and the page cache as
// they are then. What the source sent of the half may be other than the file's.
func killedInMidSegment(t *testing.T, spoil byte) (left *rig, shard artifact.File) {
	t.Helper()
	src := newMemSource(model(1, 10*testSegment))
	ctx, cancel := context.WithCancel(t.Context())
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 3*testSegment {
			half := bytes.Clone(body[:testSegment/2])
			half[100] ^= spoil
			stuck := &closableReader{closed: make(chan struct{})}
			return struct {
				io.Reader
				io.Closer
			}{io.MultiReader(bytes.NewReader(half), stuck), stuck}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(ctx, testRef)
	if err != nil {
		t.Fatal(err)
	}
	shard, _ = m.File(shard1)
	done := make(chan error, 1)
	go func() {
		_, err := r.puller.Ensure(ctx, testRef, EnsureOptions{})
		done <- err
	}()
	reader, err := r.puller.Open(ctx, m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	defer cancel()
	// Somebody was given the last byte that came.
	for _, end := range []int64{testSegment, 2 * testSegment, 3 * testSegment, 3*testSegment + testSegment/2} {
		if _, err := reader.ReadAt(ctx, make([]byte, 1), end-1); err != nil {
			t.Fatal(err)
		}
	}
	changed, unsubscribe := r.store.Subscribe()
	defer unsubscribe()
	for landing := 0; landing != 1; { // the copy needs a store that stands still
		r.store.mu.Lock()
		landing = len(r.store.partial)
		r.store.mu.Unlock()
		if landing != 1 {
			<-changed
		}
	}
	left = &rig{fs: durable.OS, dir: t.TempDir(), src: newMemSource(src.files)}
	if err := os.CopyFS(left.dir+"/weights", os.DirFS(r.dir+"/weights")); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := errors.Join(<-done, reader.Close()); !errors.Is(err, context.Canceled) {
		t.Errorf("the killed pull: %v", err)
	}
	return left, shard
}

func TestWhatAKilledProcessGaveOutIsKeptAndNotInDoubt(t *testing.T) {
	t.Parallel()
	left, shard := killedInMidSegment(t, 0)
	left.open(t)
	if left.puller.Doubtful(shard.SHA256) {
		t.Error("a file whose given bytes are all here is in doubt")
	}
	checkFlat(t, left, left.ensure(t))
	if got, want := left.src.servedOf(shard1), shard.Size-3*testSegment-testSegment/2; got != want {
		t.Errorf("%d bytes were fetched, want %d: no byte that was given out anew", got, want)
	}
	if left.puller.Doubtful(shard.SHA256) {
		t.Error("a file whose given bytes were proven is in doubt")
	}
}

func TestWrongBytesThatAKilledProcessGaveOutAreInDoubtOnceTheyAreFound(t *testing.T) {
	t.Parallel()
	left, shard := killedInMidSegment(t, 1)
	left.open(t)
	checkFlat(t, left, left.ensure(t))
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("who was given the wrong bytes gets the rest of the right ones")
	}
	left.reopen(t)
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("a restart forgot that wrong bytes were given out")
	}
	late := time.Now().Add(doubtFor + time.Minute)
	left.reopen(t, func(o *Options, _ *PullerOptions) { o.Now = func() time.Time { return late } })
	if left.puller.Doubtful(shard.SHA256) {
		t.Error("the doubt outlives its hour")
	}
}

func TestAfterAnotherBootAllThatIsUnfinishedIsInDoubt(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(dir string) error{
		"power cut":         func(string) error { return nil },
		"store of before":   func(dir string) error { return os.Remove(filepath.Join(dir, doubtsFile)) },
		"unreadable doubts": func(dir string) error { return os.WriteFile(filepath.Join(dir, doubtsFile), []byte("{"), 0o600) },
		"doubts to come": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, doubtsFile), []byte(`{"version":2}`), 0o600)
		},
		"landing lost alone": func(dir string) error { return os.RemoveAll(filepath.Join(dir, landingDir)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			left, shard := killedInMidSegment(t, 0)
			if err := spoil(filepath.Join(left.dir, "weights")); err != nil {
				t.Fatal(err)
			}
			another := func(o *Options, _ *PullerOptions) { o.Boot = "another boot" }
			left.open(t, another)
			if !left.puller.Doubtful(shard.SHA256) {
				t.Error("bytes that may be lost are not in doubt")
			}
			left.reopen(t, another)
			if !left.puller.Doubtful(shard.SHA256) {
				t.Error("a second start forgot it")
			}
			checkFlat(t, left, left.ensure(t))
		})
	}
}

func TestARemovedFileThatNoDigestProvedIsInDoubt(t *testing.T) {
	t.Parallel()
	left, shard := killedInMidSegment(t, 0)
	left.open(t)
	if err := left.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("bytes that were given out went unproven and are not in doubt")
	}
	r := newRig(t, newMemSource(model(1, 100)))
	m := r.ensure(t)
	f, _ := m.File(shard1)
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if r.puller.Doubtful(f.SHA256) {
		t.Error("a proven file is in doubt because it was removed")
	}
}

func TestAStoreMakesNothingThatItsNamesLeaveOut(t *testing.T) {
	t.Parallel()
	left, _ := killedInMidSegment(t, 1)
	left.open(t)
	left.ensure(t)
	if _, err := OpenClaimLeases(left.store); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(left.store.Dir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(Names(), e.Name()) {
			t.Errorf("%s would stay when the store is removed", e.Name())
		}
	}
	if len(entries) != len(Names()) {
		t.Errorf("the store has %d entries, its names are %q", len(entries), Names())
	}
}

func TestADamagedFileIsGivenToNobodyWhileTheDoubtOfItIsWritten(t *testing.T) {
	t.Parallel()
	asked := func(string) {}
	watching := &failFS{durable.OS, func(path string) error { asked(path); return nil }}
	r := newRig(t, newMemSource(model(1, 2*testSegment)), func(o *Options, _ *PullerOptions) { o.FS = watching })
	m := r.ensure(t)
	f, _ := m.File(shard1)
	written := false
	asked = func(path string) {
		if !strings.HasSuffix(path, "-"+doubtsFile) {
			return
		}
		written = true
		if r.store.has(f.SHA256) || r.store.Ready(m.Digest) || !r.puller.Doubtful(f.SHA256) {
			t.Error("a damaged file is still given out")
		}
		if _, err := os.Lstat(r.store.blobPath(f.SHA256)); err != nil {
			t.Errorf("its bytes went before the doubt was kept: %v", err)
		}
	}
	if err := r.store.discard(f.SHA256); err != nil {
		t.Fatal(err)
	}
	if !written {
		t.Error("the doubt was not written")
	}
}
