package local_test

import (
	"testing"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/dradriver/stock/stocktest"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/nodeagent/local/localtest"
	"github.com/hearth-dev/hearth/units"
)

// ways are the two implementations.
var ways = map[string]bool{"InOneProcess": false, "OverASocket": true}

func TestTheDataRoleKeepsWhatTheControlRoleIsPromised(t *testing.T) {
	t.Parallel()
	for name, apart := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, url := newOrigin(t)
			n := newNode(t, url, apart, nil)
			localtest.Data(t, localtest.Rig{
				Data: n.data, Good: n.warm("warm"), Remove: n.remove, Leases: func() []string { return holders(n.inside.Leases()) },
				Warm: func() { n.warm("cold") }, Pods: n.toldPods, Network: n.see,
			})
		})
	}
}

func TestTheWeightCacheKeepsWhatClaimsArePromised(t *testing.T) {
	t.Parallel()
	for name, apart := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, url := newOrigin(t)
			stocktest.Cache(t, func(t *testing.T) stocktest.CacheRig {
				t.Helper()
				n := newNode(t, url, apart, nil)
				m, hidden := n.warm("warm"), n.warm("restricted")
				warm := stock.Artifact{
					Ref: m.Ref, Digest: m.Digest, Commit: m.Commit, Model: "warm", Format: "safetensors", Quantization: "bfloat16", Size: units.Bytes(m.Size()),
				}
				n.until("the warm artifact to be told", func() bool {
					w, ok := n.data.Cache().Weights()
					return ok && len(w.Artifacts) == 1
				})
				return stocktest.CacheRig{
					Cache: n.data.Cache(), Warm: warm, Cold: refOf("cold"), Forbidden: refOf("nothere"), Restricted: hidden.Digest, Remove: n.remove,
					Reopen: func(*testing.T) stock.Cache {
						n.stop()
						n.start()
						return n.data.Cache()
					},
				}
			})
		})
	}
}

func TestTheKVSpaceKeepsWhatClaimsArePromised(t *testing.T) {
	t.Parallel()
	for name, apart := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, url := newOrigin(t)
			stocktest.KV(t, func(t *testing.T) stocktest.KVRig {
				t.Helper()
				s := stocktest.KVSpace
				n := newNode(t, url, apart, func(n *node) {
					n.budget = kvtier.Budget{Memory: s.Memory, NVMe: s.NVMe, NamespaceMemory: s.NamespaceMemory, NamespaceNVMe: s.NamespaceNVMe}
				})
				return stocktest.KVRig{KV: n.data.KV(), Reopen: func(*testing.T) stock.KV {
					n.stop()
					n.start()
					return n.data.KV()
				}}
			})
		})
	}
}
