package arena

import "testing"

func BenchmarkAllocFree(b *testing.B) {
	for name, n := range map[string]int{"4KiB": 4096, "2MiB": 2 * mib, "2.25MiB": 9 * mib / 4} {
		b.Run(name, func(b *testing.B) {
			a := open(b, 64*mib)
			for b.Loop() {
				slot, err := a.Alloc(n)
				if err != nil {
					b.Fatal(err)
				}
				a.Free(slot)
			}
		})
	}
}

func BenchmarkAllocFreeOfManyAtOnce(b *testing.B) {
	a := open(b, 1<<30)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			slot, err := a.Alloc(2 * mib)
			if err != nil {
				b.Error(err)
				return
			}
			a.Free(slot)
		}
	})
}

// BenchmarkReshape lets two sizes of block take turns where only one fits.
func BenchmarkReshape(b *testing.B) {
	a := open(b, 2*mib)
	b.SetBytes(2 * mib)
	src := make([]byte, 2*mib)
	for b.Loop() {
		for _, n := range []int{2 * mib, mib} {
			slot := alloc(b, a, n)
			copy(a.Bytes(slot, n), src)
			a.Free(slot)
		}
	}
}

// BenchmarkCopy2MiB copies into slots and into Go's own memory, in turn over 128 of each.
func BenchmarkCopy2MiB(b *testing.B) {
	const n, count = 2 * mib, 128
	src := make([]byte, n)
	fill(src, 1)
	b.Run("slot", func(b *testing.B) {
		a := open(b, count*n)
		b.SetBytes(n)
		var slots []Slot
		for range count {
			slot := alloc(b, a, n)
			copy(a.Bytes(slot, n), src)
			slots = append(slots, slot)
		}
		for i := 0; b.Loop(); i++ {
			copy(a.Bytes(slots[i%count], n), src)
		}
	})
	b.Run("fresh slot", func(b *testing.B) {
		a := open(b, count*n)
		b.SetBytes(n)
		for i := 0; b.Loop(); i++ {
			if a.Used() == a.Capacity() {
				b.StopTimer()
				for place := range uint32(count) {
					a.Free(Slot(10<<placeBits | place))
				}
				a.SetCapacity(0)
				a.SetCapacity(count * n)
				b.StartTimer()
			}
			copy(a.Bytes(alloc(b, a, n), n), src)
		}
	})
	b.Run("memory", func(b *testing.B) {
		dst := make([][]byte, count)
		for i := range dst {
			dst[i] = make([]byte, n)
			copy(dst[i], src)
		}
		b.SetBytes(n)
		for i := 0; b.Loop(); i++ {
			copy(dst[i%count], src)
		}
	})
}
