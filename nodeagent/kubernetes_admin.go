package nodeagent

import (
	"slices"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// Words for how a slice pool is.
const (
	poolPublished = "published"
	poolPending   = "pending"
	poolWithheld  = "withheld"
	poolOff       = "off"
)

// claims gives the claims for the admin API.
func (c *cluster) claims() []admin.Claim {
	if c == nil {
		return nil
	}
	statuses := c.driver.Claims()
	list := make([]admin.Claim, 0, len(statuses))
	for _, s := range statuses {
		claim := admin.Claim{
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, State: s.State, Since: s.Since, Pods: s.Pods, Progress: s.Progress, Error: s.Err,
		}
		for _, d := range s.Devices {
			claim.Devices = append(claim.Devices, admin.ClaimDevice{
				Request: d.Request, Kind: d.Kind, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, UUID: d.UUID, CDI: qualified(d.CDI),
			})
		}
		for _, w := range s.Artifacts {
			claim.Artifacts = append(claim.Artifacts, admin.ClaimArtifact{
				Ref: w.Ref, Digest: w.Digest, Present: int64(w.Present), Size: int64(w.Size), Left: units.Duration(w.Left),
			})
		}
		if s.KV != nil {
			claim.KV = &admin.ClaimKV{Memory: s.KV.Memory, NVMe: s.KV.NVMe, Dir: s.KV.Dir}
		}
		list = append(list, claim)
	}
	return list
}

// qualified gives the name under which a runtime finds a CDI device.
func qualified(name string) string {
	if name == "" {
		return ""
	}
	return cdi.Qualified(name)
}

// state is what the agent says of its side of Kubernetes.
func (c *cluster) state(config Config) *admin.Kubernetes {
	if c == nil {
		return nil
	}
	published := c.publisher.State()
	k := &admin.Kubernetes{Registered: c.registered(), Server: published.Cluster.Version, Claims: claimsByState(c.driver.Claims())}
	for _, pool := range []struct{ kind, name string }{
		{"gpus", dradriver.PoolGPUs(config.Node)}, {"weights", dradriver.PoolWeights(config.Node)}, {"kv", dradriver.PoolKV(config.Node)},
	} {
		k.Pools = append(k.Pools, c.pool(config, published, pool.kind, pool.name))
	}
	return k
}

// pool says how one slice pool is.
func (c *cluster) pool(config Config, published dradriver.PublisherState, kind, name string) admin.SlicePool {
	p := admin.SlicePool{Name: name, State: poolPending, Detail: published.Waiting}
	if !config.Kubernetes.publishes(kind) {
		p.State, p.Detail = poolOff, "kubernetes.devices does not name "+kind
		return p
	}
	if kind == "gpus" && c.classic != nil {
		if may, why := c.classic.MayPublish(); !may {
			p.State, p.Detail = poolWithheld, why
			return p
		}
	}
	if kind != "gpus" && slices.Contains(published.Lacking, dradriver.FeatureConsumableCapacity) {
		p.State, p.Detail = poolOff, "the cluster lacks "+dradriver.FeatureConsumableCapacity
		return p
	}
	at := slices.IndexFunc(published.Pools, func(s dradriver.PoolState) bool { return s.Name == name })
	if at < 0 {
		if p.Detail == "" {
			p.Detail = "nothing is known to publish yet"
		}
		return p
	}
	s := published.Pools[at]
	p.Devices, p.Detail = s.Devices, s.Failure
	if s.InSync {
		p.State = poolPublished
	}
	return p
}
