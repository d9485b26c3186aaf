package peer

import (
	"context"
	"time"
)

// inBatches works on what waits in a row for a peer, until ctx ends. joins says
// what goes with those before it in one batch, and do exchanges a batch over the
// connection of before, nil for none, and gives that to go on with. Without work
// it is closed after a while.
func inBatches[T any](ctx context.Context, row <-chan T, joins func(batch []T, next T) bool, do func(l *link, batch []T) *link) {
	var l *link
	hangUp := func() {
		if l != nil {
			l.close()
			l = nil
		}
	}
	defer hangUp()
	idle := time.NewTimer(idleAfter)
	defer idle.Stop()
	var next []T // was taken from the row and does not go with those before it
	for {
		batch := next
		next = nil
		if batch == nil {
			idle.Reset(idleAfter)
			select {
			case first := <-row:
				batch = []T{first}
			case <-idle.C:
				hangUp()
				continue
			case <-ctx.Done():
				return
			}
		}
	gather:
		for next == nil {
			select {
			case one := <-row:
				if joins(batch, one) {
					batch = append(batch, one)
				} else {
					next = []T{one}
				}
			default:
				break gather
			}
		}
		l = do(l, batch)
		if ctx.Err() != nil {
			return
		}
	}
}
