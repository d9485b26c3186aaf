package weightcache

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestEnsureLandsEveryFileAndAWarmStartFetchesNothing(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(3, 3*testSegment+17))
	src.noSHA["config.json"] = true
	r := newRig(t, src)
	m := r.ensure(t)
	var total int64
	for _, data := range src.files {
		total += int64(len(data))
	}
	if got := src.servedBytes(); got != total {
		t.Errorf("a cold pull fetched %d bytes, want %d", got, total)
	}
	dir, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range src.files {
		got, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("file %s: %d bytes, %v; want %d", path, len(got), err, len(want))
		}
	}
	st, ok := r.puller.Status(testRef)
	if !ok || st.State != Ready || st.Present != total || st.Size != total || len(st.Views) != 1 {
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
