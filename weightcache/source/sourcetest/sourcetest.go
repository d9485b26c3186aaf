// Package sourcetest is the conformance suite of source.Source: every type
// passes it, over its own kind of origin. Tests of sources call Run; nothing
// else imports it.
package sourcetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Fixture is an origin made for one test, and the source in front of it.
type Fixture struct {
	Source  source.Source
	Ref     artifact.Ref      // a ref that resolves to Files
	Missing []artifact.Ref    // refs that are ErrNotFound
	Files   map[string][]byte // at least one over 64 KiB, one empty and one in a folder
	// Rewrite replaces the content of a file at the origin by bytes of the
	// same length, in a way the source can notice.
	Rewrite func(t *testing.T, path string)
	// Secret must not appear in any error.
	Secret string
}

// Run runs the suite; build makes a fresh fixture for each case.
func Run(t *testing.T, build func(t *testing.T) Fixture) {
	t.Helper()
	cases := map[string]func(t *testing.T, f Fixture){
		"ResolveListsExactlyTheFilesAndIsDeterministic": resolves,
		"RangesAreExact":                       ranges,
		"ConcurrentOpensDoNotDisturbEachOther": concurrent,
		"ACancelledContextEndsCallsAndReads":   cancelled,
		"WhatIsAbsentIsNotFound":               absent,
		"AFileRewrittenInPlaceIsChanged":       changed,
		"RangesOutsideTheFileAreRefused":       outside,
	}
	for name, run := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, build(t))
		})
	}
}

func mustResolve(t *testing.T, f Fixture) *artifact.Listing {
	t.Helper()
	l, err := f.Source.Resolve(t.Context(), f.Ref)
	if err != nil {
		t.Fatalf("resolve %s: %v", f.Ref, err)
	}
	return l
}

func find(t *testing.T, l *artifact.Listing, path string) artifact.File {
	t.Helper()
	i := slices.IndexFunc(l.Files, func(f artifact.File) bool { return f.Path == path })
	if i < 0 {
		t.Fatalf("listing lacks %s", path)
	}
	return l.Files[i]
}

// largest is the path of the longest file.
func largest(f Fixture) string {
	best := ""
	for path, data := range f.Files {
		if best == "" || len(data) > len(f.Files[best]) {
			best = path
		}
	}
	return best
}

func read(ctx context.Context, s source.Source, l *artifact.Listing, f artifact.File, off, n int64) ([]byte, error) {
	r, err := s.Open(ctx, l, f, off, n)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	return data, errors.Join(err, r.Close())
}

func checkError(t *testing.T, f Fixture, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
	var typed *source.Error
	if err != nil && (!errors.As(err, &typed) || typed.Source != f.Source.Name() || typed.What == "") {
		t.Errorf("error %v does not name its source and object", err)
	}
	if err != nil && f.Secret != "" && strings.Contains(err.Error(), f.Secret) {
		t.Errorf("error holds the credential: %v", err)
	}
}

func resolves(t *testing.T, f Fixture) {
	a, b := mustResolve(t, f), mustResolve(t, f)
	if a.Commit != b.Commit || !slices.Equal(a.Files, b.Files) {
		t.Error("two resolves of an unchanged origin differ")
	}
	if err := artifact.ValidCommit(a.Commit); err != nil || a.Source != f.Source.Name() || a.Ref != f.Ref {
		t.Errorf("listing of %q, ref %s, commit %q: %v", a.Source, a.Ref, a.Commit, err)
	}
	if err := artifact.CheckFiles(a.Files, false); err != nil {
		t.Error(err)
	}
	if len(a.Files) != len(f.Files) {
		t.Errorf("%d files listed, want %d", len(a.Files), len(f.Files))
	}
	for path, data := range f.Files {
		got := find(t, a, path)
		if got.Size != int64(len(data)) || got.Kind != artifact.KindOf(path) {
			t.Errorf("%s: %d bytes of kind %s", path, got.Size, got.Kind)
		}
		if sum := sha256.Sum256(data); !got.SHA256.IsZero() && got.SHA256 != sum {
			t.Errorf("%s: wrong digest", path)
		}
	}
}

func ranges(t *testing.T, f Fixture) {
	l := mustResolve(t, f)
	for path, data := range f.Files {
		file, size := find(t, l, path), int64(len(data))
		for _, c := range [][2]int64{{0, size}, {0, 0}, {size, 0}, {0, 1}, {size / 3, size / 2}, {size - 1, 1}} {
			off, n := c[0], c[1]
			if off < 0 || off+n > size {
				continue
			}
			got, err := read(t.Context(), f.Source, l, file, off, n)
			if err != nil || !bytes.Equal(got, data[off:off+n]) {
				t.Errorf("%s: %d bytes at %d gave %d bytes and %v", path, n, off, len(got), err)
			}
		}
	}
}

func concurrent(t *testing.T, f Fixture) {
	l := mustResolve(t, f)
	path := largest(f)
	file, data := find(t, l, path), f.Files[path]
	errs := make([]error, 16)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			step := int64(len(data) / len(errs))
			off := int64(i) * step
			got, err := read(t.Context(), f.Source, l, file, off, step)
			if err == nil && !bytes.Equal(got, data[off:off+step]) {
				err = fmt.Errorf("wrong bytes at %d", off)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func cancelled(t *testing.T, f Fixture) {
	l := mustResolve(t, f)
	path := largest(f)
	file := find(t, l, path)
	ctx, cancel := context.WithCancel(t.Context())
	r, err := f.Source.Open(ctx, l, file, 0, file.Size)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	// Bytes that had arrived may still be read; a whole file may not be new.
	if _, err := io.Copy(io.Discard, r); err != nil {
		checkError(t, f, err, context.Canceled)
	}
	if _, err := f.Source.Open(ctx, l, file, 0, file.Size); err == nil {
		r2, err := f.Source.Open(ctx, l, file, 0, file.Size)
		if err == nil {
			_, err = io.Copy(io.Discard, r2)
			_ = r2.Close()
		}
		checkError(t, f, err, context.Canceled)
	} else {
		checkError(t, f, err, context.Canceled)
	}
	_, err = f.Source.Resolve(ctx, f.Ref)
	checkError(t, f, err, context.Canceled)
}

func absent(t *testing.T, f Fixture) {
	for _, ref := range f.Missing {
		_, err := f.Source.Resolve(t.Context(), ref)
		checkError(t, f, err, source.ErrNotFound)
	}
	l := mustResolve(t, f)
	ghost := artifact.File{Path: "no/such.bin", Size: 10, Validator: "x"}
	_, err := read(t.Context(), f.Source, l, ghost, 0, 10)
	checkError(t, f, err, source.ErrNotFound)
}

func changed(t *testing.T, f Fixture) {
	l := mustResolve(t, f)
	path := largest(f)
	file := find(t, l, path)
	if _, err := read(t.Context(), f.Source, l, file, 0, 100); err != nil {
		t.Fatal(err)
	}
	f.Rewrite(t, path)
	got, err := read(t.Context(), f.Source, l, file, 100, 100)
	checkError(t, f, err, source.ErrChanged)
	if len(got) != 0 {
		t.Errorf("%d bytes of another version were given", len(got))
	}
	// A listing with another size is refused as well.
	fresh := mustResolve(t, f)
	longer := find(t, fresh, path)
	longer.Size++
	_, err = read(t.Context(), f.Source, fresh, longer, 0, 100)
	if err != nil {
		checkError(t, f, err, source.ErrChanged)
	}
}

func outside(t *testing.T, f Fixture) {
	l := mustResolve(t, f)
	file := find(t, l, largest(f))
	for _, c := range [][2]int64{{-1, 1}, {0, -1}, {0, file.Size + 1}, {file.Size, 1}, {1, 1<<63 - 1}} {
		_, err := f.Source.Open(t.Context(), l, file, c[0], c[1])
		checkError(t, f, err, source.ErrProtocol)
	}
}
