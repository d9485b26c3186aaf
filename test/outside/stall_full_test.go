//go:build outside

package outside

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// An origin that stalls for a minute in mid-file: both lines, at the same agent,
// finish in the one call they were in, with the right bytes, and give up no body
// for its silence.
func TestFullBothHubLinesFinishAcrossAnOriginThatStallsForAMinute(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, _ := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	begun := make(chan time.Time, 1)
	silence(time.Minute, func() { begun <- time.Now() })(ctx, origin)
	var calls sync.WaitGroup
	for _, line := range hubLines {
		rec := startRecorder(t, r, node.Mirror)
		c := line.client(ctx, t, r, "cache-"+line.version, rec.URL)
		calls.Go(func() {
			snapshotInOneCall(ctx, t, c, line)
			wantBearable(t, rec.Exchanges())
			bodies := 0
			for _, x := range rec.Exchanges() {
				if x.Method != "GET" || !strings.Contains(x.Path, "/model-") {
					continue
				}
				if bodies++; x.Cut || x.Range != "" {
					t.Errorf("%s: a body was left after %v with %d bytes: %+v", line.version, x.Ended.Sub(x.Began), x.Bytes, x)
				}
			}
			if bodies != 2 {
				t.Errorf("%s: asked for %d bodies of weights, want each of two once", line.version, bodies)
			}
		})
	}
	calls.Wait()
	select {
	case at := <-begun:
		if lasted := time.Since(at); lasted < time.Minute {
			t.Errorf("the clients finished %v after the origin stalled: it was not waited for", lasted)
		}
	default:
		t.Error("the origin never stalled")
	}
	// Each of the four bodies had ten silences of 4 s at the least.
	if got, err := node.Metric(ctx, "hearth_mirror_trickled_bytes_total"); err != nil || got < 40 {
		t.Errorf("the mirror kept four bodies alive for a minute with %v bytes, %v", got, err)
	}
}

// Where not one byte of a file comes there is nothing to keep its clients with:
// both lines ask again, and finish in the call they were in.
func TestFullBothHubLinesAskAgainForAFileThatDoesNotBegin(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, _ := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	hold("/model-00001", 2*longSilence)(ctx, origin)
	var calls sync.WaitGroup
	for _, line := range hubLines {
		rec := startRecorder(t, r, node.Mirror)
		c := line.client(ctx, t, r, "cache-"+line.version, rec.URL)
		calls.Go(func() {
			snapshotInOneCall(ctx, t, c, line)
			wantBearable(t, rec.Exchanges())
			again := 0
			for _, x := range rec.Exchanges() {
				if !x.Cut {
					continue
				}
				if again++; x.Bytes > 0 || !strings.Contains(x.Path, "/model-00001") {
					t.Errorf("%s: a body was left that had begun: %+v", line.version, x)
				}
			}
			if again == 0 {
				t.Errorf("%s: no body was silent: the origin was not waited for", line.version)
			}
		})
	}
	calls.Wait()
}

// snapshotInOneCall takes acme/mid, on a goroutine of its own.
func snapshotInOneCall(ctx context.Context, t *testing.T, c *hubClient, line hubLine) {
	var out hubResult
	cmd := c.command("snapshot_download", map[string]any{"repo_id": "acme/mid"})
	cmd.Name += "-" + line.version
	text, err := c.rig.Run(ctx, cmd)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	var folder string
	if err != nil || out.Error != "" || json.Unmarshal(out.OK, &folder) != nil {
		t.Errorf("%s: %v %s: %s", line.version, err, out.Error, out.Message)
		return
	}
	wantSame(t, folder, filepath.Join(c.rig.Dir, "origin", "acme", "mid"))
}
