package resp

import (
	"bufio"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestASetThatStallsOverTheKernelsSocketsGoesOnWhereItWas holds that a native client's
// place in a value is known to the byte, wherever its bytes stop coming.
func TestASetThatStallsOverTheKernelsSocketsGoesOnWhereItWas(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"tcp", "unix"} {
		for _, size := range []int{30_000, 300_000, 3_000_000} {
			tenant := tenantOf("t", newMemory(8<<20))
			server, conn := bothEnds(t, network)
			l := &listening{server: New(Options{BodyTimeout: time.Millisecond}), access: Access{Tenant: tenant}, ctx: t.Context()}
			done := make(chan struct{})
			go func() { newConn(l, server).serve(); close(done) }()
			c := &client{t: t, conn: conn, in: bufio.NewReader(conn)}
			whole := wire("SET", "m@1@0@ab@half", strings.Repeat("v", size))
			c.send(whole[:len(whole)-size/4])
			for tenant.Stats().StalledSets == 0 {
				runtime.Gosched()
			}
			c.send(whole[len(whole)-size/4:])
			c.expect("+OK\r\n")
			c.do("+OK\r\n", "SET", "m@1@0@ab@half", "nine byte")
			c.do(bulk("nine byte"), "GET", "m@1@0@ab@half")
			_ = conn.Close()
			<-done
			want := uint64(len(whole)+len(wire("SET", "m@1@0@ab@half", "nine byte"))) + uint64(len(wire("GET", "m@1@0@ab@half")))
			if got := l.server.Stats().BytesIn; got != want {
				t.Errorf("%s, %d bytes: %d bytes came, want %d", network, size, got, want)
			}
		}
	}
}
