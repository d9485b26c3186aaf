package dradriver

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// metadata is what the container can read about a device it got: the attributes
// that its slice has. Those of weights are the artifact's, also where it came by
// way of the cold device.
func (d *Driver) metadata(view *nodeView, r *ledger.Result, w *ledger.Weight) *kubeletplugin.DeviceMetadata {
	var published resourceapi.Device
	switch r.Kind {
	case ledger.KindGPU:
		state, ok := view.devices.Find(device.ID(r.Device))
		if !ok {
			state.Device = device.Device{ID: device.ID(r.Device), Facts: device.Facts{UUID: r.UUID}}
		}
		published = gpuDevice(state)
	case ledger.KindWeights, ledger.KindCold:
		at := slices.IndexFunc(view.weights.Artifacts, func(a stock.Artifact) bool { return a.Digest == w.Digest })
		a := stock.Artifact{Ref: w.Ref, Digest: w.Digest, Size: units.Bytes(w.Size)}
		if at >= 0 {
			a = view.weights.Artifacts[at]
		}
		published = weightsDevice(a, view.weights.Drive)
	case ledger.KindKV:
		if d.o.KV == nil {
			return nil
		}
		space, _ := d.o.KV.Space()
		published = kvDevice(space)
	}
	metadata := &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{}}
	for name, attribute := range published.Attributes {
		metadata.Attributes[string(name)] = attribute
	}
	return metadata
}
