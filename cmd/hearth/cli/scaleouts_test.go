package cli

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

var update = flag.Bool("update", false, "write the golden files")

// fixedNow is when what the fixed records tell is shown.
var fixedNow = time.Date(2026, 7, 1, 12, 1, 0, 0, time.UTC)

// fixedScaleOuts are one that ended, one that runs and one that failed.
func fixedScaleOuts() []scaleout.Record {
	start := fixedNow.Add(-time.Minute)
	ended := scaleout.Record{
		ID: "f1", Node: "node-1", State: scaleout.StateReady, Ref: testRef, Digest: strings.Repeat("ab", 32), Reason: "claim llm/smol",
		Start: start, End: start.Add(8 * time.Second), SizeBytes: 16 << 30, MissingBytes: 12 << 30,
		Sources:     []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin, Bytes: 12 << 30}},
		Connections: scaleout.Bytes{Received: 12<<30 + 5<<20, Transmitted: 3 << 20, Retransmitted: 700},
		Devices:     scaleout.Bytes{Received: 14 << 30, Transmitted: 2 << 30}, Unattributed: scaleout.Bytes{Received: 96 << 20, Transmitted: 1 << 20},
		Visible: "partial", Unseen: "datagrams: off by configuration", Overlap: []string{"f2"},
		Before: scaleout.Latency{Samples: 300, P50: 0.0002, P90: 0.0004, P99: 0.0009}, During: scaleout.Latency{Samples: 90, P50: 0.0003, P90: 0.0012, P99: 0.004},
		Shares: []scaleout.Share{
			{Unit: "hearth-agent.service", Class: "weights", Locality: "off_node", Bytes: scaleout.Bytes{Received: 12<<30 + 5<<20, Transmitted: 3 << 20, Retransmitted: 700}},
			{Pod: "llm/engine-0", Container: "engine", Class: "serving", Locality: "off_node", Bytes: scaleout.Bytes{Received: 20 << 20, Transmitted: 1 << 30, Retransmitted: 4096}},
			{Pod: "llm/engine-0", Container: strings.Repeat("d1", 32), Class: "kv", Locality: "loopback", Bytes: scaleout.Bytes{Received: 1000, Transmitted: 1000}},
		},
	}
	for i := range 32 {
		share := uint64(i + 1)
		ended.Series = append(ended.Series, scaleout.Point{
			Seconds: float64(i+1) / 4, Received: map[string]uint64{"weights": share * (12<<30 + 5<<20) / 32, "serving": share * 20 << 20 / 32},
			Transmitted: map[string]uint64{"serving": share << 30 / 32}, UnattributedReceived: share * 3 << 20, P90: 0.0012,
		})
	}
	return []scaleout.Record{
		{
			ID: "f2", Node: "node-1", State: scaleout.StateRunning, Ref: testRef, Reason: "configured", Start: start.Add(7 * time.Second), SizeBytes: 1 << 30,
			MissingBytes: 1 << 30, Sources: []scaleout.Source{{Name: "node-2", Kind: scaleout.KindPeer, Bytes: 53 << 20}}, Visible: "none", Overlap: []string{"f1"},
			Shares: []scaleout.Share{},
		},
		ended,
		{
			ID: "f0", Node: "node-1", State: scaleout.StateFailed, Error: "pull: no\x1b space", Ref: testRef, Reason: "pull", Start: start.Add(-time.Hour),
			End: start.Add(-time.Hour), Sources: []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin}}, Visible: "full", Shares: []scaleout.Share{},
			Devices: scaleout.Bytes{Received: 1 << 30}, Unattributed: scaleout.Bytes{Received: 1}, During: scaleout.Latency{Samples: 1, P50: 0.001, P90: 0.001, P99: 0.001},
			PacedSeconds: map[string]float64{"live": 1.25, "link": 0.5},
		},
	}
}

// golden compares with a file of testdata.
func golden(t *testing.T, file, got string) {
	t.Helper()
	file = filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", file, diff)
	}
}

func TestScaleOutsAreShownAsStored(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	a := &app{Streams: terminal.Streams{Out: &out, Err: &out}}
	if err := a.showScaleOuts(fixedScaleOuts(), fixedNow); err != nil {
		t.Fatal(err)
	}
	for _, r := range fixedScaleOuts() {
		out.WriteString("\n")
		if err := a.showScaleOut(&r, fixedNow); err != nil {
			t.Fatal(err)
		}
	}
	golden(t, "scaleouts.txt", out.String())
}

func TestTheLastScaleOutIsTheOneThatStartedLastAndRunningOnesComeFirst(t *testing.T) {
	t.Parallel()
	agent := fakeAgent(t)
	out, complaint, code := hearth(t, "scaleouts", "--last", "--addr", agent)
	if code != terminal.ExitOK || !strings.HasPrefix(out, "id           f2\n") || strings.Contains(out, "by class") {
		t.Errorf("status %d: %s%s", code, out, complaint)
	}
	at := fixedNow
	records := []scaleout.Record{{ID: "a", Start: at, End: at}, {ID: "b", Start: at.Add(1), End: at.Add(2)}, {ID: "c", Start: at.Add(-1)}, {ID: "d", Start: at.Add(-2)}}
	sortScaleOuts(records)
	var ids string
	for _, r := range records {
		ids += r.ID
	}
	if ids != "cdba" {
		t.Errorf("order is %s, want cdba", ids)
	}
}

func TestTheCourseOfAScaleOutIsWrittenAsAnSVG(t *testing.T) {
	t.Parallel()
	agent := fakeAgent(t)
	file := filepath.Join(t.TempDir(), "course.svg")
	if out, complaint, code := hearth(t, "scaleouts", "f1", "--addr", agent, "--svg", file); code != terminal.ExitOK || !strings.Contains(out, "WHO") {
		t.Fatalf("status %d: %s%s", code, out, complaint)
	}
	data, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(data), "Scale-out f1 on node-1: "+testRef) {
		t.Fatalf("%v: %s", err, data)
	}
	decoder := xml.NewDecoder(bytes.NewReader(data))
	for err == nil {
		_, err = decoder.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestWhatIsNoScaleOutHasItsExitStatusAndAHint(t *testing.T) {
	t.Parallel()
	agent, fleet := fakeAgent(t), startRouter(t, "demo")
	for _, test := range []struct {
		args []string
		code terminal.Code
		want string
	}{
		{[]string{"nothing", "--addr", agent}, terminal.ExitNotFound, "no scale-out nothing\nhint: hearth scaleouts lists them"},
		{[]string{"nothing", "--router", "--addr", fleet}, terminal.ExitNotFound, "no scale-out nothing"},
		{[]string{"f2", "--addr", agent, "--svg", "/nowhere/x.svg"}, terminal.ExitFailure, "draw scale-out f2: it has no course\nhint: "},
		{[]string{"f1", "--addr", agent, "--svg", "/nowhere/x.svg"}, terminal.ExitFailure, "write plot: open /nowhere/x.svg"},
		{[]string{"f1", "--last", "--addr", agent}, terminal.ExitUsage, "an ID or --last"},
		{[]string{"--addr", agent, "--svg", "x.svg"}, terminal.ExitUsage, "--svg wants an ID or --last"},
		{[]string{"--last", "--router", "--addr", fleet, "--svg", "x.svg"}, terminal.ExitUsage, "none of the others can be"},
		{[]string{"--addr", "http://127.0.0.1:1"}, terminal.ExitUnreachable, "hint: is the agent running?"},
	} {
		out, complaint, code := hearth(t, append([]string{"scaleouts"}, test.args...)...)
		if code != test.code || !strings.Contains(complaint, test.want) {
			t.Errorf("%v: status %d, want %d and %q: %s%s", test.args, code, test.code, test.want, out, complaint)
		}
	}
}

func TestAScaleOutOfSeveralNodesIsAskedForByNode(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if err := upstate.Write(upstate.State{PID: os.Getpid(), Agents: []upstate.Agent{
		{Node: "node-1", Admin: fakeAgent(t)}, {Node: "node-2", Admin: fakeAgent(t)},
	}}); err != nil {
		t.Fatal(err)
	}
	out, complaint, code := hearth(t, "scaleouts", "f1")
	if code != terminal.ExitUsage || !strings.Contains(complaint, "several nodes have a scale-out f1: node-1, node-1\nhint: say which with --node") {
		t.Errorf("status %d: %s%s", code, out, complaint)
	}
	if out, complaint, code := hearth(t, "scaleouts", "f1", "--node", "node-2"); code != terminal.ExitOK || !strings.Contains(out, "received, by class") {
		t.Errorf("status %d: %s%s", code, out, complaint)
	}
	if out, _, _ := hearth(t, "scaleouts"); strings.Count(out, "f1 ") != 2 {
		t.Errorf("the nodes' tables are\n%s", out)
	}
}

func TestPercentagesNeverHideThatThereIsSomething(t *testing.T) {
	t.Parallel()
	for want, c := range map[string][2]uint64{"": {0, 0}, "0.0%": {0, 9}, "<0.1%": {1, 1 << 40}, "0.1%": {1, 1000}, "100.0%": {5, 5}} {
		if got := percent(c[0], c[1]); got != want {
			t.Errorf("%d of %d is %q, want %q", c[0], c[1], got, want)
		}
	}
}

// fixedNetwork is a node that sees its devices alone.
func fixedNetwork() admin.Network {
	return admin.Network{
		At: fixedNow, Since: fixedNow.Add(-time.Hour), Sight: "devices", Reason: "sockets: no BTF",
		Sensors: []admin.NetSensor{{Name: "sockets", Wanted: true, Reason: "no BTF"}, {Name: "walk", On: true, Wanted: true}, {Name: "datagrams", Reason: "off by configuration"}},
		Totals: []admin.NetTotal{
			{Class: "weights", Locality: "off_node", Transport: "tcp", NetBytes: admin.NetBytes{Received: 12 << 30, Transmitted: 1 << 20, Retransmitted: 700}},
			{Class: "serving", Locality: "same_node", Transport: "tcp", NetBytes: admin.NetBytes{Received: 1 << 20, Transmitted: 1 << 30}},
		},
		Owners: []admin.NetOwner{
			{Unit: "hearth-agent.service", Class: "weights", Locality: "off_node", Transport: "tcp", NetBytes: admin.NetBytes{Received: 12 << 30, Transmitted: 1 << 20, Retransmitted: 700}},
			{Pod: "llm/engine-0", PodUID: "u-0", Container: "engine", Class: "serving", Locality: "same_node", Transport: "tcp", NetBytes: admin.NetBytes{Received: 1 << 19, Transmitted: 1 << 29}},
			{PodUID: "u-1", Class: "serving", Locality: "same_node", Transport: "tcp", NetBytes: admin.NetBytes{Received: 1 << 19, Transmitted: 1 << 29}},
		},
		MoreOwners: 3,
		Devices:    admin.NetBytes{Received: 13 << 30, Transmitted: 1 << 30}, Owned: admin.NetBytes{Received: 12 << 30, Transmitted: 2 << 20},
		Unattributed: admin.NetBytes{Received: 1 << 30, Transmitted: 1022 << 20}, Live: admin.NetLive{Connections: 2, P50: 0.0002, P90: 0.0004},
	}
}

func TestANetworkIsShownAsStored(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	a := &app{Streams: terminal.Streams{Out: &out, Err: &out}}
	full := nodeNetwork{Node: "node-2", Network: admin.Network{Since: fixedNow, Sight: "full"}}
	if err := a.showNetwork([]nodeNetwork{{Node: "node-1", Network: fixedNetwork()}, full}, fixedNow); err != nil {
		t.Fatal(err)
	}
	golden(t, "network.txt", out.String())
}

func TestOwnersPastTheTableAreCounted(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	n := fixedNetwork()
	for range maxOwnerRows {
		n.Owners = append(n.Owners, n.Owners[0])
	}
	if err := (&app{Streams: terminal.Streams{Out: &out}}).showNetwork([]nodeNetwork{{Node: "n", Network: n}}, fixedNow); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "6 more") {
		t.Errorf("6 more owners are not told:\n%s", out.String())
	}
}

func TestTheSightOfANetworkIsOneLine(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]admin.NetSight{
		"network: full": {Sight: "full"}, "network: devices only: no BTF": {Sight: "devices", Reason: "no BTF"},
		"network: partial: seed: x": {Sight: "partial", Reason: "seed: x"}, "network: none: off": {Sight: "none", Reason: "off"},
	} {
		if got := sightText(s); got != want {
			t.Errorf("%+v is %q, want %q", s, got, want)
		}
	}
}

func TestWhatANodeDidNotSeeIsNotShownAsNothing(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	a := &app{Streams: terminal.Streams{Out: &out, Err: &out}}
	if err := a.showScaleOut(&scaleout.Record{ID: "x", Visible: "devices", Unseen: "sockets: no BTF", Sources: []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin, Bytes: 1 << 20}}}, fixedNow); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"connections  not seen", "live p90     not seen", "devices      received 0 B", "not seen     sockets: no BTF"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("lacks %q:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "WHO") {
		t.Errorf("has a table of owners that were not seen:\n%s", &out)
	}
}
