package weightcache

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// memSource is a source in memory whose answers a test can disturb.
type memSource struct {
	name string

	mu       sync.Mutex
	files    map[string][]byte
	noSHA    map[string]bool // listed with a git id only
	commit   string
	resolves int
	opens    []string         // "path off n"
	served   map[string]int64 // bytes by path
	// fault, when set, may replace an open's body or fail it.
	fault func(f artifact.File, off, n int64, body []byte) (io.Reader, error)
	// listing, when set, may change what is listed.
	listing func(l *artifact.Listing)
}

func newMemSource(files map[string][]byte) *memSource {
	return &memSource{name: "mem", files: files, commit: strings.Repeat("ab", 20), served: map[string]int64{}, noSHA: map[string]bool{}}
}

func (s *memSource) Name() string { return s.name }

func (s *memSource) Resolve(_ context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resolves++
	l := &artifact.Listing{Ref: ref, Source: s.name, Commit: s.commit}
	for path, data := range s.files {
		f := artifact.File{Path: path, Size: int64(len(data)), GitSHA1: gitSHA1(data), Validator: "v1"}
		if !s.noSHA[path] {
			f.SHA256, f.LFS = sha256.Sum256(data), artifact.KindOf(path) == artifact.Weights
		}
		l.Files = append(l.Files, f)
	}
	slices.SortFunc(l.Files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
	if s.listing != nil {
		s.listing(l)
	}
	return l, nil
}

func (s *memSource) Open(ctx context.Context, _ *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens = append(s.opens, fmt.Sprintf("%s %d %d", f.Path, off, n))
	data, found := s.files[f.Path]
	if !found {
		return nil, &source.Error{Source: s.name, Op: "open", What: f.Path, Status: 404, Err: source.ErrNotFound}
	}
	if off+n > int64(len(data)) {
		return nil, &source.Error{Source: s.name, Op: "open", What: f.Path, Err: source.ErrChanged}
	}
	var body io.Reader = bytes.NewReader(data[off : off+n])
	if s.fault != nil {
		var err error
		if body, err = s.fault(f, off, n, data[off:off+n]); err != nil {
			return nil, err
		}
	}
	return &countedBody{Reader: body, s: s, path: f.Path}, nil
}

type countedBody struct {
	io.Reader
	s    *memSource
	path string
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.s.mu.Lock()
	b.s.served[b.path] += int64(n)
	b.s.mu.Unlock()
	return n, err
}

func (b *countedBody) Close() error {
	if c, ok := b.Reader.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func (s *memSource) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *memSource) servedBytes() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var n int64
	for _, v := range s.served {
		n += v
	}
	return n
}

func (s *memSource) servedOf(path string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.served[path]
}

func gitSHA1(data []byte) string {
	h := sha1.New() //nolint:gosec // git names its blobs so
	_, _ = fmt.Fprintf(h, "blob %d\x00", len(data))
	_, _ = h.Write(data)
	return hex.EncodeToString(h.Sum(nil))
}

// tensorFile makes a safetensors file with one tensor of n random bytes.
func tensorFile(name string, n int, seed uint64) []byte {
	header := fmt.Sprintf(`{%q:{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, name, n, n)
	data := make([]byte, 8, 8+len(header)+n)
	data[0], data[1] = byte(len(header)), byte(len(header)>>8)
	data = append(data, header...)
	random := rand.NewChaCha8([32]byte{byte(seed), 1})
	body := make([]byte, n)
	_, _ = random.Read(body)
	return append(data, body...)
}

// model makes a checkpoint of shards, each of about n bytes.
func model(shards, n int) map[string][]byte {
	files := map[string][]byte{
		"config.json":       []byte(`{"model_type":"test"}`),
		"tokenizer.json":    []byte(`{"version":"1.0"}`),
		"README.md":         []byte("# A model\n"),
		"sub/template.json": []byte(`{}`),
	}
	weights := map[string]string{}
	for i := range shards {
		path := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, shards)
		tensor := fmt.Sprintf("layer.%d", i)
		files[path] = tensorFile(tensor, n, uint64(i))
		weights[tensor] = path
	}
	index, _ := json.Marshal(map[string]any{"weight_map": weights})
	files["model.safetensors.index.json"] = index
	return files
}

var testRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}

// rig is a store and a puller over a memSource.
type rig struct {
	fs     durable.FS
	dir    string
	store  *Store
	puller *Puller
	src    *memSource
}

const testSegment = 64 << 10

func newRig(t testing.TB, src *memSource, change ...func(*Options, *PullerOptions)) *rig {
	t.Helper()
	r := &rig{fs: durable.OS, dir: t.TempDir(), src: src}
	r.open(t, change...)
	return r
}

func (r *rig) open(t testing.TB, change ...func(*Options, *PullerOptions)) {
	t.Helper()
	so := Options{Dir: r.dir + "/weights", FS: r.fs}
	po := PullerOptions{
		Sources: []Rule{{Source: r.src, Refs: []string{"acme/*"}}}, SegmentSize: testSegment, Streams: 4,
		RetryBase: time.Millisecond, RetryMax: 2 * time.Millisecond, ScrubEvery: -1,
	}
	for _, c := range change {
		c(&so, &po)
	}
	store, err := Open(so)
	if err != nil {
		t.Fatal(err)
	}
	r.store = store
	po.Store = store
	if r.puller, err = NewPuller(po); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.close(t) })
}

func (r *rig) close(t testing.TB) {
	t.Helper()
	if r.store == nil {
		return
	}
	if err := r.puller.Wait(context.Background()); err != nil {
		t.Error(err)
	}
	if err := r.store.Close(); err != nil {
		t.Error(err)
	}
	r.store = nil
}

// reopen ends the process's hold and takes the store again.
func (r *rig) reopen(t testing.TB, change ...func(*Options, *PullerOptions)) {
	t.Helper()
	r.close(t)
	r.open(t, change...)
}

func (r *rig) ensure(t testing.TB) *artifact.Manifest {
	t.Helper()
	m, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}
