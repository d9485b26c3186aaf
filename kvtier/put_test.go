package kvtier

import (
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/units"
)

// However a block is filled, and whatever was given up half-way before, its
// checksum is that of its bytes.
func TestTheChecksumIsTheSameHoweverABlockIsFilled(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, 4*units.MiB), TenantSpec{Name: "a", Memory: 4 * units.MiB})
	const size = 300_000
	data := content(1, 0, size)
	want := xxh3.Hash128(data).Bytes()
	for _, pieces := range [][]int{{size}, {size - 1, 1}, {1, 0, size - 1}, {100_000, 100_000, 100_000, 0}, {0, size, 0}} {
		given, err := n.Put(keyOf(2), size, PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		given.Fill(1000)
		given.Abort()
		p, err := n.Put(keyOf(1), size, PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		copy(p.Bytes(), data)
		for _, piece := range pieces {
			p.Fill(piece)
		}
		if p.Sum() != want {
			t.Errorf("filled in %v: another checksum", pieces)
		}
		if err := p.Commit(t.Context()); err != nil {
			t.Errorf("filled in %v: %v", pieces, err)
		}
	}
}
