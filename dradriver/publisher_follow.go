package dradriver

import (
	"context"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// ColdSource is where the Publisher learns of the node's cold device; Driver
// implements it.
type ColdSource interface {
	// ColdFailure is the last pull for a claim that cannot succeed, while it
	// counts.
	ColdFailure() (ColdFailure, bool)
	// ColdTaken is what claims have of the cold device.
	ColdTaken() units.Bytes
	// ColdFailureChanged holds a signal after one of the two changed.
	ColdFailureChanged() <-chan struct{}
}

// Sources is what a Publisher follows; one that is nil is not there.
type Sources struct {
	Devices Inventory
	Cache   stock.Cache
	KV      stock.KV
	Cold    ColdSource
}

// Follow sets what the sources have, again after every change of theirs, until
// ctx is done; then it returns nil.
func (p *Publisher) Follow(ctx context.Context, s Sources) error {
	var devices, weights, kv, cold <-chan struct{}
	var end func()
	if s.Devices != nil {
		devices, end = s.Devices.Subscribe()
		defer end()
	}
	if s.Cache != nil {
		weights, end = s.Cache.Subscribe()
		defer end()
	}
	if s.KV != nil {
		kv, end = s.KV.Subscribe()
		defer end()
	}
	if s.Cold != nil {
		cold = s.Cold.ColdFailureChanged()
	}
	for {
		p.Set(s.offer())
		select {
		case <-ctx.Done():
			return nil
		case <-devices:
		case <-weights:
		case <-kv:
		case <-cold:
		}
	}
}

func (s Sources) offer() Offer {
	var o Offer
	if s.Devices != nil {
		if snapshot, ok := s.Devices.Devices(); ok {
			o.GPUs = snapshot
			if o.GPUs == nil {
				o.GPUs = device.Snapshot{}
			}
		}
	}
	if s.Cache != nil {
		if weights, ok := s.Cache.Weights(); ok {
			o.Weights = &weights
		}
	}
	if s.KV != nil {
		if space, ok := s.KV.Space(); ok {
			o.KV = &space
		}
	}
	if s.Cold != nil {
		if failure, ok := s.Cold.ColdFailure(); ok {
			o.Cold.Failure = failure.Reason
		}
		o.Cold.Taken = s.Cold.ColdTaken()
	}
	return o
}

// StaticInventory is an Inventory that never changes, all of it healthy.
func StaticInventory(devices []device.Device) Inventory {
	snapshot := make(device.Snapshot, len(devices))
	for i, d := range devices {
		snapshot[i] = device.State{Device: d}
	}
	return staticInventory(snapshot)
}

type staticInventory device.Snapshot

// Devices implements Inventory.
func (s staticInventory) Devices() (device.Snapshot, bool) { return device.Snapshot(s), true }

// Subscribe implements Inventory; the channel never holds a signal.
func (s staticInventory) Subscribe() (changed <-chan struct{}, cancel func()) {
	return make(chan struct{}), func() {}
}
