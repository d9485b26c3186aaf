package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/feed"
)

// routerScaleOuts are the scale-outs that fakeRouter tells.
func routerScaleOuts() admin.ScaleOuts {
	start := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	return admin.ScaleOuts{More: 7, ScaleOuts: []admin.ScaleOut{
		{
			ID: "r1", Node: "node-1", State: "ready", Ref: testRef, Digest: "ab", Reason: "configured", Start: start, End: start.Add(8 * time.Second),
			SizeBytes: 16 << 30, MissingBytes: 16 << 30, Sources: []feed.Source{{Name: "node-2", Kind: "peer", Bytes: 16 << 30}},
			Connections: feed.Moved{Received: 16 << 30}, Devices: feed.Moved{Received: 18 << 30, Transmitted: 2 << 30}, Unattributed: feed.Moved{Received: 20 << 20},
			Classes: []feed.Class{{Class: "weights", Locality: "off_node", Moved: feed.Moved{Received: 16 << 30}}}, Visible: "full",
			Before: feed.RoundTrips{Samples: 10, P90: 0.0004}, During: feed.RoundTrips{Samples: 10, P90: 0.0012}, Overlap: []string{"r0"},
		},
		{ID: "r2", Node: "node-2", State: "failed", Error: "no space", Ref: testRef, Reason: "pull", Start: start, End: start.Add(time.Second), Visible: "none"},
	}}
}

func TestARouterShowsTheScaleOutsOfAllNodesWithoutTheirCourse(t *testing.T) {
	t.Parallel()
	router := startRouter(t, "demo")
	out, complaint, code := hearth(t, "scaleouts", "--router", "--addr", router)
	for _, want := range []string{"r1  node-1  " + testRef, "16.0 GiB  2.0 GiB/s", "peer node-2", "0.40 ms -> 1.20 ms", "with 1", "node-2: scale-out r2: no space"} {
		if !strings.Contains(out, want) {
			t.Errorf("the table lacks %q:\n%s", want, out)
		}
	}
	if code != terminal.ExitOK || !strings.Contains(complaint, "7 older ones are not shown") {
		t.Errorf("status %d: %s", code, complaint)
	}
	out, complaint, code = hearth(t, "scaleouts", "r1", "--router", "--addr", router)
	if code != terminal.ExitOK || !strings.Contains(out, "weights  off_node") || strings.Contains(out, "by class") || !strings.Contains(complaint, "known to the agent of its node") {
		t.Errorf("status %d: %s%s", code, out, complaint)
	}
	out, _, code = hearth(t, "scaleouts", "--router", "--addr", router, "--node", "node-2", "--json")
	var said admin.ScaleOuts
	if err := json.Unmarshal([]byte(out), &said); err != nil || code != terminal.ExitOK || len(said.ScaleOuts) != 1 || said.ScaleOuts[0].ID != "r2" || said.More != 7 {
		t.Errorf("status %d, %v: %s", code, err, out)
	}
}

func TestWhereOnlyARouterIsFoundItShowsTheScaleOuts(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv(envRuntime, t.TempDir())
	t.Setenv(envAgent, "")
	if _, complaint, code := hearth(t, "scaleouts"); code != terminal.ExitUnreachable || !strings.Contains(complaint, "find the agent") {
		t.Errorf("nothing runs: status %d: %s", code, complaint)
	}
	t.Setenv(envRouter, startRouter(t, "demo"))
	if out, complaint, code := hearth(t, "scaleouts", "--last"); code != terminal.ExitOK || !strings.HasPrefix(out, "id           r1\n") {
		t.Errorf("only a router: status %d: %s%s", code, out, complaint)
	}
	t.Setenv(envAgent, fakeAgent(t))
	if out, complaint, code := hearth(t, "scaleouts", "--last"); code != terminal.ExitOK || !strings.HasPrefix(out, "id           f2\n") {
		t.Errorf("both: status %d: %s%s", code, out, complaint)
	}
}
