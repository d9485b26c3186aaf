// Package dradriver is the DRA driver of a node: it answers the kubelet's
// Prepare and Unprepare (Driver), decides what a claim gets (planClaim, pure),
// and publishes what the node offers (PlanSlices, pure, and Publisher). The
// agent's root builds it; CLAIMS.md is the contract with people and with the
// other rooms.
//
// It reaches weights and KV space through the interfaces of package stock, the
// cluster through Cluster, and keeps what was done for each claim in package
// ledger. It never waits for the API server in Prepare or Unprepare beyond the
// one read of the claim that the kubelet's protocol asks for, and it gives no
// container a path that a claim named.
package dradriver

import (
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Name is the name of the DRA driver and the domain of its attributes.
const Name = identity.Driver

// Values of the attribute kind, which every published device has.
const (
	KindGPU     = "gpu"
	KindWeights = "weights"
	KindKV      = "kv"
)

// Names of the devices of which a node has one.
const (
	DeviceCold = "cold" // what the node can still pull, in the slice pool of weights
	DeviceKV   = "kv"   // the node's KV space
)

// PoolGPUs names the slice pool of a node's GPUs.
func PoolGPUs(node string) string { return node }

// PoolWeights names the slice pool of a node's artifacts.
func PoolWeights(node string) string { return node + "/weights" }

// PoolKV names the slice pool of a node's KV space.
func PoolKV(node string) string { return node + "/kv" }

// WeightsDevice names the device of an artifact: "w-" and the first 16 hex
// digits of its digest.
func WeightsDevice(digest artifact.Digest) string { return "w-" + digest.String()[:16] }

// Inventory is where the driver learns of the node's GPUs. Implementations are
// safe for concurrent use.
type Inventory interface {
	// Devices is the state as last known; ok is false until the first reading.
	Devices() (state device.Snapshot, ok bool)
	// Subscribe gives a channel that holds a signal after Devices changed, and
	// the func that ends the subscription.
	Subscribe() (changed <-chan struct{}, cancel func())
}
