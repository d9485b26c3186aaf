package nodeagent

import (
	"context"
	"sync"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/nodeagent/kube"
)

// offered is an inventory that is not known while a classic device plugin
// serves the GPUs, so that none is published. What was allocated before stays
// with its claims: the driver itself reads the whole inventory.
type offered struct {
	inner   dradriver.Inventory
	classic *kube.Classic

	mu   sync.Mutex
	subs map[chan struct{}]struct{}
}

var _ dradriver.Inventory = (*offered)(nil)

// Devices implements dradriver.Inventory.
func (o *offered) Devices() (device.Snapshot, bool) {
	if may, _ := o.classic.MayPublish(); !may {
		return nil, false
	}
	return o.inner.Devices()
}

// Subscribe implements dradriver.Inventory.
func (o *offered) Subscribe() (changed <-chan struct{}, cancel func()) {
	sub := make(chan struct{}, 1)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.subs[sub] = struct{}{}
	return sub, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.subs, sub)
	}
}

// run passes on the changes of both until ctx is done.
func (o *offered) run(ctx context.Context) error {
	devices, endDevices := o.inner.Subscribe()
	defer endDevices()
	classic, endClassic := o.classic.Subscribe()
	defer endClassic()
	for {
		o.signal() // also of what changed before this subscribed
		select {
		case <-ctx.Done():
			return nil
		case <-devices:
		case <-classic:
		}
	}
}

func (o *offered) signal() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for sub := range o.subs {
		select {
		case sub <- struct{}{}:
		default:
		}
	}
}
