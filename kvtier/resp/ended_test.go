package resp

import (
	"sync/atomic"
	"testing"
)

func TestTheConnectionsOfATenantThatEndsAreClosedAndNoOthers(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		var credentials Credentials
		a, b := tenant("team-a"), tenant("team-b")
		for of, password := range map[*Tenant]string{a: "pa", b: "pb"} {
			if err := credentials.Add(of, password); err != nil {
				t.Fatal(err)
			}
		}
		s := serve(t, Options{}, Access{Authenticate: credentials.Authenticate})
		native, moved, other := s.client(), s.client(), s.client()
		native.do("+OK\r\n", "AUTH", "pa")
		native.do("+OK\r\n", "SET", "m@01000100@0@0123456789abcdef", "v")
		moved.do("+OK\r\n", "AUTH", "pa")
		moved.do("+OK\r\n", "AUTH", "pb")
		other.do("+OK\r\n", "AUTH", "pb")
		a.End()
		native.closed()
		for _, c := range []*client{moved, other} {
			c.do("+OK\r\n", "SET", "k", "v")
		}
		// Who had found the tenant just before is its client no more.
		late := s.client()
		late.send(wire("AUTH", "pa") + wire("GET", "k"))
		if reply := late.line(); reply != "+OK" {
			t.Errorf("AUTH gave %q", reply)
		}
		late.closed()
		a.End()
		other.do("$1\r\nv\r\n", "GET", "k")
		if got := a.Stats().Connections; got != 0 {
			t.Errorf("the tenant that ended has %d connections", got)
		}
	})
}

func TestWhoseClientsWithoutACredentialAreMayChange(t *testing.T) {
	t.Parallel()
	onBothTiers(t, func(t *testing.T, tenant func(string) *Tenant) {
		var now atomic.Pointer[Tenant]
		s := serve(t, Options{}, Access{TenantNow: now.Load, Authenticate: new(Credentials).Authenticate})
		before := s.client()
		before.do("-NOAUTH Authentication required.\r\n", "GET", "k")
		first := tenant("first")
		now.Store(first)
		c := s.client()
		c.do("+OK\r\n", "SET", "k", "v")
		now.Store(tenant("second"))
		c.do("$1\r\nv\r\n", "GET", "k")
		next := s.client()
		next.do("$-1\r\n", "GET", "k")
		now.Store(nil)
		first.End()
		c.closed()
		after := s.client()
		after.do("-NOAUTH Authentication required.\r\n", "GET", "k")
		next.do("$-1\r\n", "GET", "k")
	})
}
