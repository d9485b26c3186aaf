package resp

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
)

func TestASetThatIsDroppedLeavesNoFormerValueToBeTakenForIt(t *testing.T) {
	t.Parallel()
	tier := newMemory(1000)
	s := serve(t, Options{}, Access{Tenant: tenantOf("t", tier)})
	for _, wrong := range []string{"", strings.Repeat("v", 4096)} {
		native := s.client()
		native.do("+OK\r\n", "SET", "m@1@0@ab@half", "the former value")
		native.do(":1\r\n", "EXISTS", "m@1@0@ab@half") // pinned, it cannot make room
		native.do("+OK\r\n", "SET", "m@1@0@ab@half", wrong)
		native.send(wire("GET", "m@1@0@ab@half"))
		if line := native.line(); !strings.HasPrefix(line, "$-") {
			t.Errorf("after OK for a value of %d bytes there is %q", len(wrong), line)
		}
	}
	hello := s.client()
	hello.do("+PONG\r\n", "PING")
	hello.do("+OK\r\n", "SET", "key", "the former value")
	pin, ok := tier.Pin(tier.order[len(tier.order)-1])
	if !ok {
		t.Fatal("the value is not there")
	}
	defer pin.Release()
	hello.do("+OK\r\n", "SET", "key", strings.Repeat("v", 4096))
	hello.do("$-1\r\n", "GET", "key")
	hello.do("+OK\r\n", "SET", "key", "the former value")
	hello.do("-"+emptyValue+"\r\n", "SET", "key", "")
	hello.do(bulk("the former value"), "GET", "key") // it was told that the other was refused
}

// ending is a tier that has no room, on a listener that ends while a former value
// is being ended.
type ending struct {
	*memory
	end func()
}

func (e *ending) Put(block.Key, int, block.Key, bool) (Put, error) { return nil, errMemory }

func (e *ending) Delete(ctx context.Context, _ ...block.Key) (int, error) {
	e.end()
	<-ctx.Done()
	return 0, ctx.Err()
}

func TestASetIsNotAnsweredWhereItsFormerValueMayStay(t *testing.T) {
	t.Parallel()
	tier := &ending{memory: newMemory(1000)}
	s := serve(t, Options{}, Access{Tenant: NewTenant(TenantOptions{Name: "t", Blocks: tier})})
	tier.end = s.stop
	c := s.client()
	c.send(wire("SET", "key", "value"))
	c.closed()
}

// unwritable is a tier whose drive takes no more, so that nothing is ended durably.
type unwritable struct{ *memory }

func (u *unwritable) Put(block.Key, int, block.Key, bool) (Put, error) { return nil, errMemory }

func (u *unwritable) Delete(ctx context.Context, keys ...block.Key) (int, error) {
	removed, _ := u.memory.Delete(ctx, keys...)
	return removed, errMemory
}

// Whoever is told OK may never see the former value again, not even after a kill.
// Only a native client is told so nevertheless: its worker would not live on.
func TestASetIsRefusedWhereItsFormerValueMayComeBack(t *testing.T) {
	t.Parallel()
	s := serve(t, Options{}, Access{Tenant: NewTenant(TenantOptions{Name: "t", Blocks: &unwritable{newMemory(1000)}})})
	native, other := s.client(), s.client()
	native.do("+OK\r\n", "SET", "key", "value")
	other.do("+PONG\r\n", "PING")
	other.do("-"+errFormer.Error()+"\r\n", "SET", "key", "value")
	other.do("-"+errFormer.Error()+"\r\n", "SET", "key", "value", "GET")
	other.do("-ERR deleting failed\r\n", "DEL", "key")
	other.do("$-1\r\n", "GET", "key")
}

// lines counts what is logged.
type lines struct{ written atomic.Int64 }

func (l *lines) Write(p []byte) (int, error) {
	l.written.Add(1)
	return len(p), nil
}

func TestADriveThatTakesNoEndsIsNotToldOfAtEachSet(t *testing.T) {
	t.Parallel()
	var told lines
	s := serve(t, Options{Log: slog.New(slog.NewTextHandler(&told, nil))},
		Access{Tenant: NewTenant(TenantOptions{Name: "t", Blocks: &unwritable{newMemory(1000)}})})
	c := s.client()
	const sets = 50
	for range sets {
		c.do("+OK\r\n", "SET", "key", "value")
	}
	if n := told.written.Load(); n == 0 || n == sets {
		t.Errorf("%d lines for %d SETs", n, sets)
	}
}
