package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

func checkFlat(t *testing.T, r *rig, m *artifact.Manifest) {
	t.Helper()
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range r.src.files {
		got, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("file %s: %d bytes, %v; want %d", path, len(got), err, len(want))
		}
	}
}

func TestEnsureLandsEveryFileAndAWarmStartFetchesNothing(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(3, 3*testSegment+17))
	src.noSHA["config.json"] = true
	src.files["empty.txt"] = nil
	r := newRig(t, src)
	m := r.ensure(t)
	var total int64
	for _, data := range src.files {
		total += int64(len(data))
	}
	if got := src.servedBytes(); got != total {
		t.Errorf("a cold pull fetched %d bytes, want %d", got, total)
	}
	checkFlat(t, r, m)
	st, ok := r.puller.Status(testRef)
	if !ok || st.State != Ready || st.Present != total || st.Size != total || len(st.Views) != 1 || !st.MetadataReady {
		t.Errorf("status %+v, want Ready and whole", st)
	}
	r.reopen(t)
	r.ensure(t)
	if got := src.servedBytes(); got != total {
		t.Errorf("a warm start fetched %d bytes", got-total)
	}
	if src.resolves != 1 {
		t.Errorf("resolved %d times, want once", src.resolves)
	}
}

const shard1 = "model-00001-of-00001.safetensors"

// cutAfter breaks every body of a path once left bytes of it were served.
func cutAfter(path string, left int64, cause error) func(artifact.File, int64, int64, []byte) (io.Reader, error) {
	var mu sync.Mutex
	return func(f artifact.File, _, _ int64, body []byte) (io.Reader, error) {
		if f.Path != path {
			return bytes.NewReader(body), nil
		}
		mu.Lock()
		defer mu.Unlock()
		n := min(left, int64(len(body)))
		left -= n
		if n < int64(len(body)) {
			return io.MultiReader(bytes.NewReader(body[:n]), &failingReader{cause}), nil
		}
		return bytes.NewReader(body), nil
	}
}

type failingReader struct{ err error }

func (r *failingReader) Read([]byte) (int, error) { return 0, r.err }

func TestEnsureFetchesOnlyWhatTheBitmapLacks(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 10*testSegment))
	gone := &source.Error{Source: "mem", Op: "open", What: shard1, Status: 403, Err: source.ErrForbidden}
	src.fault = cutAfter(shard1, 6*testSegment, gone)
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, source.ErrForbidden) || !strings.Contains(err.Error(), shard1) {
		t.Fatalf("Ensure: %v, want ErrForbidden that names the file", err)
	}
	if st, _ := r.puller.Status(testRef); st.State != Failed || st.Detail == "" {
		t.Errorf("status %+v, want Failed with a detail", st)
	}
	src.set(func() { src.fault = nil })
	before := src.servedOf(shard1)
	r.reopen(t)
	m := r.ensure(t)
	if got, want := src.servedOf(shard1)-before, int64(len(src.files[shard1]))-6*testSegment; got != want {
		t.Errorf("the resumed pull fetched %d bytes, want %d", got, want)
	}
	checkFlat(t, r, m)
}

func TestKilledProcessLosesNoWholeSegmentAndAPowerCutOnlyUnsyncedOnes(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 10*testSegment))
	ctx, cancel := context.WithCancel(t.Context())
	reached := make(chan struct{})
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 5*testSegment {
			close(reached)
			return &closableReader{closed: make(chan struct{})}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	changed, unsubscribe := r.store.Subscribe()
	defer unsubscribe()
	done := make(chan error, 1)
	go func() {
		_, err := r.puller.Ensure(ctx, testRef, EnsureOptions{})
		done <- err
	}()
	<-reached
	// The other files are committed beside the stream; the copy below needs a
	// store that stands still.
	for m, _ := r.store.pinned(testRef); ; {
		if missing, _ := r.store.missing(m); len(missing) == 1 {
			break
		}
		<-changed
	}
	// What the drive and the page cache hold now is what a killed process leaves.
	for name, want := range map[string]int64{"": 5 * testSegment, "another boot": 0} {
		left := &rig{fs: durable.OS, dir: t.TempDir(), src: newMemSource(src.files)}
		if err := os.CopyFS(left.dir+"/weights", os.DirFS(r.dir+"/weights")); err != nil {
			t.Fatal(err)
		}
		left.open(t, func(o *Options, _ *PullerOptions) { o.Boot = name })
		m := left.ensure(t)
		if got := int64(len(src.files[shard1])) - left.src.servedOf(shard1); got != want {
			t.Errorf("boot %q: %d bytes were not fetched again, want %d", name, got, want)
		}
		checkFlat(t, left, m)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Ensure: %v", err)
	}
}

func TestBrokenBodiesAreResumedAtTheLastByte(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 5*testSegment))
	var mu sync.Mutex
	opens := map[string]int{}
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		mu.Lock()
		defer mu.Unlock()
		at := fmt.Sprint(f.Path, off)
		opens[at]++
		if opens[at] == 1 {
			return nil, &source.Error{Source: "mem", Op: "open", Status: 503, Err: source.ErrUnavailable}
		}
		if opens[at] == 2 {
			return io.MultiReader(bytes.NewReader(body[:len(body)/2]), &failingReader{io.ErrUnexpectedEOF}), nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src)
	m := r.ensure(t)
	checkFlat(t, r, m)
	if got := src.servedBytes(); got != m.Size() {
		t.Errorf("fetched %d bytes, want %d: no byte twice", got, m.Size())
	}
	if r.puller.Stats().Retries == 0 {
		t.Error("no retry was counted")
	}
}

func TestWrongBytesAreDiscardedAndFetchedOnceMore(t *testing.T) {
	t.Parallel()
	for _, always := range []bool{false, true} {
		t.Run(fmt.Sprint("always=", always), func(t *testing.T) {
			t.Parallel()
			src := newMemSource(model(1, 3*testSegment))
			var mu sync.Mutex
			flips := 0
			src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
				mu.Lock()
				defer mu.Unlock()
				if f.Path != shard1 || off != testSegment || flips > 0 && !always {
					return bytes.NewReader(body), nil
				}
				flips++
				wrong := bytes.Clone(body)
				wrong[7] ^= 1
				return bytes.NewReader(wrong), nil
			}
			r := newRig(t, src)
			m, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
			if !always {
				if err != nil {
					t.Fatal(err)
				}
				checkFlat(t, r, m)
				return
			}
			if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), shard1) {
				t.Errorf("Ensure: %v, want ErrMismatch that names the file", err)
			}
			if got := r.puller.Stats().Mismatches; got != 2 {
				t.Errorf("%d mismatches were counted, want 2", got)
			}
			if st, _ := r.puller.Status(testRef); st.State != Failed {
				t.Errorf("state %s, want Failed", st.State)
			}
			src.set(func() { src.fault = nil })
			r.ensure(t)
		})
	}
}

func TestWrongGitIDIsRefusedDuringResolve(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	src.noSHA["config.json"] = true
	src.listing = func(l *artifact.Listing) {
		for i := range l.Files {
			if l.Files[i].Path == "config.json" {
				l.Files[i].GitSHA1 = strings.Repeat("0", 40)
			}
		}
	}
	r := newRig(t, src)
	if _, err := r.puller.Manifest(t.Context(), testRef); !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "config.json") {
		t.Errorf("Manifest: %v, want ErrMismatch that names the file", err)
	}
	if _, found := r.store.pinned(testRef); found {
		t.Error("a ref was pinned to bytes that were refused")
	}
	if u, err := r.store.Usage(); err != nil || u.Used != 0 {
		t.Errorf("%d bytes are left, %v", u.Used, err)
	}
}

func TestConcurrentGettersShareOnePull(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 4*testSegment))
	r := newRig(t, src)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			ref := testRef
			if i%2 == 1 {
				ref.Revision = "other" // another name for the same bytes
			}
			if _, err := r.puller.Ensure(t.Context(), ref, EnsureOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	m := r.ensure(t)
	if got := src.servedBytes(); got != m.Size() {
		t.Errorf("100 getters fetched %d bytes, want %d", got, m.Size())
	}
	if src.resolves != 2 {
		t.Errorf("%d resolves for two refs", src.resolves)
	}
	if list := r.puller.List(); len(list) != 2 || list[0].Digest != list[1].Digest {
		t.Errorf("List gives %+v", list)
	}
}

func TestLastWaiterGoneEndsThePullAndKeepsWhatLanded(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 10*testSegment))
	ctx, cancel := context.WithCancel(t.Context())
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 5*testSegment {
			cancel()
			return &closableReader{closed: make(chan struct{})}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	if _, err := r.puller.Ensure(ctx, testRef, EnsureOptions{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("Ensure: %v, want context.Canceled", err)
	}
	if err := r.puller.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	src.set(func() { src.fault = nil })
	before := src.servedOf(shard1)
	m := r.ensure(t)
	if got, want := src.servedOf(shard1)-before, int64(len(src.files[shard1]))-5*testSegment; got != want {
		t.Errorf("fetched %d bytes after the return, want %d", got, want)
	}
	checkFlat(t, r, m)
}

func TestSilentBodyIsGivenUpAfterTheStallTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(map[string][]byte{"config.json": []byte("{}")})
		first := true
		src.fault = func(_ artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			if first {
				first = false
				return &closableReader{closed: make(chan struct{})}, nil
			}
			return bytes.NewReader(body), nil
		}
		fsys := durabletest.New()
		if err := fsys.Mkdir("/var", 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := startSession(fsys, src)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < defaultStall || took > 2*defaultStall {
			t.Errorf("the pull took %s, want one stall timeout of %s", took, defaultStall)
		}
		if s.puller.Stats().Stalls != 1 {
			t.Errorf("%d stalls were counted", s.puller.Stats().Stalls)
		}
	})
}

// closableReader yields nothing until it is closed.
type closableReader struct {
	closed chan struct{}
	once   sync.Once
}

func (b *closableReader) Read([]byte) (int, error) {
	<-b.closed
	return 0, os.ErrClosed
}

func (b *closableReader) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

func TestRetryAfterIsHonoured(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(map[string][]byte{"config.json": []byte("{}")})
		tries := 0
		src.fault = func(_ artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			tries++
			if tries == 1 {
				return nil, &source.Error{Source: "mem", Op: "open", Status: 429, RetryAfter: 40 * time.Second, Err: source.ErrThrottled}
			}
			return bytes.NewReader(body), nil
		}
		fsys := durabletest.New()
		if err := fsys.Mkdir("/var", 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := startSession(fsys, src)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < 40*time.Second {
			t.Errorf("asked again after %s, want 40s", took)
		}
	})
}

func TestRefsThatNoRuleAllowsAreRefusedAndCounted(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	r := newRig(t, src)
	for _, ref := range []artifact.Ref{
		{Scheme: artifact.SchemeHub, Name: "evil/tiny", Revision: "main"},
		{Scheme: artifact.SchemeDir, Name: "/acme/tiny"},
	} {
		if _, err := r.puller.Ensure(t.Context(), ref, EnsureOptions{}); !errors.Is(err, ErrNotAllowed) {
			t.Errorf("Ensure %s: %v, want ErrNotAllowed", ref, err)
		}
	}
	if src.resolves != 0 || r.puller.Stats().Refused != 2 {
		t.Errorf("%d resolves, %d refusals", src.resolves, r.puller.Stats().Refused)
	}
}

func TestPatternsCoverWhatTheySay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, ref string
		want         bool
	}{
		{"acme/*", "hub://acme/tiny", true},
		{"acme/*", "hub://acmes/tiny", false},
		{"*/*", "hub://acme/tiny@v2", true},
		{"acme/tiny@main", "hub://acme/tiny", true},
		{"acme/tiny@main", "hub://acme/tiny@dev", false},
		{"hub://acme/**", "hub://acme/tiny", true},
		{"/models/*", "dir:///models/a", true},
		{"/models/*", "dir:///models/a/b", false},
		{"/models/**", "dir:///models/a/b", true},
		{"/models/**", "dir:///models", false},
		{"/models/**", "dir:///models2/a", false},
		{"*/*", "dir:///models/a", false},
		{"dir:///models/a", "dir:///models/a", true},
	} {
		ref, err := artifact.ParseRef(c.ref)
		if err != nil {
			t.Fatal(err)
		}
		if got := matchRef(c.pattern, ref); got != c.want {
			t.Errorf("matchRef(%q, %s) = %v", c.pattern, c.ref, got)
		}
	}
}

func TestHostileListingsAreRefusedBeforeAnythingLands(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(l *artifact.Listing){
		"path leaves":   func(l *artifact.Listing) { l.Files[0].Path = "../../etc/passwd" },
		"absolute path": func(l *artifact.Listing) { l.Files[0].Path = "/etc/passwd" },
		"NUL in a path": func(l *artifact.Listing) { l.Files[0].Path = "a\x00b" },
		"path twice":    func(l *artifact.Listing) { l.Files[0].Path = l.Files[1].Path },
		"file is a dir": func(l *artifact.Listing) { l.Files[0].Path = "sub" },
		"absurd size":   func(l *artifact.Listing) { l.Files[0].Size = 1 << 60 },
		"negative size": func(l *artifact.Listing) { l.Files[0].Size = -1 },
		"no file":       func(l *artifact.Listing) { l.Files = nil },
		"bad commit":    func(l *artifact.Listing) { l.Commit = "../x" },
		"no digest":     func(l *artifact.Listing) { l.Files[0].SHA256, l.Files[0].GitSHA1 = artifact.Digest{}, "" },
		"huge undigested": func(l *artifact.Listing) {
			l.Files[0].SHA256, l.Files[0].Size = artifact.Digest{}, maxUndigested+1
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src := newMemSource(model(1, testSegment))
			src.listing = spoil
			r := newRig(t, src)
			if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, source.ErrProtocol) {
				t.Errorf("Ensure: %v, want ErrProtocol", err)
			}
			if src.servedBytes() != 0 {
				t.Error("bytes were fetched for a listing that was refused")
			}
		})
	}
}

func TestFullDriveIsAClearErrorAndThePullResumes(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 6*testSegment))
	fsys := durabletest.New()
	if err := fsys.Mkdir("/var", 0o755); err != nil {
		t.Fatal(err)
	}
	fsys.SetCapacity(4 * testSegment)
	s, err := startSession(fsys, src)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("Ensure on a small drive: %v, want ErrNoSpace", err)
	}
	fsys.SetCapacity(0)
	m, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.checkContent(t, m, src)
}

func TestIndexThatNamesAMissingShardFailsBeforeWeightsAreWhole(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 2*testSegment))
	delete(src.files, "model-00002-of-00002.safetensors")
	r := newRig(t, src)
	_, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
	if !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "model-00002-of-00002.safetensors") {
		t.Errorf("Ensure: %v, want ErrBroken that names the shard", err)
	}
	if st, _ := r.puller.Status(testRef); st.State != Failed {
		t.Errorf("state %s, want Failed", st.State)
	}
}

func TestTruncatedShardIsNeverReady(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	src.files[shard1] = src.files[shard1][:testSegment]
	r := newRig(t, src)
	for range 2 {
		if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{}); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), shard1) {
			t.Errorf("Ensure: %v, want ErrBroken that names the file", err)
		}
		r.reopen(t)
	}
}

func TestRefMovesOnlyWithRefreshAndTheOldArtifactGoes(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	old := r.ensure(t)
	src.set(func() {
		src.files["config.json"] = []byte(`{"model_type":"newer"}`)
		src.commit = strings.Repeat("cd", 20)
	})
	if m := r.ensure(t); m.Digest != old.Digest {
		t.Fatal("the ref moved without a refresh")
	}
	before := src.servedOf(shard1)
	m, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true})
	if err != nil {
		t.Fatal(err)
	}
	if m.Digest == old.Digest || m.Commit != src.commit {
		t.Error("a refresh did not move the ref")
	}
	if src.servedOf(shard1) != before {
		t.Error("a file both artifacts have was fetched again")
	}
	if _, err := r.store.Acquire(old.Digest); !errors.Is(err, ErrUnknown) {
		t.Errorf("lease on the old artifact: %v, want ErrUnknown", err)
	}
	checkFlat(t, r, m)
	r.reopen(t)
	if again := r.ensure(t); again.Digest != m.Digest {
		t.Error("the refreshed ref was forgotten")
	}
}
