// Package localtest holds the suite that every implementation of
// local.Weights passes. Tests call it; it makes nothing itself.
package localtest

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Weights checks one implementation that knows nothing yet. good is a ref its
// sources serve, refused is a ref that no source may serve.
func Weights(t *testing.T, w local.Weights, good, refused artifact.Ref) {
	t.Helper()
	ctx := t.Context()
	if got := w.Snapshot(); len(got) != 0 {
		t.Fatalf("the suite wants an empty start, got %d refs", len(got))
	}
	if _, err := w.Ensure(ctx, refused, false); !errors.Is(err, weightcache.ErrNotAllowed) {
		t.Errorf("Ensure of a refused ref gave %v, want ErrNotAllowed", err)
	}
	if _, err := w.Acquire(ctx, artifact.Digest{1}, "nobody"); !errors.Is(err, weightcache.ErrUnknown) {
		t.Errorf("Acquire of an unknown artifact gave %v, want ErrUnknown", err)
	}
	changed, cancel := w.Subscribe()
	defer cancel()
	m, err := w.Ensure(ctx, good, false)
	if err != nil {
		t.Fatalf("Ensure gave %v", err)
	}
	select {
	case <-changed:
	case <-ctx.Done():
		t.Fatal("no signal after Ensure")
	}
	if !slices.ContainsFunc(w.Snapshot(), func(s weightcache.Status) bool {
		return s.Ref == good && s.State == weightcache.Ready && s.Digest == m.Digest && s.Present == s.Size
	}) {
		t.Errorf("after Ensure the snapshot is %+v", w.Snapshot())
	}
	again, err := w.Ensure(ctx, good, false)
	if err != nil || again.Digest != m.Digest {
		t.Errorf("Ensure again gave %v, %v", again, err)
	}

	release, err := w.Acquire(ctx, m.Digest, "claim-1")
	if err != nil {
		t.Fatalf("Acquire gave %v", err)
	}
	if got := w.Leases(); !slices.Equal(got, []local.Lease{{Digest: m.Digest, Holder: "claim-1"}}) {
		t.Errorf("leases are %v", got)
	}
	if err := w.Remove(ctx, good); !errors.Is(err, weightcache.ErrLeased) {
		t.Errorf("Remove of a leased artifact gave %v, want ErrLeased", err)
	}
	release()
	release()
	if got := w.Leases(); len(got) != 0 {
		t.Errorf("leases after release are %v", got)
	}
	if result, err := w.Verify(ctx, good); err != nil || !result.OK() || result.Files == 0 {
		t.Errorf("Verify gave %+v, %v", result, err)
	}
	ended, end := context.WithCancel(ctx)
	end()
	if _, err := w.Acquire(ended, m.Digest, "late"); !errors.Is(err, context.Canceled) {
		t.Errorf("Acquire under an ended context gave %v", err)
	}
	if err := w.Remove(ctx, good); err != nil {
		t.Errorf("Remove gave %v", err)
	}
	if _, err := w.Verify(ctx, good); !errors.Is(err, weightcache.ErrUnknown) {
		t.Errorf("Verify of a removed ref gave %v, want ErrUnknown", err)
	}
}
