package dradriver

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// earlier is what an earlier run published of the volatile slice pools. It
// stands until the data role says what it has now: a restart of this role alone
// writes nothing, and a data role that is away, or reads its store yet, takes no
// device from the scheduler that is still there. One goroutine uses it.
type earlier struct {
	settle  time.Duration
	devices map[string][]resourceapi.Device // by slice pool
	since   time.Time                       // when weights were first known in this run
}

// readEarlier asks for the slices that there are.
func readEarlier(ctx context.Context, client kubernetes.Interface, node string) (map[string][]resourceapi.Device, error) {
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + node + "," + resourceapi.ResourceSliceSelectorDriver + "=" + Name,
	})
	if err != nil {
		return nil, err
	}
	devices := map[string][]resourceapi.Device{}
	for _, pool := range []string{PoolWeights(node), PoolKV(node)} {
		var of []resourceapi.ResourceSlice
		for i := range list.Items {
			if s := list.Items[i].Spec; s.Driver == Name && s.Pool.Name == pool && s.NodeName != nil && *s.NodeName == node {
				of = append(of, list.Items[i])
			}
		}
		// They have one slice each; what is otherwise was not whole.
		if len(of) == 1 && of[0].Spec.Pool.ResourceSliceCount == 1 {
			devices[pool] = of[0].Spec.Devices
		}
	}
	return devices, nil
}

// coldSize is the published size of the cold device, 0 where there is none.
func (e *earlier) coldSize(node string) int64 {
	for _, d := range e.devices[PoolWeights(node)] {
		if d.Name == DeviceCold {
			size := d.Capacity[CapacitySize].Value
			return size.Value()
		}
	}
	return 0
}

// keep puts into a plan what still stands, and gives the time at which less
// will; a zero time says that only news matter. The offer is the one of the plan.
func (e *earlier) keep(plan *Plan, o Offer, now time.Time) time.Time {
	var wake time.Time
	for pool, devices := range e.devices {
		wanted, known := o.Pools.Weights, o.Weights != nil
		if pool == PoolKV(o.Node) {
			wanted, known = o.Pools.KV, o.KV != nil
		}
		planned, planning := plan.Resources.Pools[pool]
		switch {
		case !wanted:
			delete(e.devices, pool)
		case !o.Features.ConsumableCapacity: // it may be had again
		case !known:
			plan.pool(pool, devices)
		case pool == PoolKV(o.Node) || !planning || len(planned.Slices) != 1:
			delete(e.devices, pool)
		default:
			if e.since.IsZero() {
				e.since = now
			}
			if wake = e.since.Add(e.settle); !now.Before(wake) {
				delete(e.devices, pool)
				wake = time.Time{}
				continue
			}
			plan.Resources.Pools[pool] = resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: withAbsent(planned.Slices[0].Devices, devices)}}}
		}
	}
	return wake
}

// withAbsent adds the artifacts that devices lack, as far as there is room.
func withAbsent(devices, before []resourceapi.Device) []resourceapi.Device {
	devices = slices.Clone(devices)
	for _, d := range before {
		there := slices.ContainsFunc(devices, func(has resourceapi.Device) bool { return has.Name == d.Name })
		if !there && d.Name != DeviceCold && len(devices) < MaxDevicesPerSlice {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b resourceapi.Device) int { return cmp.Compare(a.Name, b.Name) })
	return devices
}

// remember learns what an earlier run published; it tries until the API server
// answers. The error is ctx's.
func (p *Publisher) remember(ctx context.Context) error {
	for retry := askRetry; ; retry = min(2*retry, askRetryMost) {
		one, cancel := context.WithTimeout(ctx, askWithin)
		devices, err := readEarlier(one, p.opts.Client, p.opts.Node)
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil {
			p.earlier.devices = devices
			p.settler.free = p.earlier.coldSize(p.opts.Node)
			return nil
		}
		p.waiting(err.Error())
		p.log.Warn("slices of this node cannot be read; new ones wait", slog.Any("error", err), slog.Duration("retry", retry))
		timer := time.NewTimer(retry)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}
