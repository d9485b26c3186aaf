package index

import (
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
)

func TestHeldIsTheCostOfBlocksThatAreHeldThoughTheyLeft(t *testing.T) {
	t.Parallel()
	x := New()
	x.SetCost(func(size int) int64 { return int64(size+4095) &^ 4095 })
	var holds []Hold
	want := func(what string, n int64) {
		t.Helper()
		if x.Held() != n {
			t.Errorf("%s: %d bytes are held, want %d", what, x.Held(), n)
		}
	}
	var ids []ID
	for i := range 3 {
		var key block.Key
		key.Hash[0] = byte(i)
		id := x.Add(PrintOf(1, 0, key), 0, 5000, 0)
		ids = append(ids, id)
		holds = append(holds, x.Enter(id, Resident{Key: key}, false))
	}
	want("entered", 3*8192)
	again, _ := x.Hold(ids[0])
	want("held twice", 3*8192)
	x.Release(holds[0])
	want("held by one", 3*8192)
	x.Release(again)
	want("held by none", 2*8192)
	if x.IsHeld(ids[0]) || !x.IsHeld(ids[1]) {
		t.Error("which are held is not told")
	}
	x.Leave(ids[1])
	want("left", 2*8192)
	x.Release(holds[1])
	x.Release(holds[2])
	want("released", 0)
}
