package cli

import (
	"time"

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
