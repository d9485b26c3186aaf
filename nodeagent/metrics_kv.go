package nodeagent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/units"
)

// Metrics of the KV store. The label tenant has at most maxKVTenants values, model
// maxKVModels and "other" for each of them: a client chooses the names of its
// models, and the tenants' store knows none.
var (
	descKVHits     = desc("kv_hits_total", "Blocks that clients read and that were there.", "tenant", "tier", "model")
	descKVHitBytes = desc("kv_hit_bytes_total", "Bytes of blocks that clients read and that were there.", "tenant", "tier", "model")
	descKVSaved    = desc("kv_saved_tokens_total", "Tokens of blocks that clients read and that were there, where their number is known.", "tenant", "tier", "model")
	descKVMisses   = desc("kv_misses_total", "Blocks that clients asked for and that were not there, or not whole.", "tenant", "model")
	descKVStored   = desc("kv_model_stored_total", "Blocks of a model stored.", "tenant", "model")
	descKVNotKept  = desc("kv_model_dropped_total", "Blocks of a model not kept.", "tenant", "model")
	descKVLookups  = desc("kv_lookups_total", "Questions whether a block is there: hit, miss, or gated where its load would take longer than to compute it.", "tenant", "result")
	descKVPuts     = desc("kv_puts_total", "Blocks to be stored: stored, same where the bytes were there. Those of the stored that took the place of others are replaced, too.", "tenant", "result")
	descKVPutBytes = desc("kv_put_bytes_total", "Bytes of blocks stored.", "tenant")
	descKVDropped  = desc("kv_dropped_total", "Blocks not kept: full (no RAM), large (over 64 MiB, or for the tenant's RAM or NVMe), wear (of drives), drive (failed), queue (too much waits to be written).", "tenant", "reason")
	descKVWasted   = desc("kv_wasted_total", "Blocks stored in vain: that left RAM, or the drives, and were never read there.", "tenant", "tier")
	descKVEvicted  = desc("kv_evicted_total", "Blocks that left RAM: gone, or demoted where a drive has them.", "tenant", "to")
	descKVDeleted  = desc("kv_deleted_total", "Blocks that clients or people deleted.", "tenant")
	descKVDamaged  = desc("kv_damaged_total", "Blocks whose bytes were not what was stored.", "tenant", "tier")
	descKVWritten  = desc("kv_written_total", "Blocks written to drives: fresh, or moved when a segment is used again.", "tenant", "kind")
	descKVWriteLen = desc("kv_written_bytes_total", "Bytes of fresh blocks written to drives.", "tenant")
	descKVBlocks   = desc("kv_blocks", "Blocks on a tier.", "tenant", "tier")
	descKVBytes    = desc("kv_block_bytes", "Bytes of blocks on a tier.", "tenant", "tier")
	descKVUsed     = desc("kv_used_bytes", "Room taken: whole pages in RAM, whole segments on drives.", "tenant", "tier")
	descKVBudget   = desc("kv_budget_bytes", "Room that may be taken.", "tenant", "tier")
	descKVIndex    = desc("kv_index_bytes", "Memory of the index.", "tenant")
	descKVWaiting  = desc("kv_waiting_bytes", "Bytes that wait to be written to drives.", "tenant")
	descKVPins     = desc("kv_pins", "Pinned blocks: by clients, or by people.", "tenant", "by")
	descKVPinBytes = desc("kv_pinned_bytes", "Bytes of blocks that people pinned.", "tenant")
	descKVFound    = desc("kv_recovered_blocks", "Blocks on the drives that the start took in.", "tenant")
	descKVRecovery = desc("kv_recovery_seconds", "How long the start took to take in the blocks of the tenant that took longest.", "tenant")

	descKVDrivesOut = desc("kv_drives_out", "Drives that a tenant does not use since they failed; they are tried again.", "tenant")
	descKVUnserved  = desc("kv_tenants_refused", "Tenants that are not served since something of theirs cannot be read, by kind.", "kind")

	descKVRoom    = desc("kv_space_bytes", "KV space of the node: configured, offered (what it has of that), tenants, claims, reserved.", "tier", "what")
	descKVLeft    = desc("kv_left_bytes", "Bytes on drives of tenants that nobody serves.")
	descKVWear    = desc("kv_wear_written_bytes_total", "Bytes written to the drives ever, at most.")
	descKVRate    = desc("kv_wear_rate_bytes", "Bytes a second that may be written to the drives on average.")
	descKVLevel   = desc("kv_wear_level_ratio", "How much of the burst may be written to the drives now.")
	descKVRefused = desc("kv_wear_refused_total", "Writes that the drives' wear did not allow.")
	descKVDays    = desc("kv_wear_days_left", "For how many days the drives last at that rate; absent where kv.driveEndurance is not said.")

	descKVConns     = desc("kv_resp_connections", "Connections of clients: native ones of LMCache, or others.", "kind")
	descKVAccepted  = desc("kv_resp_accepted_total", "Connections taken.")
	descKVNoConn    = desc("kv_resp_refused_total", "Connections closed at once, beyond the bound.")
	descKVAuth      = desc("kv_resp_auth_failures_total", "Wrong passwords.")
	descKVProtocol  = desc("kv_resp_protocol_errors_total", "Connections that did not speak the protocol.")
	descKVSlow      = desc("kv_resp_slow_readers_total", "Connections closed since they did not take a reply.")
	descKVWire      = desc("kv_resp_bytes_total", "Bytes on the wire.", "direction")
	descKVCommands  = desc("kv_resp_commands_total", "Commands of clients.", "command")
	descKVSpecial   = desc("kv_resp_replies_total", "Replies out of the ordinary: padded and unpadded misses of native connections, size_mismatch, stalled_set, refused, unpinned.", "tenant", "kind")
	descKVClientPin = desc("kv_resp_pinned_bytes", "Bytes that EXISTS of native connections pins.", "tenant")
)

var kvDescs = []*prometheus.Desc{
	descKVHits, descKVHitBytes, descKVSaved, descKVMisses, descKVLookups, descKVPuts, descKVPutBytes, descKVDropped, descKVWasted, descKVEvicted,
	descKVDeleted, descKVDamaged, descKVWritten, descKVWriteLen, descKVBlocks, descKVBytes, descKVUsed, descKVBudget, descKVIndex, descKVWaiting,
	descKVPins, descKVPinBytes, descKVFound, descKVRecovery, descKVStored, descKVNotKept, descKVDrivesOut, descKVUnserved, descKVRoom, descKVLeft, descKVWear, descKVRate, descKVLevel, descKVRefused, descKVDays, descKVConns,
	descKVAccepted, descKVNoConn, descKVAuth, descKVProtocol, descKVSlow, descKVWire, descKVCommands, descKVSpecial, descKVClientPin,
}

type (
	gaugeFunc   = func(*prometheus.Desc, float64, ...string)
	counterFunc = func(*prometheus.Desc, int64, ...string)
)

// collect tells of the KV store; nothing where no space is configured.
func (k *kvSpace) collect(gauge gaugeFunc, counter counterFunc) {
	if k.cache == nil {
		return
	}
	k.collectSpace(gauge)
	wear := k.cache.Wear()
	if wear.Bounded {
		counter(descKVWear, wear.Written)
		gauge(descKVRate, float64(wear.Rate))
		gauge(descKVLevel, wear.Level)
		counter(descKVRefused, wear.Refused)
	}
	if wear.Known {
		gauge(descKVDays, wear.DaysLeft)
	}
	for kind, n := range k.refusedTenants() {
		gauge(descKVUnserved, float64(n), kind)
	}
	k.peering.collect(gauge, counter)
	for label, sum := range k.figures() {
		sum.collect(label, gauge, counter)
	}
	s := k.server.Stats()
	gauge(descKVConns, float64(s.Native), "native")
	gauge(descKVConns, float64(max(0, s.Connections-s.Native)), "other")
	counter(descKVAccepted, int64(s.Accepted))
	counter(descKVNoConn, int64(s.RefusedConnections))
	counter(descKVAuth, int64(s.AuthFailures))
	counter(descKVProtocol, int64(s.ProtocolErrors))
	counter(descKVSlow, int64(s.SlowReaders))
	counter(descKVWire, int64(s.BytesIn), "in")
	counter(descKVWire, int64(s.BytesOut), "out")
	for name, n := range s.Commands {
		counter(descKVCommands, int64(n), name)
	}
}

func (k *kvSpace) collectSpace(gauge gaugeFunc) {
	config := k.settings()
	offered, _ := config.within(k.capacity, 0)
	ownMemory, ownNVMe := config.own()
	reservedMemory, reservedNVMe := k.Reserved()
	claims := k.Budget()
	for _, of := range []struct {
		what         string
		memory, nvme units.Bytes
	}{
		{"configured", config.Memory, config.NVMe},
		{"offered", offered.Memory, offered.NVMe},
		{"tenants", ownMemory, ownNVMe},
		{"claims", claims.Memory, claims.NVMe},
		{"reserved", reservedMemory, reservedNVMe},
	} {
		gauge(descKVRoom, float64(of.memory), kvtier.TierRAM.String(), of.what)
		gauge(descKVRoom, float64(of.nvme), kvtier.TierNVMe.String(), of.what)
	}
	k.mu.Lock()
	left := k.left
	k.mu.Unlock()
	gauge(descKVLeft, float64(left))
}

// collect tells of the tenants of one label.
func (s *kvSum) collect(tenant string, gauge gaugeFunc, counter counterFunc) {
	t := s.stats
	for _, tier := range []struct {
		kvtier.TierStats
		name   string
		wasted int64
	}{{t.RAM, kvtier.TierRAM.String(), t.Unread}, {t.NVMe, kvtier.TierNVMe.String(), t.Unwanted}} {
		counter(descKVDamaged, tier.Damaged, tenant, tier.name)
		counter(descKVWasted, tier.wasted, tenant, tier.name)
		gauge(descKVBlocks, float64(tier.Blocks), tenant, tier.name)
		gauge(descKVBytes, float64(tier.Bytes), tenant, tier.name)
		gauge(descKVUsed, float64(tier.Used), tenant, tier.name)
		gauge(descKVBudget, float64(tier.Budget), tenant, tier.name)
	}
	counter(descKVLookups, t.LookupHits, tenant, "hit")
	counter(descKVLookups, max(0, t.LookupMisses-t.Gated), tenant, "miss")
	counter(descKVLookups, t.Gated, tenant, "gated")
	counter(descKVPuts, t.Puts, tenant, "stored")
	counter(descKVPuts, t.PutsSame, tenant, "same")
	counter(descKVPuts, t.PutsOther, tenant, "replaced")
	counter(descKVPutBytes, t.PutBytes, tenant)
	for reason, n := range dropsOf(t) {
		counter(descKVDropped, n, tenant, reason)
	}
	counter(descKVEvicted, t.Evicted, tenant, "gone")
	counter(descKVEvicted, t.Demoted, tenant, "nvme")
	counter(descKVDeleted, t.Deletes, tenant)
	counter(descKVWritten, t.Written, tenant, "fresh")
	counter(descKVWritten, t.Rewritten, tenant, "moved")
	counter(descKVWriteLen, t.WrittenBytes, tenant)
	gauge(descKVIndex, float64(t.IndexBytes), tenant)
	gauge(descKVDrivesOut, float64(t.DrivesOut), tenant)
	gauge(descKVWaiting, float64(t.Waiting), tenant)
	gauge(descKVPins, float64(t.Pins), tenant, "client")
	gauge(descKVPins, float64(s.pinned.Names), tenant, "people")
	gauge(descKVPinBytes, float64(s.pinned.Bytes), tenant)
	gauge(descKVFound, float64(t.Recovered), tenant)
	gauge(descKVRecovery, s.recovery.Seconds(), tenant)
	for kind, n := range map[string]uint64{
		"padded": s.resp.PaddedNils, "unpadded": s.resp.UnpaddedNils, "size_mismatch": s.resp.SizeMismatches,
		"stalled_set": s.resp.StalledSets, "refused": s.resp.Refused, "unpinned": s.resp.Unpinned,
	} {
		counter(descKVSpecial, int64(n), tenant, kind)
	}
	gauge(descKVClientPin, float64(s.resp.PinnedBytes), tenant)
	for model, m := range s.models {
		for tier, of := range map[kvtier.Tier]resp.ModelHits{kvtier.TierRAM: m.RAM, kvtier.TierNVMe: m.NVMe} {
			counter(descKVHits, int64(of.Hits), tenant, tier.String(), model)
			counter(descKVHitBytes, int64(of.Bytes), tenant, tier.String(), model)
			counter(descKVSaved, int64(of.Tokens), tenant, tier.String(), model)
		}
		counter(descKVMisses, int64(m.Misses), tenant, model)
		counter(descKVStored, int64(m.Stored), tenant, model)
		counter(descKVNotKept, int64(m.Dropped), tenant, model)
	}
}
