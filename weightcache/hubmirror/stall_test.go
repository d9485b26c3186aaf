package hubmirror_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// patience is the silence on which hub clients give up.
const patience = 10 * time.Second

// memory is a source in memory whose bodies a test may hold up.
type memory struct {
	files map[string][]byte

	mu      sync.Mutex
	commit  string
	down    bool
	asked   int                                           // resolves
	delay   func(path string, off int64) <-chan time.Time // what a read at off waits for; nil: nothing
	refusal error
}

func newMemory(files int, size int) *memory {
	m := &memory{files: map[string][]byte{"config.json": []byte("{}")}, commit: strings.Repeat("ab", 20)}
	random := rand.NewChaCha8([32]byte{1})
	for i := range files {
		data := make([]byte, size)
		_, _ = random.Read(data)
		m.files[fmt.Sprintf("part-%02d.bin", i)] = data
	}
	return m
}

func (m *memory) Name() string { return "memory" }

func (m *memory) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

func (m *memory) Resolve(_ context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	if m.down {
		return nil, &source.Error{Source: "memory", Op: "resolve", What: ref.String(), Err: source.ErrUnavailable}
	}
	if m.refusal != nil {
		return nil, &source.Error{Source: "memory", Op: "resolve", What: ref.String(), Status: 404, Err: m.refusal}
	}
	l := &artifact.Listing{Ref: ref, Source: "memory", Commit: m.commit}
	for path, data := range m.files {
		l.Files = append(l.Files, artifact.File{Path: path, Size: int64(len(data)), SHA256: sha256.Sum256(data), LFS: true})
	}
	slices.SortFunc(l.Files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
	return l, nil
}

func (m *memory) Open(ctx context.Context, _ *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return nil, &source.Error{Source: "memory", Op: "open", What: f.Path, Err: source.ErrUnavailable}
	}
	return &heldBody{m: m, ctx: ctx, path: f.Path, data: m.files[f.Path], off: off, end: off + n}, nil
}

type heldBody struct {
	m        *memory
	ctx      context.Context // of the call
	path     string
	data     []byte
	off, end int64
}

func (b *heldBody) Read(p []byte) (int, error) {
	if b.off == b.end {
		return 0, io.EOF
	}
	b.m.mu.Lock()
	delay := b.m.delay
	b.m.mu.Unlock()
	if delay != nil {
		if until := delay(b.path, b.off); until != nil {
			select {
			case <-until:
			case <-b.ctx.Done():
				return 0, context.Cause(b.ctx)
			}
		}
	}
	n := copy(p[:min(len(p), 64<<10)], b.data[b.off:b.end])
	b.off += int64(n)
	return n, nil
}

func (*heldBody) Close() error { return nil }

// bubble is a mirror over a real Puller in a synctest bubble.
type bubble struct {
	*hubmirror.Pipe
	src    *memory
	puller *weightcache.Puller
	store  *weightcache.Store
	mirror *hubmirror.Mirror
}

func inBubble(t *testing.T, src *memory, change func(*weightcache.PullerOptions, *hubmirror.Options)) bubble {
	t.Helper()
	st, err := weightcache.Open(weightcache.Options{Dir: t.TempDir() + "/store"})
	if err != nil {
		t.Fatal(err)
	}
	po := weightcache.PullerOptions{
		Store: st, SegmentSize: units.MiB, Sources: []weightcache.Rule{{Source: src, Refs: []string{"acme/*"}}}, ScrubEvery: -1,
	}
	var mo hubmirror.Options
	if change != nil {
		change(&po, &mo)
	}
	p, err := weightcache.NewPuller(po)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	mo.Library = library{p}
	mirror := hubmirror.New(mo)
	pipe, end := hubmirror.NewPipe(mirror)
	t.Cleanup(func() {
		end()
		cancel()
		if err := errors.Join(<-done, p.Wait(context.Background()), st.Close()); err != nil {
			t.Error(err)
		}
	})
	return bubble{pipe, src, p, st, mirror}
}

// check compares what a client saw with the file.
func (b bubble) check(t *testing.T, path string, got hubmirror.Got) {
	t.Helper()
	if got.Err != nil || !bytes.Equal(got.Body, b.src.files[path]) {
		t.Errorf("%s: %d bytes of %d and %v", path, len(got.Body), len(b.src.files[path]), got.Err)
	}
	if got.Silence >= patience {
		t.Errorf("%s: silent for %v", path, got.Silence)
	}
}

func TestClientsOutlastASourceThatStallsForAMinuteInMidFile(t *testing.T) {
	t.Parallel()
	for _, at := range []int64{100 << 10, 1 << 20, 1500 << 10, 3<<20 + 100} { // in the first, at the edge of, inside the second, and in the last segment
		synctest.Test(t, func(t *testing.T) {
			src := newMemory(2, 3<<20+200_000)
			began := time.Now()
			over := began.Add(time.Minute)
			src.delay = func(path string, off int64) <-chan time.Time {
				if path == "config.json" || off < at || !time.Now().Before(over) {
					return nil
				}
				return time.NewTimer(time.Until(over)).C
			}
			b := inBubble(t, src, nil)
			got := make(chan hubmirror.Got, 1)
			go func() { got <- b.Get(t.Context(), "/acme/tiny/resolve/main/part-00.bin") }()
			b.check(t, "part-01.bin", b.Get(t.Context(), "/acme/tiny/resolve/main/part-01.bin"))
			b.check(t, "part-00.bin", <-got)
			if took := time.Since(began); took < time.Minute || took > 2*time.Minute {
				t.Errorf("the clients were done after %v", took)
			}
			if b.mirror.Stats().Trickled == 0 {
				t.Error("nothing trickled")
			}
		})
	}
}

func TestClientsOutlastARateThatIsLowForTheirNumber(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const clients = 24
		src := newMemory(clients, 600<<10)
		b := inBubble(t, src, func(p *weightcache.PullerOptions, m *hubmirror.Options) {
			p.Streams, p.Limiter, m.Streams = 4, weightcache.NewLimiter(64<<10), 8
		})
		var all sync.WaitGroup
		for i := range clients {
			all.Go(func() {
				path := fmt.Sprintf("part-%02d.bin", i)
				b.check(t, path, b.Get(t.Context(), "/acme/tiny/resolve/main/"+path))
			})
		}
		all.Wait()
	})
}
