package ledger

import (
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

func TestADeviceIsSharedOnlyWhereBothClaimsMay(t *testing.T) {
	t.Parallel()
	type has struct {
		namespace             string
		shared, across, admin bool
		kind                  Kind
	}
	for _, c := range []struct {
		name          string
		first, second has
		refused       string // part of the text
	}{
		{"an exclusive GPU", has{namespace: "a"}, has{namespace: "a"}, "in use by claim a/first"},
		{"one side shares", has{namespace: "a", shared: true}, has{namespace: "a"}, "in use by claim a/first"},
		{"the other side shares", has{namespace: "a"}, has{namespace: "a", shared: true}, "in use by claim a/first"},
		{"both share", has{namespace: "a", shared: true}, has{namespace: "a", shared: true}, ""},
		{"a shared GPU of two namespaces", has{namespace: "a", shared: true}, has{namespace: "b", shared: true}, "another namespace"},
		{"one class crosses namespaces", has{namespace: "a", shared: true, across: true}, has{namespace: "b", shared: true}, "another namespace"},
		{"both classes cross namespaces", has{namespace: "a", shared: true, across: true}, has{namespace: "b", shared: true, across: true}, ""},
		{"shared weights of two namespaces", has{namespace: "a", shared: true, kind: KindWeights}, has{namespace: "b", shared: true, kind: KindWeights}, ""},
		{"admin access to a GPU in use", has{namespace: "a"}, has{namespace: "b", admin: true}, ""},
		{"a GPU that an admin looks at", has{namespace: "a", admin: true}, has{namespace: "b"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := mustOpen(t, durabletest.New(), newClock())
			entry := func(name string, h has) Entry {
				if h.kind == "" {
					h.kind = KindGPU
				}
				return Entry{
					UID: uidOf(name), Namespace: h.namespace, Name: name, Results: []Result{{
						Request: "r", Pool: "node-1", Device: "d", Kind: h.kind, Shared: h.shared, AcrossNamespaces: h.across, AdminAccess: h.admin,
					}},
				}
			}
			if err := begin(l, entry("first", c.first)); err != nil {
				t.Fatal(err)
			}
			err := begin(l, entry("second", c.second))
			if c.refused == "" && err != nil || c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)) {
				t.Errorf("got %v, want %q", err, c.refused)
			}
		})
	}
}

func TestADeviceIsFreeOnceItsClaimIsGoneAndNotBefore(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("a", "gpu-0"))
	l = mustOpen(t, fsys.Crash(nil), c)
	if err := begin(l, planOf("b", "gpu-0")); err == nil {
		t.Fatal("after a restart the device of a prepared claim was given away")
	}
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if err := begin(l, planOf("b", "gpu-0")); err != nil {
		t.Error(err)
	}
}

func TestAPlanThatMovesToAnotherDeviceFreesTheFirst(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	for _, gpu := range []string{"gpu-0", "gpu-1"} {
		if err := begin(l, planOf("a", gpu)); err != nil {
			t.Fatal(err)
		}
	}
	if err := begin(l, planOf("b", "gpu-0")); err != nil {
		t.Error(err)
	}
	if err := begin(l, planOf("c", "gpu-1")); err == nil {
		t.Error("the device of the new plan is free")
	}
}
