package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// refusing is a source that resolves nothing.
type refusing struct {
	*memSource
	err   error
	asked int
}

func (r *refusing) Resolve(_ context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	r.asked++
	return nil, &source.Error{Source: r.name, Op: "resolve", What: ref.String(), Err: r.err}
}

func TestADefiniteNoIsRememberedForAHerdAndNoLonger(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err        error
		remembered bool
		whole      bool // for every revision of the repository
	}{
		{source.ErrNotFound, true, true},
		{source.ErrNoRevision, true, false},
		{source.ErrForbidden, true, true},
		{source.ErrUnauthorized, true, true},
		{source.ErrUnavailable, false, false},
		{source.ErrProtocol, false, false},
	} {
		src := &refusing{memSource: newMemSource(nil), err: c.err}
		now := time.Unix(1e9, 0)
		r := newRig(t, src.memSource, func(_ *Options, p *PullerOptions) {
			p.Sources = []Rule{{Source: src, Refs: []string{"acme/*"}}}
			p.Now = func() time.Time { return now }
		})
		ask := func(revision string) int {
			before := src.asked
			ref := testRef
			ref.Revision = revision
			if _, err := r.puller.Manifest(t.Context(), ref); !errors.Is(err, c.err) {
				t.Errorf("%v: got %v", c.err, err)
			}
			return src.asked - before
		}
		if ask("main") == 0 {
			t.Errorf("%v: the source was not asked", c.err)
		}
		if again := ask("main"); again > 0 == c.remembered {
			t.Errorf("%v: asked again %d times", c.err, again)
		}
		if other := ask("dev"); other > 0 == c.whole {
			t.Errorf("%v: asked %d times for another revision", c.err, other)
		}
		// Who pulls by hand wants to know how it is now.
		before := src.asked
		if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{}); err == nil || src.asked == before {
			t.Errorf("%v: Ensure did not ask", c.err)
		}
		now = now.Add(refusedFor)
		if ask("main") == 0 {
			t.Errorf("%v: remembered for longer than %v", c.err, refusedFor)
		}
	}
}

func TestRefusalsAreBoundedAndAYesEndsThem(t *testing.T) {
	t.Parallel()
	var n refusals
	now := time.Unix(1e9, 0)
	for i := range 5 * maxRefusals {
		n.note(artifact.Ref{Scheme: artifact.SchemeHub, Name: fmt.Sprintf("acme/m%d", i), Revision: "main"}, source.ErrNotFound, now)
		if len(n.m) > maxRefusals {
			t.Fatalf("%d refusals are remembered", len(n.m))
		}
	}
	n.note(testRef, source.ErrNotFound, now)
	if n.find(testRef, now) == nil {
		t.Error("a fresh refusal is forgotten")
	}
	if n.find(testRef, now.Add(-time.Hour)) != nil {
		t.Error("a clock set back makes a refusal last")
	}
	n.note(testRef, nil, now)
	if n.find(testRef, now) != nil {
		t.Error("a refusal outlives a yes")
	}
}

func TestRemovalIsRefusedWhileReadersWaitAndChangesNothing(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 3*testSegment))
	release := make(chan struct{})
	src.fault = func(f artifact.File, off, _ int64, body []byte) (io.Reader, error) {
		if f.Path == shardPath(1, 2) && off > 0 {
			return &gate{r: bytes.NewReader(body), open: release}, nil
		}
		return bytes.NewReader(body), nil
	}
	r := newRig(t, src)
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	rd, err := r.puller.Open(t.Context(), m, shardPath(1, 2), OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t.Context(), rd, 0, testSegment); err != nil {
		t.Fatal(err)
	}
	if err := r.puller.Remove(t.Context(), testRef); !errors.Is(err, ErrLeased) {
		t.Errorf("removal under a reader: %v, want ErrLeased", err)
	}
	close(release)
	want := src.files[shardPath(1, 2)]
	got, err := readAll(t.Context(), rd, testSegment, rd.Size())
	if err != nil || !bytes.Equal(got, want[testSegment:]) {
		t.Errorf("the reader got %d bytes and %v after the refused removal", len(got), err)
	}
	r.ensure(t)
	// Of a committed file it reads on, whatever becomes of the ref.
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	got, err = readAll(t.Context(), rd, 0, rd.Size())
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the reader of a committed file got %d bytes and %v after the removal", len(got), err)
	}
	if err := rd.Close(); err != nil {
		t.Error(err)
	}
}
