package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// take takes another configuration while the store serves: totals, budgets of
// namespaces, drive wear, and tenants with their budgets and rates. late names the
// fields that differ and need a restart; of those the values before stand. Claims
// keep what they have: where the new totals do not leave that, nothing changes and
// the error wraps kvtier.ErrNoSpace.
func (k *kvSpace) take(ctx context.Context, want KV) (late []string, err error) {
	if err := k.enter(ctx); err != nil {
		return nil, fmt.Errorf("change KV configuration: %w", err)
	}
	defer k.leave()
	before := k.settings()
	// One that is refused may become any other.
	before.Tenants = slices.DeleteFunc(slices.Clone(before.Tenants), func(t KVTenant) bool { return !k.serves(kvtier.TenantCredential, t.Name) })
	next, late := before.with(want)
	if next.set() != before.set() || !before.set() {
		if next.set() != before.set() {
			late = append(late, "kv.memory and kv.nvme from or to nothing")
		}
		return late, nil
	}
	added, stay, removed := changedTenants(before.Tenants, next.Tenants)
	left := k.leftBytes()
	offered, _ := next.within(k.capacity, left)
	if err := k.SetBudget(ctx, offered.claims(left)); err != nil {
		return late, err
	}
	k.mu.Lock()
	k.config = next
	k.mu.Unlock()
	k.peering.setRate(next.PeerRate)
	if next.DriveWritesPerDay != before.DriveWritesPerDay {
		err = k.cache.SetWritesPerDay(next.DriveWritesPerDay)
	}
	// Nobody is to take what another has still: who gets less comes first.
	wasOffered, _ := before.within(k.capacity, 0)
	if offered.Memory > wasOffered.Memory {
		k.cache.SetMemory(offered.Memory)
	}
	for _, name := range removed {
		err = errors.Join(err, k.detach(ctx, name))
	}
	err = errors.Join(err, k.keepRefused(ctx, next))
	slices.SortStableFunc(stay, func(a, b KVTenant) int { return shrinksFirst(before, a) - shrinksFirst(before, b) })
	for _, t := range stay {
		// What cannot be read leaves this one as it is, and the others are changed.
		spec, e := next.spec(t)
		if e == nil {
			_, e = k.cache.AddTenant(ctx, spec)
		}
		err = errors.Join(err, e)
	}
	k.lookAtCredentials()
	for _, t := range added {
		k.orRefuse(ctx, kvtier.TenantCredential, t.Name, func() error { return k.addTenant(ctx, t) })
	}
	for _, r := range k.Reservations() {
		if r.Namespace != "" && k.serves(kvtier.TenantClaim, r.Claim) {
			_, e := k.cache.AddTenant(ctx, next.claimSpec(r))
			if !k.serves(kvtier.TenantClaim, r.Claim) {
				// It was released meanwhile, perhaps before it was added again.
				e = k.cache.RemoveTenant(ctx, kvtier.TenantClaim, r.Claim)
			}
			err = errors.Join(err, e)
		}
	}
	if offered.Memory < wasOffered.Memory {
		k.cache.SetMemory(offered.Memory)
	}
	k.offer(ctx, next)
	k.fill.look(k.figures())
	if err != nil {
		return late, fmt.Errorf("change KV configuration: %w", err)
	}
	return late, nil
}

// with gives the configuration with what of another can be taken while the store
// serves, and names what differs besides.
func (k KV) with(want KV) (KV, []string) {
	var late []string
	keep := func(field string, differs bool, restore func()) {
		if differs {
			late = append(late, field)
			restore()
		}
	}
	next := want
	next.Tenants = slices.Clone(want.Tenants)
	keep("kv.dir", k.Dir != want.Dir, func() { next.Dir = k.Dir })
	keep("kv.drives", !slices.Equal(k.Drives, want.Drives), func() { next.Drives = k.Drives })
	keep("kv.driveCapacity", k.DriveCapacity != want.DriveCapacity, func() { next.DriveCapacity = k.DriveCapacity })
	keep("kv.driveEndurance", k.DriveEndurance != want.DriveEndurance, func() { next.DriveEndurance = k.DriveEndurance })
	keep("kv.peers", !slices.Equal(k.Peers, want.Peers), func() { next.Peers = k.Peers })
	keep("kv.zone", k.Zone != want.Zone, func() { next.Zone = k.Zone })
	keep("kv.peerZones", or(k.PeerZones, PeersOwn) != or(want.PeerZones, PeersOwn), func() { next.PeerZones = k.PeerZones })
	keep("kv.verifyEvery", k.VerifyEvery != want.VerifyEvery, func() { next.VerifyEvery = k.VerifyEvery })
	keep("kv.driveWritesPerDay from or to 0", (k.DriveWritesPerDay == 0) != (want.DriveWritesPerDay == 0), func() {
		next.DriveWritesPerDay = k.DriveWritesPerDay
	})
	for i := range next.Tenants {
		t := &next.Tenants[i]
		at := slices.IndexFunc(k.Tenants, func(o KVTenant) bool { return o.Name == t.Name })
		if at < 0 {
			continue
		}
		was, field := k.Tenants[at], "kv.tenants["+t.Name+"]."
		keep(field+"credentialFile", was.CredentialFile != t.CredentialFile, func() { t.CredentialFile = was.CredentialFile })
		keep(field+"anonymous", was.Anonymous != t.Anonymous, func() { t.Anonymous = was.Anonymous })
		keep(field+"socket", was.Socket != t.Socket, func() { t.Socket = was.Socket })
		keep(field+"encryptionKeyFile", was.EncryptionKeyFile != t.EncryptionKeyFile, func() { t.EncryptionKeyFile = was.EncryptionKeyFile })
		keep(field+"peers", was.Peers != t.Peers, func() { t.Peers = was.Peers })
		keep(field+"nvme from or to 0", (was.NVMe == 0) != (t.NVMe == 0), func() { t.NVMe = was.NVMe })
	}
	return next, late
}

// changedTenants compares tenants by name.
func changedTenants(before, next []KVTenant) (added, stay []KVTenant, removed []string) {
	names := func(list []KVTenant) map[string]bool {
		set := map[string]bool{}
		for _, t := range list {
			set[t.Name] = true
		}
		return set
	}
	had, has := names(before), names(next)
	for _, t := range next {
		if had[t.Name] {
			stay = append(stay, t)
		} else {
			added = append(added, t)
		}
	}
	for _, t := range before {
		if !has[t.Name] {
			removed = append(removed, t.Name)
		}
	}
	return added, stay, removed
}

// shrinksFirst is 0 for a tenant that gets less of anything, else 1.
func shrinksFirst(before KV, t KVTenant) int {
	at := slices.IndexFunc(before.Tenants, func(o KVTenant) bool { return o.Name == t.Name })
	if at >= 0 && (t.Memory < before.Tenants[at].Memory || t.NVMe < before.Tenants[at].NVMe) {
		return 0
	}
	return 1
}

// serves says whether a tenant is served.
func (k *kvSpace) serves(kind, name string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.served[kind+" "+name] != nil
}

// detach serves a tenant no more. Its blocks stay on the drives.
func (k *kvSpace) detach(ctx context.Context, name string) error {
	key := kvtier.TenantCredential + " " + name
	k.mu.Lock()
	served := k.served[key]
	k.mu.Unlock()
	if served == nil {
		return nil
	}
	if err := served.stop(ctx); err != nil {
		return fmt.Errorf("detach KV tenant %s: %w", name, err)
	}
	k.forget(key)
	k.peering.leave(served.tenant)
	k.mu.Lock()
	k.renewCredentialsLocked()
	k.mu.Unlock()
	served.resp.End() // no new one can become its client
	k.log.Info("a KV tenant is served no more, its blocks stay on the drives", slog.String("tenant", name),
		slog.String("nvme", units.Bytes(served.tenant.Stats().NVMe.Used).Human()))
	return k.cache.DetachTenant(ctx, kvtier.TenantCredential, name)
}
