package hubmirror

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// fakeLibrary holds manifests by ref and opens contents by path.
type fakeLibrary struct {
	mu        sync.Mutex
	manifests map[artifact.Ref]*artifact.Manifest
	errs      map[string]error // by repository
	open      func(m *artifact.Manifest, path string) (Content, error)
	asked     []artifact.Ref
}

func (l *fakeLibrary) Manifest(_ context.Context, ref artifact.Ref) (*artifact.Manifest, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, ref)
	if err := l.errs[ref.Name]; err != nil {
		return nil, err
	}
	if m := l.manifests[ref]; m != nil {
		return m, nil
	}
	for known := range l.manifests {
		if known.Name == ref.Name {
			return nil, fmt.Errorf("resolve: %w", source.ErrNoRevision)
		}
	}
	return nil, fmt.Errorf("resolve: %w", source.ErrNotFound)
}

func (l *fakeLibrary) Open(_ context.Context, m *artifact.Manifest, path string) (Content, error) {
	return l.open(m, path)
}

func (l *fakeLibrary) Refs(_ context.Context, repo string) (map[string]string, error) {
	out := map[string]string{}
	for ref, m := range l.manifests {
		if ref.Name == repo {
			out[ref.Revision] = m.Commit
		}
	}
	return out, nil
}

// committed is a Content whose file is on the drive.
type committed struct{ file *os.File }

func (c committed) File() *os.File { return c.file }
func (c committed) Close() error   { return c.file.Close() }
func (c committed) Size() int64 {
	info, err := c.file.Stat()
	if err != nil {
		return -1
	}
	return info.Size()
}

func (c committed) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return c.file.ReadAt(p, off)
}

// filling is a Content that grows as a test says.
type filling struct {
	mu      sync.Mutex
	changed chan struct{}
	data    []byte // whole, bytes below frontier are there
	front   int64
	err     error
	file    *os.File
	reads   int
}

func newFilling(data []byte) *filling {
	return &filling{data: data, changed: make(chan struct{})}
}

// set changes the state and wakes readers.
func (f *filling) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *filling) Size() int64  { return int64(len(f.data)) }
func (f *filling) Close() error { return nil }
func (f *filling) File() *os.File {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.file
}

func (f *filling) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	for {
		f.mu.Lock()
		f.reads++
		err, front, changed := f.err, f.front, f.changed
		f.mu.Unlock()
		switch {
		case err != nil:
			return 0, err
		case front > off:
			return copy(p, f.data[off:front]), nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// newManifest lists files of given contents as a hub would.
func newManifest(t *testing.T, ref artifact.Ref, commit string, files ...artifact.File) *artifact.Manifest {
	t.Helper()
	m, err := artifact.NewManifest(&artifact.Listing{Ref: ref, Source: "test", Commit: commit, Files: files})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const testCommit = "26a61535ace4428fedeb9bb839df1dd87bfc70cb"

// newSmall is newMirror and a server in front of it.
func newSmall(t *testing.T, opts Options, content func() (Content, error)) (*Mirror, *httptest.Server) {
	t.Helper()
	mirror := newMirror(t, opts, content)
	server := httptest.NewServer(mirror)
	t.Cleanup(server.Close)
	return mirror, server
}

// newMirror serves a library of one repository "acme/tiny" with the given
// content behind weights.bin.
func newMirror(t *testing.T, opts Options, content func() (Content, error)) *Mirror {
	t.Helper()
	c, err := content()
	if err != nil {
		t.Fatal(err)
	}
	size := c.Size()
	_ = c.Close()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}
	sum := artifact.Digest{1}
	m := newManifest(t, ref, testCommit,
		artifact.File{Path: "config.json", Size: 2, SHA256: artifact.Digest{2}, GitSHA1: strings.Repeat("a", 40)},
		artifact.File{Path: "empty.bin", Size: 0, SHA256: artifact.Digest{3}, LFS: true},
		artifact.File{Path: "sub/deep/note.txt", Size: 2, SHA256: artifact.Digest{2}, GitSHA1: strings.Repeat("b", 40)},
		artifact.File{Path: "weights.bin", Size: size, SHA256: sum, LFS: true},
	)
	opts.Library = &fakeLibrary{
		manifests: map[artifact.Ref]*artifact.Manifest{ref: m},
		errs: map[string]error{
			"acme/denied": ErrNotAllowed, "acme/gated": source.ErrUnauthorized, "acme/closed": source.ErrForbidden, "acme/away": source.ErrUnavailable,
		},
		open: func(_ *artifact.Manifest, path string) (Content, error) {
			switch path {
			case "weights.bin":
				return content()
			case "empty.bin":
				return newFilling(nil), nil
			}
			f := newFilling([]byte("{}"))
			f.front = 2
			return f, nil
		},
	}
	return New(opts)
}

// onDisk gives contents over one file holding data.
func onDisk(t *testing.T, data []byte) func() (Content, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, data, 0o444); err != nil {
		t.Fatal(err)
	}
	return func() (Content, error) {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		return committed{f}, nil
	}
}

type answer struct {
	*http.Response
	body []byte
	err  error // of reading the body
}

// ask sends one request and reads its answer.
func ask(t *testing.T, method, url, body string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "gzip, deflate")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var buf bytes.Buffer
	_, err = io.Copy(&buf, resp.Body)
	return answer{resp, buf.Bytes(), err}
}

// decode reads a JSON answer.
func (a answer) decode(t *testing.T, into any) {
	t.Helper()
	if err := json.Unmarshal(a.body, into); err != nil {
		t.Fatalf("answer %.200q: %v", a.body, err)
	}
}
