package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
)

// What is wrong with one tenant costs that tenant alone: its record or its segments
// cannot be read, its key or its password is missing, its socket cannot be made. It
// is not served, which is told, and is tried again.

// refusal is a tenant that could not be opened.
type refusal struct {
	kind, name string
	why        error
	wait       time.Duration
	next       time.Time // not before
}

// A tenant is tried again after refusedFirst, then after twice as long each time, up
// to refusedLast.
const (
	refusedFirst = 10 * time.Second
	refusedLast  = 5 * time.Minute
)

// refuse notes why a tenant could not be opened.
func (k *kvSpace) refuse(kind, name string, why error) {
	key := kind + " " + name
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.refused[key]
	if r == nil {
		r = &refusal{kind: kind, name: name, wait: refusedFirst / 2}
		k.refused[key] = r
	}
	if r.why == nil || r.why.Error() != why.Error() {
		k.log.Error("a KV tenant is not served", slog.String("tenant", key), slog.Any("error", why))
	}
	r.why, r.wait = why, min(2*r.wait, refusedLast)
	r.next = time.Now().Add(r.wait)
}

// unrefuse forgets that a tenant could not be opened.
func (k *kvSpace) unrefuse(kind, name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.refused, kind+" "+name)
}

// keepRefused forgets refused tenants that a configuration does not name: what is on
// the drives of them is left there, as of any other.
func (k *kvSpace) keepRefused(ctx context.Context, config KV) error {
	var errs []error
	for _, r := range k.refusals() {
		if r.kind != kvtier.TenantCredential || slices.ContainsFunc(config.Tenants, func(t KVTenant) bool { return t.Name == r.name }) {
			continue
		}
		k.unrefuse(r.kind, r.name)
		errs = append(errs, k.cache.DetachTenant(ctx, r.kind, r.name))
	}
	return errors.Join(errs...)
}

// refusals are the tenants that are not served now.
func (k *kvSpace) refusals() (list []refusal) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(k.refused)) {
		list = append(list, *k.refused[key])
	}
	return list
}

// dropRefused ends all blocks of a tenant that is refused, by its name or "kind/name",
// and tries it again; found says whether it is one. With changing.
func (k *kvSpace) dropRefused(ctx context.Context, tenant string) (found bool, err error) {
	for _, r := range k.refusals() {
		if !named(tenant, r.kind, r.name) {
			continue
		}
		done, err := k.alone(ctx, r.kind, r.name)
		if err != nil {
			return true, err
		}
		err = k.cache.RemoveTenant(ctx, r.kind, r.name)
		done()
		if err == nil {
			k.tryAgain(ctx, r)
		}
		return true, err
	}
	return false, nil
}

// refusedTenants is how many tenants are not served, by kind.
func (k *kvSpace) refusedTenants() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := map[string]int{kvtier.TenantClaim: 0, kvtier.TenantCredential: 0}
	for _, r := range k.refused {
		n[r.kind]++
	}
	return n
}

// lookAtTenants makes what tenants lack problems, beside those of the space.
func (k *kvSpace) lookAtTenants() {
	var list []string
	for _, served := range k.list() {
		if text := served.tenant.Problem(); text != "" {
			list = append(list, text)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(k.served)) {
		if text := k.served[key].fault; text != "" {
			list = append(list, text)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(k.refused)) {
		r := k.refused[key]
		who := "KV tenant " + r.name
		if r.kind == kvtier.TenantClaim {
			who = "KV space of claim " + r.name
		}
		list = append(list, fmt.Sprintf("%s is not served, which is tried again: %v", who, r.why))
	}
	k.problems = append(slices.Clone(k.lacks), list...)
}

// alone waits until nobody else opens or ends a tenant. Errors are ctx's cause.
func (k *kvSpace) alone(ctx context.Context, kind, name string) (done func(), err error) {
	key := kind + " " + name
	for {
		k.mu.Lock()
		other := k.busy[key]
		if other == nil {
			mine := make(chan struct{})
			k.busy[key] = mine
			k.mu.Unlock()
			return func() {
				k.mu.Lock()
				delete(k.busy, key)
				k.mu.Unlock()
				close(mine)
			}, nil
		}
		k.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// retryRefused opens tenants whose time has come, until ctx ends.
func (k *kvSpace) retryRefused(ctx context.Context) error {
	tick := time.NewTicker(refusedFirst / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			k.tryRefused(ctx, time.Now())
		}
	}
}

// tryRefused opens the tenants that were refused and are to be tried by now.
func (k *kvSpace) tryRefused(ctx context.Context, now time.Time) {
	if k.enter(ctx) != nil {
		return
	}
	defer k.leave()
	due := slices.DeleteFunc(k.refusals(), func(r refusal) bool { return now.Before(r.next) })
	for _, r := range due {
		if ctx.Err() != nil {
			return
		}
		k.tryAgain(ctx, r)
	}
	if len(due) > 0 {
		k.offer(ctx, k.settings())
	}
}

// tryAgain opens a tenant that was refused, if it is still to be served.
func (k *kvSpace) tryAgain(ctx context.Context, r refusal) {
	if r.kind == kvtier.TenantClaim {
		list := k.Reservations()
		at := slices.IndexFunc(list, func(o kvtier.Reservation) bool { return o.Claim == r.name && o.Namespace != "" })
		if at < 0 {
			k.unrefuse(r.kind, r.name)
			return
		}
		k.orRefuse(ctx, r.kind, r.name, func() error { return k.addClaim(ctx, list[at]) })
		return
	}
	list := k.settings().Tenants
	at := slices.IndexFunc(list, func(o KVTenant) bool { return o.Name == r.name })
	if at < 0 {
		k.unrefuse(r.kind, r.name)
		return
	}
	k.orRefuse(ctx, r.kind, r.name, func() error { return k.addTenant(ctx, list[at]) })
}

// orRefuse opens a tenant, or notes that it could not.
func (k *kvSpace) orRefuse(ctx context.Context, kind, name string, open func() error) {
	k.mu.Lock()
	again := k.refused[kind+" "+name] != nil
	k.mu.Unlock()
	switch err := open(); {
	case err != nil && ctx.Err() != nil:
	case errors.Is(err, errReleased):
		k.unrefuse(kind, name)
	case err != nil:
		k.refuse(kind, name, err)
	default:
		k.unrefuse(kind, name)
		if again {
			k.log.Info("a KV tenant that was refused is served now", slog.String("tenant", kind+" "+name))
		}
	}
}
