package local

import (
	"context"
	"errors"
	"fmt"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// KVSpace is the node's KV space as the data role keeps it: *kvtier.Space, or that
// with blocks and sockets.
type KVSpace interface {
	// Budget is what claims may take together.
	Budget() kvtier.Budget
	// Reserve gives a claim space and the path of the directory that is its own.
	Reserve(ctx context.Context, r kvtier.Reservation) (dir string, err error)
	Release(ctx context.Context, claim string) error
	Reservations() []kvtier.Reservation
	// Bad are records that could not be understood.
	Bad() []string
}

// kv is stock.KV over the space of the same process; nil is none.
type kv struct {
	space   KVSpace
	changed *signals
}

var _ stock.KV = kv{}

// Space implements stock.KV.
func (k kv) Space() (stock.Space, bool) {
	if k.space == nil {
		return stock.Space{}, true
	}
	b := k.space.Budget()
	return stock.Space{Memory: b.Memory, NVMe: b.NVMe, NamespaceMemory: b.NamespaceMemory, NamespaceNVMe: b.NamespaceNVMe}, true
}

// Subscribe implements stock.KV.
func (k kv) Subscribe() (<-chan struct{}, func()) { return k.changed.subscribe() }

// Reserve implements stock.KV.
func (k kv) Reserve(ctx context.Context, r stock.Reservation) (string, error) {
	if k.space == nil {
		return "", fmt.Errorf("reserve KV space for claim %s: %w: this node has none", r.Claim, stock.ErrNoSpace)
	}
	dir, err := k.space.Reserve(ctx, kvtier.Reservation(r))
	return dir, toldKV(err)
}

// toldKV makes an error of the KV space one that callers of package stock know.
func toldKV(err error) error {
	switch {
	case errors.Is(err, kvtier.ErrNoSpace):
		return known{err, stock.ErrNoSpace}
	case errors.Is(err, kvtier.ErrInvalid):
		return known{err, artifact.ErrInvalid}
	}
	return err
}

// Release implements stock.KV.
func (k kv) Release(ctx context.Context, claim string) error {
	if k.space == nil {
		return nil
	}
	return toldKV(k.space.Release(ctx, claim))
}

// Reservations implements stock.KV.
func (k kv) Reservations(context.Context) ([]stock.Reservation, error) {
	list := []stock.Reservation{}
	if k.space == nil {
		return list, nil
	}
	for _, r := range k.space.Reservations() {
		list = append(list, stock.Reservation(r))
	}
	return list, nil
}
