package dradriver

import (
	"strconv"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
)

// Mount options of what containers see.
var (
	readOnly  = []string{"ro", "nosuid", "nodev", "rbind"}
	readWrite = []string{"rw", "nosuid", "nodev", "rbind"}
)

// hubPath is where a container sees the hub cache of a model.
func hubPath(path string) string { return path + "-hub" }

// gpuEdits gives a container a GPU: its device nodes as they are now, and the
// libraries of the driver root.
func gpuEdits(state device.State, driver []ledger.Mount) ledger.Edits {
	edits := ledger.Edits{Mounts: driver}
	for _, node := range state.Device.Nodes {
		edits.DeviceNodes = append(edits.DeviceNodes, ledger.DeviceNode{Path: node})
	}
	return edits
}

// weightsEdits gives a container the views of an artifact.
func weightsEdits(views stock.Views, path string) ledger.Edits {
	edits := ledger.Edits{
		Env:    []string{"HEARTH_MODEL_DIR=" + path, "HEARTH_MODEL_DIGEST=" + views.Digest.String()},
		Mounts: []ledger.Mount{{Host: views.Flat, Container: path, Options: readOnly}},
	}
	if views.Hub != "" {
		edits.Env = append(edits.Env, "HF_HUB_CACHE="+hubPath(path), "HF_HUB_OFFLINE=1")
		edits.Mounts = append(edits.Mounts, ledger.Mount{Host: views.Hub, Container: hubPath(path), Options: readOnly})
	}
	return edits
}

// kvEdits gives a container the claim's KV directory, in which the data role
// serves the claim's blocks on a socket.
func kvEdits(kv *ledger.KV, path string) ledger.Edits {
	return ledger.Edits{
		Env: []string{
			"HEARTH_KV_DIR=" + path,
			"HEARTH_KV_SOCKET=" + path + "/kv.sock",
			"HEARTH_KV_MEMORY_BYTES=" + strconv.FormatInt(kv.Memory, 10),
			"HEARTH_KV_NVME_BYTES=" + strconv.FormatInt(kv.NVMe, 10),
		},
		Mounts: []ledger.Mount{{Host: kv.Dir, Container: path, Options: readWrite}},
	}
}

// withHosts is edits with the places on the node that their first mounts have
// now; an empty one stays what it was.
func withHosts(edits ledger.Edits, hosts []string) ledger.Edits {
	edits.Mounts = append([]ledger.Mount(nil), edits.Mounts...)
	for i, host := range hosts[:min(len(hosts), len(edits.Mounts))] {
		if host != "" {
			edits.Mounts[i].Host = host
		}
	}
	return edits
}

// withDevicesNow is an entry with the device nodes that its GPUs have now: a
// boot may number them anew, while their names stay. A GPU that is not known
// now keeps what it had.
func withDevicesNow(entry ledger.Entry, devices device.Snapshot, driver []ledger.Mount) ledger.Entry {
	results := append([]ledger.Result(nil), entry.Results...)
	for i := range results {
		r := &results[i]
		if state, ok := devices.Find(device.ID(r.Device)); ok && r.Kind == ledger.KindGPU && state.Device.UUID == r.UUID {
			r.Edits = gpuEdits(state, driver)
		}
	}
	entry.Results = results
	return withNames(entry)
}

// withNames gives each result that has edits the name of its CDI device. A device
// without edits is none for CDI.
func withNames(entry ledger.Entry) ledger.Entry {
	for i := range entry.Results {
		r := &entry.Results[i]
		if r.CDI = ""; !r.Edits.IsZero() {
			r.CDI = cdi.DeviceName(entry.UID, r.Request, r.Device, r.ShareID)
		}
	}
	return entry
}
