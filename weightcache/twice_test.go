package weightcache

import (
	"bytes"
	"context"
	"io"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// A hub keeps equal bytes outside git at one path and inside git at another: of
// the second nothing is known until they were fetched.
const largeInGit = "also/in-git.dat"

var inGitRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/other", Revision: "main"}

// twice is a source of shard1 and, once put is called, of the same bytes in git
// too.
func twice() (src *memSource, put func()) {
	src = newMemSource(model(1, 3*testSegment))
	return src, func() {
		src.set(func() {
			src.files = maps.Clone(src.files)
			src.files[largeInGit] = src.files[shard1]
			src.noSHA[largeInGit] = true
		})
	}
}

// viewIsTheStore fails where a view holds other files than the store does: they
// would take room that nobody counts.
func viewIsTheStore(t *testing.T, r *rig, m *artifact.Manifest) {
	t.Helper()
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range m.Files {
		seen, err := os.Stat(filepath.Join(dir, f.Path))
		if err != nil {
			t.Fatal(err)
		}
		kept, err := os.Stat(r.store.blobPath(f.SHA256))
		if err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(seen, kept) {
			t.Errorf("%s of the view is not the file of the store", f.Path)
		}
	}
}

func TestBytesThatComeAgainInsideGitDoNotReplaceTheFileOfViews(t *testing.T) {
	t.Parallel()
	src, put := twice()
	r := newRig(t, src)
	m := r.ensure(t)
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(filepath.Join(dir, shard1))
	if err != nil {
		t.Fatal(err)
	}
	put()
	if _, err := r.puller.Ensure(t.Context(), inGitRef, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	f, _ := m.File(shard1)
	if after, err := os.Stat(r.store.blobPath(f.SHA256)); err != nil || !os.SameFile(before, after) {
		t.Errorf("the file of the store was replaced under the view: %v", err)
	}
	if left := temporaries(t, r); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

func TestALandingDoesNotReplaceTheFileThatAResolveStored(t *testing.T) {
	t.Parallel()
	src, put := twice()
	held, reached := make(chan struct{}), make(chan struct{})
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 2*testSegment {
			close(reached)
			return &gate{r: bytes.NewReader(body), open: held}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 2 })
	type result struct {
		m   *artifact.Manifest
		err error
	}
	first := make(chan result)
	go func() {
		m, err := r.puller.Ensure(context.Background(), testRef, EnsureOptions{})
		first <- result{m, err}
	}()
	<-reached
	put()
	other, err := r.puller.Manifest(t.Context(), inGitRef)
	if err != nil {
		t.Fatal(err)
	}
	f, _ := other.File(largeInGit)
	before, err := os.Stat(r.store.blobPath(f.SHA256))
	if err != nil {
		t.Fatal(err)
	}
	close(held)
	got := <-first
	if got.err != nil {
		t.Fatal(got.err)
	}
	if after, err := os.Stat(r.store.blobPath(f.SHA256)); err != nil || !os.SameFile(before, after) {
		t.Errorf("the landing replaced the file: %v", err)
	}
	viewIsTheStore(t, r, got.m)
	if left := temporaries(t, r); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

func TestNoUnfinishedFileStaysOfBytesThatCameAnotherWay(t *testing.T) {
	t.Parallel()
	src, put := twice()
	held, reached := make(chan struct{}), make(chan struct{})
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shard1 && off == 2*testSegment {
			close(reached)
			return &gate{r: iotest.ErrReader(io.ErrUnexpectedEOF), open: held}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.Streams = 1 })
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := r.puller.Ensure(ctx, testRef, EnsureOptions{})
		left <- err
	}()
	<-reached
	cancel()
	if err := <-left; err == nil {
		t.Fatal("the pull ended well")
	}
	close(held)
	if err := r.puller.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(temporaries(t, r)) == 0 {
		t.Fatal("nothing is left to resume")
	}
	put()
	if _, err := r.puller.Manifest(t.Context(), inGitRef); err != nil {
		t.Fatal(err)
	}
	if left := temporaries(t, r); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

// temporaries lists what lies in the landing directory.
func temporaries(t *testing.T, r *rig) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(r.store.Dir(), landingDir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	hidden, err := filepath.Glob(filepath.Join(r.store.Dir(), landingDir, ".*"))
	if err != nil {
		t.Fatal(err)
	}
	return append(list, hidden...)
}
