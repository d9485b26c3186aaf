package resp

import (
	"context"
	"fmt"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Store is a kvtier.Namespace, or what stands before one.
type Store interface {
	Lookup(key block.Key) (size int, ok bool)
	Pin(key block.Key) (*kvtier.Pin, bool)
	Get(ctx context.Context, key block.Key) (*kvtier.Block, error)
	Put(key block.Key, size int, opts kvtier.PutOptions) (*kvtier.Put, error)
	Delete(ctx context.Context, keys ...block.Key) (removed int, err error)
}

// Open serves a tenant of the KV tier: its blocks in the namespace of this
// protocol, or what before makes of it where it is not nil. Of the RAM that is the
// tenant's own a quarter may be pinned and half be held for replies, and of what it
// borrows nothing more: what is held cannot be given back to its owner.
func Open(ctx context.Context, tenant *kvtier.Tenant, before func(*kvtier.Namespace) Store) (*Tenant, error) {
	space, err := tenant.Namespace(ctx, block.Identity{Format: Format, Hash: HashName})
	if err != nil {
		return nil, fmt.Errorf("open tenant %s for resp: %w", tenant.Name(), err)
	}
	store := Store(space)
	if before != nil {
		store = before(space)
	}
	return NewTenant(TenantOptions{
		Name:      tenant.Name(),
		Blocks:    blocks{store},
		PinBytes:  func() int64 { return own(tenant) / 4 },
		HoldBytes: func() int64 { return own(tenant) / 2 },
		Count:     func() int64 { return tenant.Stats().Total },
	}), nil
}

// own is the RAM of which clients may hold a part, in bytes: the tenant's own. One
// that has none has what is nobody's, as far as it may take that.
func own(tenant *kvtier.Tenant) int64 {
	if memory := tenant.Spec().Memory; memory > 0 {
		return int64(memory)
	}
	return int64(min(tenant.Stats().RAM.Budget, kvtier.Transit))
}

// blocks is a Store as Blocks.
type blocks struct{ Store }

func (b blocks) Pin(key block.Key) (Pin, bool) {
	pin, ok := b.Store.Pin(key)
	if !ok {
		return nil, false
	}
	return pin, true
}

func (b blocks) Get(ctx context.Context, key block.Key) (Block, error) {
	got, err := b.Store.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return got, nil
}

func (b blocks) Put(key block.Key, size int, parent block.Key, hasParent bool) (Put, error) {
	put, err := b.Store.Put(key, size, kvtier.PutOptions{Parent: parent, HasParent: hasParent})
	if err != nil {
		return nil, err
	}
	return put, nil
}
