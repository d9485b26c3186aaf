//go:build outside

package outside

import (
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
)

// originFault is something that goes wrong behind the mirror and passes.
type originFault struct {
	name    string
	install func(ctx context.Context, o *hub.Origin)
	// broken: the mirror has to break a body off, which the older line bears only
	// by a second call.
	broken bool
}

// longSilence is longer than the 10 s that both lines wait for a byte.
const longSilence = 12 * time.Second

func retryAfter(seconds string) http.Header { return http.Header{"Retry-After": {seconds}} }

// answer makes the next n requests whose path holds match fail so.
func answer(match string, n int, f hub.Fault) func(context.Context, *hub.Origin) {
	return func(_ context.Context, o *hub.Origin) { o.AddFault(match, n, f) }
}

// hold keeps requests whose path holds match waiting before they are answered.
func hold(match string, d time.Duration) func(context.Context, *hub.Origin) {
	return func(ctx context.Context, o *hub.Origin) {
		o.SetFault(func(req *http.Request) *hub.Fault {
			if strings.Contains(req.URL.Path, match) {
				select {
				case <-time.After(d):
				case <-req.Context().Done():
				case <-ctx.Done():
				}
			}
			return nil
		})
	}
}

// silence lets the beginning of each shard stop in mid-body and holds all else
// of it, until the time since the first stop is over.
func silence(d time.Duration, stopped func()) func(context.Context, *hub.Origin) {
	return func(ctx context.Context, o *hub.Origin) {
		over := make(chan struct{})
		var once sync.Once
		var mu sync.Mutex
		begun := map[string]bool{}
		o.SetFault(func(req *http.Request) *hub.Fault {
			if !strings.Contains(req.URL.Path, "/model-") {
				return nil
			}
			mu.Lock()
			first := !begun[req.URL.Path] && atBeginning(req)
			begun[req.URL.Path] = begun[req.URL.Path] || first
			mu.Unlock()
			if first {
				once.Do(func() {
					time.AfterFunc(d, func() { close(over) })
					if stopped != nil {
						stopped()
					}
				})
				return &hub.Fault{StallAfter: 300 << 10, Release: over}
			}
			select {
			case <-over:
			case <-req.Context().Done():
			case <-ctx.Done():
			}
			return nil
		})
	}
}

// atBeginning reports whether a request asks for the first bytes of a file.
func atBeginning(req *http.Request) bool {
	asked := req.Header.Get("Range")
	return asked == "" || strings.HasPrefix(asked, "bytes=0-")
}

// away drops every connection for a while, from the first body on.
func away(d time.Duration) func(context.Context, *hub.Origin) {
	return func(_ context.Context, o *hub.Origin) {
		var once sync.Once
		var back atomic.Bool
		o.SetFault(func(req *http.Request) *hub.Fault {
			if !strings.Contains(req.URL.Path, "/model-") && !back.Load() {
				return nil
			}
			once.Do(func() { time.AfterFunc(d, func() { back.Store(true) }) })
			return &hub.Fault{Drop: !back.Load()}
		})
	}
}

var passingFaults = []originFault{
	{"info 503 twice", answer("/revision/", 2, hub.Fault{Status: http.StatusServiceUnavailable}), false},
	{"info 429", answer("/revision/", 1, hub.Fault{Status: http.StatusTooManyRequests, Header: retryAfter("1")}), false},
	{"info dropped twice", answer("/revision/", 2, hub.Fault{Drop: true}), false},
	{"tree 503 twice", answer("/tree/", 2, hub.Fault{Status: http.StatusServiceUnavailable}), false},
	{"tree 429", answer("/tree/", 1, hub.Fault{Status: http.StatusTooManyRequests, Header: retryAfter("1")}), false},
	{"info after 12 s", hold("/revision/", longSilence), false},
	{"tree after 12 s", hold("/tree/", longSilence), false},
	{"config 503 twice", answer("config.json", 2, hub.Fault{Status: http.StatusServiceUnavailable}), false},
	{"body 503 twice", answer("/model-", 2, hub.Fault{Status: http.StatusServiceUnavailable}), false},
	{"body 429", answer("/model-", 2, hub.Fault{Status: http.StatusTooManyRequests, Header: retryAfter("1")}), false},
	{"body dropped before its headers", answer("/model-", 4, hub.Fault{Drop: true}), false},
	{"body cut", answer("/model-", 6, hub.Fault{CutAfter: 700_000}), false},
	{"whole file for a range", answer("/model-", 6, hub.Fault{IgnoreRange: true}), false},
	{"one byte and then nothing", answer("/model-", 4, hub.Fault{CutAfter: 1}), false},
	{"first byte after 12 s", hold("/model-", longSilence), false},
	{"body silent for 12 s", silence(longSilence, nil), false},
	{"origin away for 5 s", away(5 * time.Second), false},
	{"wrong bytes once", answer("/model-", 1, hub.Fault{WrongBytes: true}), true},
}

// The faults of an origin end at the mirror: a client that starts with nothing
// finishes in one call, and never hears a status that it does not bear.
func TestFullPassingFaultsOfTheOriginNeverReachAHubClient(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		for _, fault := range passingFaults {
			t.Run(line.version+"/"+fault.name, func(t *testing.T) {
				t.Parallel()
				r, ctx := newRig(t)
				origin, url, root := newOrigin(ctx, t, r)
				node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
				rec := startRecorder(t, r, node.Mirror)
				c := line.client(ctx, t, r, "cache", rec.URL)
				fault.install(ctx, origin)
				result := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/mid"})
				if fault.broken && result.Error != "" {
					result = c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/mid"})
				}
				wantSame(t, result.path(t), filepath.Join(root, "acme", "mid"))
				wantBearable(t, rec.Exchanges())
			})
		}
	}
}

// A file by name begins with a HEAD, which clients give up after 10 s. The
// question to the origin outlives it, so that asking again helps.
func TestFullAHeadThatTheOriginAnswersSlowlyIsAnsweredOnAskingAgain(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			origin, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			hold("/revision/", longSilence)(ctx, origin)
			name := c.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "config.json"}).path(t)
			wantSame(t, filepath.Dir(name), filepath.Join(root, "acme", "tiny"), "config.json")
			wantBearable(t, rec.Exchanges())
		})
	}
}
