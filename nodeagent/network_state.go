package nodeagent

import (
	"context"

	"github.com/hearth-dev/hearth/nodeagent/local"
)

// seen is how much is seen of the network, as the control role is told.
func (n *network) seen() *local.Network { return local.NetworkOf(n.collector.Snapshot()) }

// follow calls changed when what is told of the network or of scale-outs differs,
// until ctx is done.
func (n *network) follow(ctx context.Context, changed func()) error {
	samples, endSamples := n.collector.Subscribe()
	defer endSamples()
	records, endRecords := n.scaleouts.Subscribe()
	defer endRecords()
	told := n.seen()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-records:
			changed()
		case <-samples:
			if now := n.seen(); !now.Equal(told) {
				told = now
				changed()
			}
		}
	}
}
