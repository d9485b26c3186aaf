//go:build vllm

package vllm

import (
	"testing"
)

func TestVLLMStartsColdByNameThroughTheMirrorForOneCopyFromTheOrigin(t *testing.T) {
	f, _ := use(t)
	t.Logf("three engines ready after %s, the first cold; requests to the origin until the model was there: %v", f.startedAfter, f.firstRequests)
	if f.baseSize == 0 || f.coldBytes != f.baseSize {
		t.Errorf("the origin sent %d bytes for a model of %d", f.coldBytes, f.baseSize)
	}
}

func TestVLLMStartsOfflineFromReadOnlyViewsAsAnotherUserWithoutAskingTheOrigin(t *testing.T) {
	f, ctx := use(t)
	if f.warmRequests != 0 {
		t.Errorf("the origin got %d requests while two engines started from views", f.warmRequests)
	}
	// The same bytes give the same answer, whichever door they came through.
	q := chat(base, 24, false, "which node holds the weights?")
	first := post(ctx, f.mirrored.url, q)
	check(t, first.whole(false))
	for _, e := range []*engine{f.hubView, f.flatView} {
		a := post(ctx, e.url, q)
		check(t, a.whole(false))
		if a.text != first.text {
			t.Errorf("%s says %q, want %q as from the mirror", e.name, a.text, first.text)
		}
	}
}
