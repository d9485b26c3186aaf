package kvtier

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// BenchmarkPutWaitFull measures what a Put waits beyond its own copy and checksum, in
// microseconds, while RAM is full and the drives are written: with blocks that
// come once, and with those that are used twice and go to a drive.
func BenchmarkPutWaitFull(b *testing.B) {
	for _, c := range []struct {
		size   int
		memory units.Bytes
	}{{4 << 10, 128 * units.MiB}, {64 << 10, 128 * units.MiB}, {1 << 20, 256 * units.MiB}, {4 << 20, 256 * units.MiB}} {
		for _, admit := range []bool{false, true} {
			b.Run(fmt.Sprintf("size=%d/used=%t", c.size, admit), func(b *testing.B) { putWait(b, c.size, c.memory, admit) })
		}
	}
}

func putWait(b *testing.B, size int, memory units.Bytes, used bool) {
	transit := units.Bytes(0)
	c, err := OpenCache(CacheOptions{Dir: b.TempDir(), Memory: memory, Transit: &transit, Log: slog.New(slog.DiscardHandler), CheckpointEvery: time.Second})
	if err != nil {
		b.Fatal(err)
	}
	t, err := c.AddTenant(b.Context(), TenantSpec{Kind: TenantCredential, Name: "a", Memory: memory, NVMe: 512 * units.MiB})
	if err != nil {
		b.Fatal(err)
	}
	n, err := t.Namespace(b.Context(), block.Identity{Format: "bench"})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ran := make(chan error, 1)
	go func() { ran <- c.Run(ctx) }()
	data := content(1, 1, size)
	one := func(key int) (waited time.Duration, err error) {
		began := time.Now()
		p, err := n.Put(keyOf(key), size, PutOptions{Parent: keyOf(key - 1), HasParent: key%16 > 0})
		waited = time.Since(began)
		if err != nil {
			return waited, err
		}
		for at := 0; at < size; at += 64 << 10 {
			p.Fill(copy(p.Bytes()[at:min(size, at+64<<10)], data[at:]))
		}
		began = time.Now()
		err = p.Commit(b.Context())
		return waited + time.Since(began), err
	}
	key := 0
	for range 2 * int(memory) / size { // RAM is full, and the drives are in use
		key++
		_, _ = one(key)
		if used {
			n.Lookup(keyOf(key))
		}
	}
	var waits []time.Duration
	dropped := 0
	for b.Loop() {
		key++
		waited, err := one(key)
		if err != nil {
			dropped++
		}
		waits = append(waits, waited)
		if used {
			n.Lookup(keyOf(key))
		}
	}
	slices.Sort(waits)
	at := func(part float64) float64 {
		return float64(waits[min(len(waits)-1, int(part*float64(len(waits))))].Nanoseconds()) / 1e3
	}
	b.ReportMetric(at(0.5), "p50-us")
	b.ReportMetric(at(0.99), "p99-us")
	b.ReportMetric(at(0.999), "p99.9-us")
	b.ReportMetric(at(1), "max-us")
	b.ReportMetric(float64(dropped)/float64(len(waits)), "dropped")
	b.ReportMetric(float64(t.Stats().Written), "written")
	cancel()
	if err := <-ran; err != nil {
		b.Fatal(err)
	}
	if err := c.Close(); err != nil {
		b.Fatal(err)
	}
}
