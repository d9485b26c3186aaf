package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/admin"
)

func TestModelsShowAccessAndWhyThereIsNoView(t *testing.T) {
	t.Parallel()
	why := "access is gated, and no grant with views: true covers the ref"
	for want, m := range map[string]admin.Model{
		"open":              {Digest: "d", Access: "open"},
		"gated, no views":   {Digest: "d", Access: "gated", NoViews: why},
		"gated":             {Digest: "d", Access: "gated"},
		"unknown, no views": {Digest: "d", NoViews: why},
		"":                  {State: "Resolving"},
	} {
		if got := access(m); got != want {
			t.Errorf("access of %+v is %q, want %q", m, got, want)
		}
		if row := modelRows([]nodeModel{{Node: "n", Model: m}})[0]; len(row) != 8 || row[5] != want {
			t.Errorf("row %q", row)
		}
	}
	var out bytes.Buffer
	a := &app{}
	a.Out = &out
	if err := a.showModel(nodeModel{Node: "n", Model: admin.Model{Ref: "hub://org/name", Access: "gated", NoViews: why}}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "access   gated\n") || !strings.Contains(out.String(), "no views "+why+"\n") {
		t.Errorf("shown as\n%s", out.String())
	}
}
