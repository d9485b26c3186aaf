package kvtier

import (
	"context"
	"slices"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/gate"
	"github.com/hearth-dev/hearth/kvtier/index"
)

// What nodes that share blocks need of the core, besides what every caller has.

// NamespaceOf gives a namespace that the tenant has, by its identifier. It makes
// none known.
func (t *Tenant) NamespaceOf(id block.Namespace) (*Namespace, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	place, known := t.spaces[id]
	if !known || t.gone || int(place) >= len(t.record.Namespaces) {
		return nil, false
	}
	return &Namespace{tenant: t, id: id, place: place, tokens: t.record.Namespaces[place].BlockTokens}, true
}

// Peek writes the length in bytes of each block, 0 where there is none, and less
// than 0, its negative, where the load would take longer than computing it anew.
// It is Lookup that is no use of the blocks and counts nowhere: another node asks,
// and may not come.
func (n *Namespace) Peek(keys []block.Key, sizes []int) {
	t := n.tenant
	prints := make([]index.Print, len(keys))
	ids := make([]index.ID, len(keys))
	for i, key := range keys {
		prints[i] = n.print(key)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index.FindAll(prints, ids)
	for i, id := range ids {
		sizes[i] = 0
		if r, here := t.residentLocked(id); here {
			if r.Key == keys[i] {
				sizes[i] = t.index.Size(id)
			}
			continue
		}
		if !t.presentLocked(id) {
			continue
		}
		sizes[i] = t.index.Size(id)
		anew := gate.Recompute{Tokens: n.tokensLocked(sizes[i]), Rate: t.spec.PrefillRate}
		if !gate.Decide(t.cache.speed(t.locLocked(id)).Load(int64(sizes[i])), anew) {
			sizes[i] = -sizes[i]
		}
	}
}

// Lend is Get for another node: it is no use of the block and counts as no hit and
// no miss, a block of a drive takes room in RAM until it is released and no longer,
// and one of RAM does not go to a drive for it. Whoever borrows keeps a block of its
// own, so that a second one here were room lost to both.
func (n *Namespace) Lend(ctx context.Context, key block.Key) (*Block, error) {
	return n.get(ctx, key, true)
}

// Parents writes the block that comes before each in its prefix, where that is
// known: it is in RAM, or one of the keys. It counts nowhere.
func (n *Namespace) Parents(keys []block.Key, parents []block.Key, known []bool) {
	t := n.tenant
	prints := make([]index.Print, len(keys))
	ids := make([]index.ID, len(keys))
	for i, key := range keys {
		prints[i] = n.print(key)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index.FindAll(prints, ids)
	for i, id := range ids {
		parents[i], known[i] = block.Key{}, false
		if id == 0 {
			continue
		}
		parent := t.index.Parent(id)
		if parent == 0 || t.index.Space(parent) != n.place {
			continue
		}
		if r, here := t.index.Resident(parent); here {
			parents[i], known[i] = r.Key, true
		} else if at := slices.Index(ids, parent); at >= 0 {
			parents[i], known[i] = keys[at], true
		}
	}
}

// Follows says which block comes before the one that is stored, though it may not
// be here yet: it is to be called before Commit.
func (p *Put) Follows(parent block.Key) {
	p.opts.Parent, p.opts.HasParent, p.opts.ParentComes = parent, parent != p.key, true
}

// Recompute is what an engine needs to compute a block anew, as far as it is
// known.
func (n *Namespace) Recompute() gate.Recompute {
	t := n.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	return gate.Recompute{Tokens: n.tokensLocked(minBlock), Rate: t.spec.PrefillRate}
}

// Sum is the XXH3-128 of the block's bytes, high half first, as it was made when
// they were stored.
func (b *Block) Sum() [16]byte { return b.sum }

// Sum is the XXH3-128 of the block's bytes, high half first, once all are filled.
func (p *Put) Sum() [16]byte { return p.sum }
