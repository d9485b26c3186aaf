package feed

import "github.com/hearth-dev/hearth/nodeagent/report"

// KVStats is a node's KV store as the node last reported it: all tenants
// together, counts since the process that keeps it began.
type KVStats struct {
	RAM     KVTier `json:"ram"`
	NVMe    KVTier `json:"nvme"`
	Blocks  int64  `json:"blocks"` // one that is on both tiers counts once
	Misses  int64  `json:"misses"`
	Dropped int64  `json:"dropped"` // blocks that found no room
}

// KVTier is one tier of a KVStats.
type KVTier struct {
	Used        int64 `json:"used"`   // bytes
	Budget      int64 `json:"budget"` // bytes
	Blocks      int64 `json:"blocks"`
	Hits        int64 `json:"hits"`
	SavedTokens int64 `json:"savedTokens"`
	Damaged     int64 `json:"damaged"`
}

// kvOf is what a report says of the KV store, nil where that is nothing.
func kvOf(k *report.KV) *KVStats {
	if k == nil {
		return nil
	}
	tier := func(t *report.KVTier) KVTier {
		return KVTier{
			Used: t.GetUsedBytes(), Budget: t.GetBudgetBytes(), Blocks: t.GetBlocks(), Hits: t.GetHits(),
			SavedTokens: t.GetSavedTokens(), Damaged: t.GetDamaged(),
		}
	}
	return &KVStats{RAM: tier(k.GetRam()), NVMe: tier(k.GetNvme()), Blocks: k.GetBlocks(), Misses: k.GetMisses(), Dropped: k.GetDropped()}
}
