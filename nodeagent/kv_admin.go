package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/units"
)

var _ admin.KVStore = (*kvSpace)(nil)

// told are the KV space's problems, for people.
func (k *kvSpace) told() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.problems)
}

// kvAtAGlance is the fill for the admin API.
func kvAtAGlance(f *local.KVFill) *admin.KVFill {
	if f == nil {
		return nil
	}
	return &admin.KVFill{
		MemoryUsed: int64(f.RAM.Used), MemoryBudget: int64(f.RAM.Budget), NVMeUsed: int64(f.NVMe.Used), NVMeBudget: int64(f.NVMe.Budget), Blocks: f.Blocks,
	}
}

// Describe implements admin.KVStore.
func (k *kvSpace) Describe(context.Context) (admin.KV, error) {
	config := k.settings()
	d := admin.KV{
		Dir: config.Dir, NamespaceMemory: int64(config.NamespaceMemory), NamespaceNVMe: int64(config.NamespaceNVMe),
		Drives: []admin.KVDrive{}, Tenants: []admin.KVTenant{}, Problems: k.told(), RESP: k.describeServer(),
	}
	offered, _ := config.within(k.capacity, 0)
	ownMemory, ownNVMe := config.own()
	reservedMemory, reservedNVMe := k.Reserved()
	claims := k.Budget()
	budget := func(configured, offered, own, claims, reserved units.Bytes) admin.KVBudget {
		return admin.KVBudget{
			Configured: int64(configured), Offered: int64(offered), Tenants: int64(own), Claims: int64(claims), Reserved: int64(reserved),
		}
	}
	d.Memory = budget(config.Memory, offered.Memory, ownMemory, claims.Memory, reservedMemory)
	d.NVMe = budget(config.NVMe, offered.NVMe, ownNVMe, claims.NVMe, reservedNVMe)
	if k.cache == nil {
		return d, nil
	}
	for _, dir := range append([]string{config.Dir}, config.Drives...) {
		free, total, err := durable.OS.Free(dir)
		drive := admin.KVDrive{Dir: dir, Size: total, Free: free}
		if err != nil {
			drive.Error = err.Error()
		}
		d.Drives = append(d.Drives, drive)
	}
	wear := k.cache.Wear()
	d.Wear = admin.KVWear{Bounded: wear.Bounded, Written: wear.Written, Rate: wear.Rate, Level: wear.Level, Refused: wear.Refused}
	if wear.Known {
		d.Wear.DaysLeft = &wear.DaysLeft
	}
	namespaces := map[string]string{}
	for _, r := range k.Reservations() {
		namespaces[r.Claim] = r.Namespace
	}
	for _, served := range k.list() {
		one := describeTenant(served)
		if one.Kind == kvtier.TenantClaim {
			one.Namespace = namespaces[one.Name]
		}
		stats := served.tenant.Stats()
		d.Recovery.Seconds = max(d.Recovery.Seconds, stats.Recovery.Seconds())
		d.Recovery.Blocks += stats.Recovered
		d.Tenants = append(d.Tenants, one)
	}
	left, err := k.cache.Left()
	if err != nil {
		return d, err
	}
	for _, l := range left {
		d.Left = append(d.Left, admin.KVLeft{Kind: l.Kind, Name: l.Name, Bytes: l.Bytes})
	}
	return d, nil
}

func (k *kvSpace) describeServer() admin.KVServer {
	s := k.server.Stats()
	d := admin.KVServer{
		Connections: s.Connections, Native: s.Native, Accepted: int64(s.Accepted), Refused: int64(s.RefusedConnections),
		AuthFailures: int64(s.AuthFailures), ProtocolErrors: int64(s.ProtocolErrors), SlowReaders: int64(s.SlowReaders), Commands: map[string]int64{},
	}
	for name, n := range s.Commands {
		d.Commands[name] = int64(n)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.tcp != nil {
		d.Address = k.tcp.String()
	}
	return d
}

func describeTenant(served *kvServed) admin.KVTenant {
	sum := served.sum()
	s := sum.stats
	tier := func(t kvtier.TierStats) admin.KVTier {
		return admin.KVTier{
			Used: int64(t.Used), Budget: int64(t.Budget), Blocks: t.Blocks, Bytes: int64(t.Bytes),
			Hits: t.Hits, HitBytes: t.HitBytes, SavedTokens: t.HitTokens, Damaged: t.Damaged,
		}
	}
	d := admin.KVTenant{
		Kind: s.Kind, Name: s.Name, Own: int64(s.Own), RAM: tier(s.RAM), NVMe: tier(s.NVMe), Blocks: s.Total, Namespaces: s.Namespaces,
		Index: int64(s.IndexBytes), Waiting: int64(s.Waiting), Pinned: sum.pinned.Names, PinnedBytes: int64(sum.pinned.Bytes), Pins: s.Pins,
		LookupHits: s.LookupHits, LookupMisses: s.LookupMisses, Gated: s.Gated, Misses: s.Misses, Stored: s.Puts, StoredBytes: s.PutBytes,
		Dropped: map[string]int64{}, Evicted: s.Evicted, Written: s.Written, WrittenBytes: s.WrittenBytes, Wasted: s.Unread + s.Unwanted,
		Connections: sum.resp.Connections, Models: map[string]admin.KVModel{},
	}
	for reason, n := range dropsOf(s) {
		if n > 0 {
			d.Dropped[reason] = n
		}
	}
	for name, m := range sum.models {
		d.Models[name] = admin.KVModel{
			Hits: int64(m.RAM.Hits + m.NVMe.Hits), Misses: int64(m.Misses), Stored: int64(m.Stored), Dropped: int64(m.Dropped),
			SavedTokens: int64(m.RAM.Tokens + m.NVMe.Tokens),
		}
	}
	return d
}

// dropsOf are the blocks that a tenant could not keep, by reason.
func dropsOf(s kvtier.TenantStats) map[string]int64 {
	return map[string]int64{"full": s.DroppedFull, "large": s.DroppedLarge, "wear": s.DroppedWear, "drive": s.DroppedDrive, "queue": s.QueueFull}
}

// tenantNamed reads the name of a tenant: "name", or "kind/name".
func (k *kvSpace) tenantNamed(text string) (*kvServed, error) {
	kind, name, both := strings.Cut(text, "/")
	switch {
	case !both:
		kind, name = "", text
	case kind == admin.KindTenant:
		kind = kvtier.TenantCredential
	}
	var found []*kvServed
	for _, served := range k.list() {
		if served.tenant.Name() == name && (kind == "" || served.tenant.Kind() == kind) {
			found = append(found, served)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, fmt.Errorf("%w: %q", kvtier.ErrUnknown, text)
	}
	return nil, fmt.Errorf("%w: several tenants are called %s, say which as kind/name", kvtier.ErrInvalid, name)
}

// Pin implements admin.KVStore.
func (k *kvSpace) Pin(ctx context.Context, tenant string, keys []block.Key, pin bool) (admin.KVPinned, error) {
	served, err := k.tenantNamed(tenant)
	if err != nil {
		return admin.KVPinned{}, err
	}
	do := served.tenant.UnpinBlocks
	if pin {
		do = served.tenant.PinBlocks
	}
	changed, err := do(ctx, keys...)
	if err != nil {
		return admin.KVPinned{}, err
	}
	now := served.tenant.Pinned()
	return admin.KVPinned{Changed: changed, Pinned: now.Names, Bytes: int64(now.Bytes)}, nil
}

// Drop implements admin.KVStore.
func (k *kvSpace) Drop(ctx context.Context, tenant string, keys []block.Key) (admin.KVDropped, error) {
	served, err := k.tenantNamed(tenant)
	if err != nil {
		return admin.KVDropped{}, err
	}
	if err := k.peering.dropped(ctx, served.tenant, keys...); err != nil {
		return admin.KVDropped{}, err
	}
	dropped, err := served.tenant.DropBlocks(ctx, keys...)
	return admin.KVDropped{Dropped: int64(dropped)}, err
}

// DropAll implements admin.KVStore: also of a tenant that nobody serves.
func (k *kvSpace) DropAll(ctx context.Context, tenant string) (admin.KVDropped, error) {
	if served, err := k.tenantNamed(tenant); err == nil {
		if err := k.peering.dropped(ctx, served.tenant); err != nil {
			return admin.KVDropped{}, err
		}
		dropped, err := served.tenant.Clear(ctx)
		return admin.KVDropped{Dropped: dropped}, errors.Join(err, k.peering.dropped(ctx, served.tenant))
	}
	if k.cache == nil {
		return admin.KVDropped{}, fmt.Errorf("%w: %q", kvtier.ErrUnknown, tenant)
	}
	// One at a time with a change of the configuration, which may serve it again.
	if err := k.enter(ctx); err != nil {
		return admin.KVDropped{}, err
	}
	defer k.leave()
	if found, err := k.dropRefused(ctx, tenant); found {
		k.offer(ctx, k.settings())
		return admin.KVDropped{Dropped: -1}, err
	}
	left, err := k.cache.Left()
	if err != nil {
		return admin.KVDropped{}, err
	}
	at := slices.IndexFunc(left, func(l kvtier.Left) bool { return named(tenant, l.Kind, l.Name) })
	if at < 0 {
		return admin.KVDropped{}, fmt.Errorf("%w: %q", kvtier.ErrUnknown, tenant)
	}
	if err := k.cache.RemoveTenant(ctx, left[at].Kind, left[at].Name); err != nil {
		return admin.KVDropped{}, err
	}
	k.offer(ctx, k.settings())
	return admin.KVDropped{Dropped: -1}, nil
}

// named says whether a text is a tenant's name, or its kind and name.
func named(text, kind, name string) bool {
	return name != "" && (text == name || text == kind+"/"+name || kind == kvtier.TenantCredential && text == admin.KindTenant+"/"+name)
}

// enter takes changing.
func (k *kvSpace) enter(ctx context.Context) error {
	select {
	case k.changing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (k *kvSpace) leave() { <-k.changing }
