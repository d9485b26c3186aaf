package resp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// benchServer serves the real tier and gives addresses by network.
func benchServer(b *testing.B) map[string]string {
	b.Helper()
	cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: b.TempDir(), Memory: 768 * units.MiB})
	if err != nil {
		b.Fatal(err)
	}
	of, err := cache.AddTenant(b.Context(), kvtier.TenantSpec{Kind: kvtier.TenantCredential, Name: "bench", Memory: 768 * units.MiB})
	if err != nil {
		b.Fatal(err)
	}
	tenant, err := Open(b.Context(), of, nil)
	if err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	server, ended := New(Options{}), make(chan error, 2)
	addresses := map[string]string{"unix": filepath.Join(b.TempDir(), "kv.sock"), "tcp": "127.0.0.1:0"}
	for network, address := range addresses {
		listener, err := net.Listen(network, address)
		if err != nil {
			b.Fatal(err)
		}
		addresses[network] = listener.Addr().String()
		go func() { ended <- server.Serve(ctx, listener, Access{Tenant: tenant}) }()
	}
	b.Cleanup(func() {
		stop()
		for range addresses {
			if err := <-ended; err != nil {
				b.Error(err)
			}
		}
		if err := cache.Close(); err != nil {
			b.Error(err)
		}
	})
	return addresses
}

// Client and server are one process here: figures of the server alone come from
// hearth bench kv.
func BenchmarkValues(b *testing.B) {
	addresses := benchServer(b)
	for _, verb := range []string{"GET", "SET"} {
		for _, network := range []string{"unix", "tcp"} {
			for _, size := range []int{64 << 10, 512 << 10, 2 << 20, 5 << 20} {
				b.Run(fmt.Sprintf("%s/%s/%dKiB", verb, network, size>>10), func(b *testing.B) {
					benchValues(b, verb, network, addresses[network], size)
				})
			}
		}
	}
}

func benchValues(b *testing.B, verb, network, address string, size int) {
	b.Helper()
	conn, err := net.Dial(network, address)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	payload, answer := []byte(strings.Repeat("v", size)), make([]byte, size+2)
	header := fmt.Sprintf("$%d\r\n", size)
	keys := max(1, 128<<20/size)
	sets, gets := make([]string, keys), make([]string, keys)
	for i := range keys {
		name := key(multiprocess, size<<8+i)
		whole := wire("SET", name, "")
		sets[i] = strings.Replace(whole, "$0\r\n\r\n", header, 1)
		gets[i] = wire("GET", name)
	}
	do := func(i int, verb string) {
		want, more, buffers := "+OK\r\n", 0, net.Buffers{[]byte(sets[i]), payload, crlf}
		if verb == "GET" {
			want, more, buffers = header, size+2, net.Buffers{[]byte(gets[i])}
		}
		if _, err := buffers.WriteTo(conn); err != nil {
			b.Fatal(err)
		}
		if line, err := in.ReadSlice('\n'); err != nil || string(line) != want {
			b.Fatalf("the answer is %q (%v), not %q", line, err, want)
		}
		if _, err := io.ReadFull(in, answer[:more]); err != nil {
			b.Fatal(err)
		}
	}
	for i := range keys {
		do(i, "SET")
	}
	b.SetBytes(int64(size))
	for i := 0; b.Loop(); i = (i + 1) % keys {
		do(i, verb)
	}
}

// Round trips bound LMCache's lookups: one EXISTS for each block.
func BenchmarkExists(b *testing.B) {
	addresses := benchServer(b)
	conn, err := net.Dial("unix", addresses["unix"])
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	question, answer := []byte(wire("EXISTS", key(multiprocess, 1))), make([]byte, 4)
	for b.Loop() {
		if _, err := conn.Write(question); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			b.Fatal(err)
		}
	}
}

// An idle connection's memory, with the client's half of it.
func BenchmarkIdleConnections(b *testing.B) {
	const count = 500
	addresses := benchServer(b)
	for b.Loop() {
		before := memoryInUse()
		all := make([]net.Conn, count)
		for i := range all {
			conn, err := net.Dial("unix", addresses["unix"])
			if err != nil {
				b.Fatal(err)
			}
			all[i] = conn
			answer := make([]byte, 4)
			if _, err := io.WriteString(conn, wire("EXISTS", key(multiprocess, i))); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(conn, answer); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(memoryInUse()-before)/count, "B/conn")
		for _, conn := range all {
			_ = conn.Close()
		}
	}
}

func memoryInUse() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc + stats.StackInuse)
}
