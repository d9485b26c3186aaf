package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestReaderOfAnEndedLandingNeverGoesOnWithAnother(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 4*testSegment))
	// The first try gives wrong bytes of half a segment and then fails for good.
	var healthy atomic.Bool
	cause := errors.New("no such bytes")
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path != shard1 || healthy.Load() {
			return bytes.NewReader(body), nil
		}
		if off == 0 {
			return bytes.NewReader(bytes.Repeat([]byte{7}, readAtLeast/2)), nil
		}
		return nil, cause
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams, p.Attempts = 1, 2 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t.Context(), rd, 0, readAtLeast/2)
	if err != nil && !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 1), rd.Size()-1); !errors.Is(err, cause) {
		t.Fatalf("ReadAt: %v, want the pull's error", err)
	}
	healthy.Store(true)
	r.ensure(t)
	if len(got) > 0 {
		if rd.File() != nil {
			t.Error("the committed file of another landing was handed out")
		}
		if n, err := rd.ReadAt(t.Context(), make([]byte, 1), rd.Size()-1); n != 0 || !errors.Is(err, cause) {
			t.Errorf("ReadAt after another landing's commit: %d, %v", n, err)
		}
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
}

func TestReaderOfAMismatchHandsOutNoFileOnceItIsMended(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	wrong := make(chan struct{})
	first := true
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 2*testSegment && first {
			first = false // memSource calls this under its lock
			return &gate{r: bytes.NewReader(append([]byte{body[0] ^ 1}, body[1:]...)), open: wrong}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t.Context(), rd, 0, testSegment); err != nil {
		t.Fatal(err)
	}
	close(wrong)
	r.ensure(t)
	if rd.File() != nil {
		t.Error("the mended file was handed to a reader of the wrong bytes")
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 1), 0); !errors.Is(err, ErrMismatch) {
		t.Errorf("ReadAt: %v, want ErrMismatch", err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
}

func TestReaderOfAFileFoundDamagedBreaksOff(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 3*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if rd.File() == nil {
		t.Fatal("no file of a Ready artifact")
	}
	f, _ := m.File(shard1)
	flipByte(t, r.store.blobPath(f.SHA256), 5)
	if result, err := r.puller.Verify(t.Context(), testRef); err != nil || !slices.Equal(result.Bad, []string{shard1}) {
		t.Fatalf("verify: %+v, %v", result, err)
	}
	r.ensure(t)
	if rd.File() != nil {
		t.Error("a damaged file is still handed out")
	}
	if _, err := rd.ReadAt(t.Context(), make([]byte, 1), 0); !errors.Is(err, ErrMismatch) {
		t.Errorf("ReadAt: %v, want ErrMismatch", err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	again, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := readAll(t.Context(), again, 0, again.Size()); err != nil || !bytes.Equal(got, src.files[shard1]) {
		t.Errorf("a new reader got %d bytes, %v", len(got), err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}

func flipByte(t *testing.T, path string, at int64) {
	t.Helper()
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{b[0] ^ 0x10}, at); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestFileThatAStrangerRemovedIsFetchedAgain(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	f, _ := m.File(shard1)
	if err := os.Remove(r.store.blobPath(f.SHA256)); err != nil {
		t.Fatal(err)
	}
	before := src.servedBytes()
	rd, err := r.puller.Open(t.Context(), m, shard1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := readAll(t.Context(), rd, 0, rd.Size()); err != nil || !bytes.Equal(got, src.files[shard1]) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
	r.ensure(t)
	if got := src.servedBytes() - before; got != f.Size {
		t.Errorf("%d bytes were fetched, want the lost file's %d", got, f.Size)
	}
}

func TestStrayFilesDoNotKeepTheStoreFromOpening(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	m := r.ensure(t)
	for _, path := range []string{r.store.path(blobsDir, "stray"), r.store.path(chunksDir, "stray")} {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.reopen(t)
	if !r.store.Ready(m.Digest) {
		t.Error("the artifact is no longer Ready")
	}
}

// failFS fails opens of some paths.
type failFS struct {
	durable.FS
	fail func(path string) error
}

func (f *failFS) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	if err := f.fail(path); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return f.FS.OpenFile(path, flag, perm)
}

func TestRecordThatCannotBeReadNowCostsNoFile(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	m := r.ensure(t)
	record := r.store.recordPath(testRef)
	r.close(t)
	failing := &failFS{durable.OS, func(path string) error {
		if path == record {
			return fs.ErrPermission
		}
		return nil
	}}
	if _, err := Open(Options{Dir: r.dir + "/weights", FS: failing}); !errors.Is(err, fs.ErrPermission) {
		t.Fatalf("Open: %v, want the error of the record", err)
	}
	r.open(t)
	if !r.store.Ready(m.Digest) {
		t.Error("files were removed because their record could not be read")
	}
}

func TestSupersededRecordOfANewerVersionStopsTheOpen(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, testSegment)))
	m := r.ensure(t)
	path := r.store.supersededPath(m)
	if err := os.WriteFile(path, fmt.Appendf(nil, `{"version": %d}`, artifact.ManifestVersion+1), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := r.dir + "/weights"
	r.close(t)
	if _, err := Open(Options{Dir: dir}); !errors.Is(err, ErrNewer) {
		t.Fatalf("Open: %v, want ErrNewer", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

func TestLostChunkListIsMadeAgainByAVerification(t *testing.T) {
	t.Parallel()
	src := newMemSource(map[string][]byte{
		"m.safetensors": tensorFile("x", artifact.ChunkSize+100, 1), "notes.txt": make([]byte, artifact.ChunkSize+1),
	})
	src.noSHA["notes.txt"] = true
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.SegmentSize = 8 << 20 })
	m := r.ensure(t)
	lists := map[string][]artifact.Digest{}
	for _, f := range m.Files {
		chunks, err := r.store.Chunks(f.SHA256)
		if err != nil || len(chunks) != 2 {
			t.Fatalf("file %s has %d chunks, %v", f.Path, len(chunks), err)
		}
		lists[f.Path] = chunks
	}
	first, second := m.Files[0], m.Files[1]
	if err := os.Remove(r.store.chunksPath(first.SHA256)); err != nil {
		t.Fatal(err)
	}
	flipByte(t, r.store.chunksPath(second.SHA256), 3)
	if result, err := r.puller.Verify(t.Context(), testRef); err != nil || !result.OK() {
		t.Fatalf("verify: %+v, %v", result, err)
	}
	for _, f := range m.Files {
		if chunks, err := r.store.Chunks(f.SHA256); err != nil || !slices.Equal(chunks, lists[f.Path]) {
			t.Errorf("chunks of %s differ after the verification, %v", f.Path, err)
		}
	}
}

// hookFS calls hook before each link is made.
type hookFS struct {
	durable.FS
	hook func(to string)
}

func (f *hookFS) Link(from, to string) error {
	err := f.FS.Link(from, to)
	f.hook(to)
	return err
}

func TestFileFoundDamagedWhileAViewIsPublishedIsNotInIt(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	hooked := &hookFS{FS: durable.OS, hook: func(string) {}}
	r := newRig(t, src, func(o *Options, _ *PullerOptions) { o.FS = hooked })
	m := r.ensure(t)
	f, _ := m.File(shard1)
	flipByte(t, r.store.blobPath(f.SHA256), 9)
	once := true
	hooked.hook = func(to string) {
		if filepath.Base(to) == shard1 && once {
			once = false
			if err := r.store.discard(f.SHA256); err != nil {
				t.Error(err)
			}
		}
	}
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, shard1)); !notExist(err) {
		t.Fatalf("the damaged file is in the view: %v", err)
	}
	r.ensure(t)
	if got, err := os.ReadFile(filepath.Join(dir, shard1)); err != nil || !bytes.Equal(got, src.files[shard1]) {
		t.Errorf("the view has %d bytes of the mended file, %v", len(got), err)
	}
}

func TestFileThatLandsWhileAViewIsPublishedIsInIt(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	hooked := &hookFS{FS: durable.OS, hook: func(string) {}}
	r := newRig(t, src, func(o *Options, _ *PullerOptions) { o.FS = hooked })
	m := r.ensure(t)
	f, _ := m.File(shard1)
	if err := r.store.discard(f.SHA256); err != nil {
		t.Fatal(err)
	}
	once := true
	hooked.hook = func(to string) {
		if strings.HasPrefix(to, r.store.ViewsDir()) && once {
			once = false
			if _, err := r.puller.Ensure(context.Background(), testRef, EnsureOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, shard1)); err != nil || !bytes.Equal(got, src.files[shard1]) {
		t.Errorf("the view of a Ready artifact has %d bytes of a file, %v", len(got), err)
	}
}

func TestHubViewCountsForTheRefsItHolds(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	if _, err := r.puller.HubView(m); err != nil {
		t.Fatal(err)
	}
	views := func() int {
		st, _ := r.puller.Status(testRef)
		return len(st.Views)
	}
	if views() != 1 {
		t.Fatalf("%d views, want the hub view", views())
	}
	src.set(func() { src.commit = strings.Repeat("cd", 20) })
	moved, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true})
	if err != nil || moved.Digest != m.Digest || moved.Commit == m.Commit {
		t.Fatalf("refresh gave %+v, %v", moved, err)
	}
	if views() != 0 {
		t.Error("the view counts for a commit that it does not hold")
	}
	root, err := r.puller.HubView(moved)
	if err != nil {
		t.Fatal(err)
	}
	if views() != 1 {
		t.Errorf("%d views after it was published, want 1", views())
	}
	for path, want := range src.files {
		name := fmt.Sprintf("%s/models--acme--tiny/snapshots/%s/%s", root, moved.Commit, path)
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("file %s: %d bytes, %v", path, len(got), err)
		}
	}
}

func TestKeptArtifactIsNeverEvictedForAnother(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 4*testSegment))
	other := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/other", Revision: "main"}
	r := newRig(t, src, func(o *Options, _ *PullerOptions) {
		o.Budget, o.Keep = 6*testSegment, []artifact.Ref{testRef}
	})
	m := r.ensure(t)
	src.set(func() {
		src.files = map[string][]byte{"other.safetensors": tensorFile("y", 4*testSegment, 9)}
		src.commit = strings.Repeat("ef", 20)
	})
	if _, err := r.puller.Ensure(t.Context(), other, EnsureOptions{}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("Ensure: %v, want ErrNoSpace", err)
	}
	if !r.store.Ready(m.Digest) {
		t.Fatal("the kept artifact was evicted")
	}
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if _, err := r.puller.Ensure(t.Context(), other, EnsureOptions{}); err != nil {
		t.Errorf("pull after the kept artifact was removed by hand: %v", err)
	}
}

func TestSupersededArtifactGoesWhenItsLastLeaseEnds(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.puller.Run(ctx) }()
	old := r.ensure(t)
	lease, err := r.store.AcquireFor(old.Digest, "engine")
	if err != nil {
		t.Fatal(err)
	}
	src.set(func() {
		src.files = model(1, 3*testSegment)
		src.commit = strings.Repeat("ef", 20)
	})
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	f, _ := old.File(shard1)
	if !r.store.has(f.SHA256) {
		t.Fatal("a leased artifact lost its bytes")
	}
	changed, unsubscribe := r.store.Subscribe()
	defer unsubscribe()
	lease.Release()
	for r.store.has(f.SHA256) {
		select {
		case <-changed:
		case <-t.Context().Done():
			t.Fatal("the superseded artifact was not dropped")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestChecksOfStoredFilesOutliveTheProcess(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	now := time.Now()
	clock := func(o *Options, p *PullerOptions) {
		o.Now = func() time.Time { return now }
		p.Now = o.Now
	}
	r := newRig(t, src, clock)
	m := r.ensure(t)
	const every = 24 * time.Hour
	due := func() time.Duration {
		_, at, found := r.store.nextScrub(every)
		if !found {
			t.Fatal("no file to check")
		}
		return at.Sub(now)
	}
	now = now.Add(2 * every)
	r.reopen(t, clock)
	if due() > 0 {
		t.Error("a restart put the checks off")
	}
	if result, err := r.puller.Verify(t.Context(), testRef); err != nil || !result.OK() || result.Files != len(m.Files) {
		t.Fatalf("verify: %+v, %v", result, err)
	}
	r.reopen(t, clock)
	if got := due(); got < every-time.Second || got > every {
		t.Errorf("next check is due in %s, want %s after the last", got, every)
	}
}

func TestVerifyEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, 2*testSegment)))
	r.ensure(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.puller.Verify(ctx, testRef); !errors.Is(err, context.Canceled) {
		t.Errorf("Verify: %v, want the context's cause", err)
	}
}
