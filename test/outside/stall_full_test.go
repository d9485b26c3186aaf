//go:build outside

package outside

import (
	"encoding/json"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// An origin that stalls for a minute in mid-file: both lines, at the same agent,
// finish in the one call they were in, with the right bytes.
func TestFullBothHubLinesFinishAcrossAnOriginThatStallsForAMinute(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	begun := make(chan time.Time, 1)
	silence(time.Minute, func() { begun <- time.Now() })(ctx, origin)
	var calls sync.WaitGroup
	for _, line := range hubLines {
		rec := startRecorder(t, r, node.Mirror)
		c := line.client(ctx, t, r, "cache-"+line.version, rec.URL)
		calls.Go(func() {
			var out hubResult
			cmd := c.command("snapshot_download", map[string]any{"repo_id": "acme/mid"})
			cmd.Name += "-" + line.version
			text, err := r.Run(ctx, cmd)
			if err == nil {
				err = json.Unmarshal(text, &out)
			}
			var folder string
			if err != nil || out.Error != "" || json.Unmarshal(out.OK, &folder) != nil {
				t.Errorf("%s: %v %s: %s", line.version, err, out.Error, out.Message)
				return
			}
			wantSame(t, folder, filepath.Join(root, "acme", "mid"))
			wantBearable(t, rec.Exchanges())
			cuts := 0
			for _, x := range rec.Exchanges() {
				if x.Cut {
					cuts++
				}
			}
			t.Logf("%s: %d requests, %d bodies left unfinished", line.version, len(rec.Exchanges()), cuts)
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
}
