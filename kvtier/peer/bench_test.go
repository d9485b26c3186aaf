package peer

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// BenchmarkBlocksOverLoopback moves blocks between two nodes of one process. Its
// CPU figure is that of both of them.
func BenchmarkBlocksOverLoopback(b *testing.B) {
	for _, secured := range []bool{true, false} {
		for _, size := range []int{64 << 10, 512 << 10, 2 << 20, 8 << 20} {
			b.Run(fmt.Sprintf("tls=%t/%dKiB", secured, size>>10), func(b *testing.B) { moveBlocks(b, secured, size) })
		}
	}
}

func moveBlocks(b *testing.B, secured bool, size int) {
	var opts Options
	var server ServerOptions
	if secured {
		a := newAuthority(b)
		opts.TLS, server.TLS = a.client(identity.RoleAgent), a.server(identity.RoleAgent)
	}
	giver := newGiver(b, server)
	opts.List = []Peer{{Name: "g", Addr: giver.addr}}
	taker := newTaker(b, opts)
	keys := make([]block.Key, 32<<20/size)
	for i := range keys {
		keys[i] = keyOf(i)
		store(b, giver.Namespace, keys[i], content(i, size))
	}
	round := func() {
		for _, key := range keys {
			if _, ok := taker.Lookup(key); !ok {
				b.Fatal("a block is not found")
			}
		}
		for _, key := range keys {
			got, err := taker.Get(b.Context(), key)
			if err != nil {
				b.Fatal(err)
			}
			got.Release()
		}
		if _, err := taker.Namespace.Delete(b.Context(), keys...); err != nil {
			b.Fatal(err)
		}
	}
	round() // connections, memory
	b.SetBytes(32 << 20)
	before := processorTime(b)
	for b.Loop() {
		round()
	}
	gigabytes := float64(b.N) * (32 << 20) / 1e9
	b.ReportMetric((processorTime(b)-before).Seconds()/gigabytes, "CPU-s/GB")
	if s := taker.peers.Stats(); s.Failed+s.Damaged+s.Gated+s.WaitedOut != 0 {
		b.Errorf("%+v", s)
	}
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
