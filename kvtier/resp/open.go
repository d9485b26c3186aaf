package resp

import (
	"context"
	"fmt"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Open serves a tenant of the KV tier: its blocks in the namespace of this
// protocol, and pins up to a quarter of what it may take in RAM.
func Open(ctx context.Context, tenant *kvtier.Tenant) (*Tenant, error) {
	space, err := tenant.Namespace(ctx, block.Identity{Format: Format, Hash: HashName})
	if err != nil {
		return nil, fmt.Errorf("open tenant %s for resp: %w", tenant.Name(), err)
	}
	return NewTenant(TenantOptions{
		Name:   tenant.Name(),
		Blocks: namespace{space},
		PinBytes: func() int64 {
			spec := tenant.Spec()
			return int64(max(spec.Memory, spec.MemoryLimit)) / 4
		},
		Count: func() int64 { return tenant.Stats().Total },
	}), nil
}

// namespace is a tenant's namespace as Blocks.
type namespace struct{ space *kvtier.Namespace }

func (n namespace) Lookup(key block.Key) (int, bool) { return n.space.Lookup(key) }

func (n namespace) Pin(key block.Key) (Pin, bool) {
	pin, ok := n.space.Pin(key)
	if !ok {
		return nil, false
	}
	return pin, true
}

func (n namespace) Get(ctx context.Context, key block.Key) (Block, error) {
	got, err := n.space.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return got, nil
}

func (n namespace) Put(key block.Key, size int, parent block.Key, hasParent bool) (Put, error) {
	put, err := n.space.Put(key, size, kvtier.PutOptions{Parent: parent, HasParent: hasParent})
	if err != nil {
		return nil, err
	}
	return put, nil
}

func (n namespace) Delete(ctx context.Context, keys ...block.Key) (int, error) {
	return n.space.Delete(ctx, keys...)
}
