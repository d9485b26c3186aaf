package resp

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pinned starts a server on a tier with one native client that knows its size.
func pinned(t *testing.T, form string) (*memory, *Tenant, *serving, *worker) {
	t.Helper()
	tier := newMemory(1 << 20)
	tenant := NewTenant(TenantOptions{Name: "t", Blocks: tier, PinBytes: func() int64 { return 10_000 }})
	s := servePipes(t, Options{}, Access{Tenant: tenant})
	return tier, tenant, s, s.native(form, 4096)
}

func key(form string, number int) string { return fmt.Sprintf(form, fmt.Sprintf("%016x", number)) }

func mustSet(t *testing.T, w *worker, key string) {
	t.Helper()
	if seen := w.set(key, strings.Repeat("v", 4096)); seen == nil || !seen.ok {
		t.Fatalf("SET %s ends with %+v", key, seen)
	}
}

func mustExist(t *testing.T, w *worker, key string, want bool) {
	t.Helper()
	if seen := w.number("EXISTS", key); seen == nil || !seen.ok || seen.present != want {
		t.Fatalf("EXISTS %s ends with %+v, not %v", key, seen, want)
	}
}

func mustGet(t *testing.T, w *worker, key string, want bool) {
	t.Helper()
	if _, seen := w.get(key, 4096); seen == nil || !seen.ok || seen.present != want {
		t.Fatalf("GET %s ends with %+v, not %v", key, seen, want)
	}
}

func TestExistsHoldsABlockForTheGetOnAnyConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, tenant, s, w := pinned(t, inProcess)
		other := s.native(inProcess, 4096)
		mustSet(t, w, key(inProcess, 1))
		mustExist(t, w, key(inProcess, 1), true)
		tier.pressure()
		time.Sleep(59 * time.Second) // in the bubble's time
		mustGet(t, other, key(inProcess, 1), true)
		if got := tenant.Stats(); got.Pins != 0 || got.PinnedBytes != 0 {
			t.Fatalf("%d pins of %d bytes after the GET", got.Pins, got.PinnedBytes)
		}
		tier.pressure()
		mustGet(t, w, key(inProcess, 1), false)
	})
}

func TestTwoQuestionsHoldForTwoGets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, _, s, w := pinned(t, inProcess)
		other := s.native(inProcess, 4096)
		mustSet(t, w, key(inProcess, 1))
		mustExist(t, w, key(inProcess, 1), true)
		mustExist(t, other, key(inProcess, 1), true)
		mustGet(t, w, key(inProcess, 1), true)
		tier.pressure()
		mustGet(t, other, key(inProcess, 1), true)
		tier.pressure()
		mustGet(t, other, key(inProcess, 1), false)
	})
}

func TestAPinEndsAfterAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, tenant, _, w := pinned(t, inProcess)
		mustSet(t, w, key(inProcess, 1))
		mustSet(t, w, key(inProcess, 2))
		mustExist(t, w, key(inProcess, 1), true)
		time.Sleep(30 * time.Second)
		mustExist(t, w, key(inProcess, 2), true)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if got := tenant.Stats(); got.Pins != 1 || got.PinsExpired != 1 {
			t.Fatalf("after 61 s there are %d pins, %d expired, not 1 and 1", got.Pins, got.PinsExpired)
		}
		tier.pressure()
		mustGet(t, w, key(inProcess, 1), false)
		mustGet(t, w, key(inProcess, 2), true)
		tier.pressure()
		mustExist(t, w, key(inProcess, 2), false)
	})
}

func TestAskingAgainHoldsAnew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, tenant, _, w := pinned(t, inProcess)
		mustSet(t, w, key(inProcess, 1))
		for range 5 {
			mustExist(t, w, key(inProcess, 1), true)
			time.Sleep(40 * time.Second)
		}
		tier.pressure()
		mustExist(t, w, key(inProcess, 1), true)
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if got := tenant.Stats(); got.Pins != 0 || got.PinsExpired != 1 {
			t.Fatalf("%d pins, %d expired, not 0 and 1", got.Pins, got.PinsExpired)
		}
	})
}

func TestTheEndOfAConnectionEndsItsPins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, tenant, s, w := pinned(t, inProcess)
		other := s.native(inProcess, 4096)
		mustSet(t, w, key(inProcess, 1))
		mustSet(t, w, key(inProcess, 2))
		mustExist(t, w, key(inProcess, 1), true)
		mustExist(t, w, key(inProcess, 2), true)
		mustExist(t, other, key(inProcess, 2), true)
		_ = w.conn.Close()
		synctest.Wait()
		if got := tenant.Stats(); got.Pins != 1 {
			t.Fatalf("%d pins, not the other connection's one", got.Pins)
		}
		tier.pressure()
		mustGet(t, other, key(inProcess, 1), false)
		mustGet(t, other, key(inProcess, 2), true)
	})
}

func TestPinsAreBoundedAndNoneIsBroken(t *testing.T) {
	t.Parallel()
	for form, beyond := range map[string]bool{inProcess: false, multiprocess: true} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				tier, tenant, _, w := pinned(t, form) // room for two pins
				for i := range 3 {
					mustSet(t, w, key(form, i))
				}
				mustExist(t, w, key(form, 0), true)
				mustExist(t, w, key(form, 1), true)
				// Only the multiprocess server, which looks at what a GET gave, is told of more.
				mustExist(t, w, key(form, 2), beyond)
				if got := tenant.Stats(); got.PinnedBytes != 8192 || got.PinsRefused != 1 || (got.Unpinned == 1) != beyond {
					t.Fatalf("%d bytes are pinned, %d refused, %d told without", got.PinnedBytes, got.PinsRefused, got.Unpinned)
				}
				tier.pressure()
				mustGet(t, w, key(form, 2), false)
				mustGet(t, w, key(form, 0), true)
				mustGet(t, w, key(form, 1), true)
			})
		})
	}
}

// What is stored over a pinned block counts as much as what is pinned.
func TestPinsStayWithinTheirBoundWhenLargerValuesAreStored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, tenant, s, w := pinned(t, multiprocess)
		other := s.client()
		other.do("+PONG\r\n", "PING")
		for i := range 2 { // 8192 of 10000 bytes
			mustSet(t, w, key(multiprocess, i))
			mustExist(t, w, key(multiprocess, i), true)
		}
		other.do("+OK\r\n", "SET", key(multiprocess, 0), strings.Repeat("w", 5904))
		if got := tenant.Stats(); got.Pins != 2 || got.PinnedBytes != 10_000 {
			t.Errorf("%d pins of %d bytes, not 2 of 10000", got.Pins, got.PinnedBytes)
		}
		other.do("+OK\r\n", "SET", key(multiprocess, 1), strings.Repeat("w", 4097))
		if got := tenant.Stats(); got.Pins != 1 || got.PinnedBytes != 5904 {
			t.Errorf("%d pins of %d bytes, not 1 of 5904", got.Pins, got.PinnedBytes)
		}
		other.do(bulk(strings.Repeat("w", 4097)), "GET", key(multiprocess, 1))
	})
}

func TestDeletingEndsThePin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, tenant, _, w := pinned(t, inProcess)
		mustSet(t, w, key(inProcess, 1))
		mustExist(t, w, key(inProcess, 1), true)
		if seen := w.number("DEL", key(inProcess, 1)); seen == nil || !seen.present {
			t.Fatalf("DEL ends with %+v", seen)
		}
		if got := tenant.Stats(); got.Pins != 0 {
			t.Fatalf("%d pins", got.Pins)
		}
		mustGet(t, w, key(inProcess, 1), false)
	})
}

func TestAClientThatSaysHelloPinsNothing(t *testing.T) {
	t.Parallel()
	tenant := tenantOf("t", newMemory(1<<20))
	s := serve(t, Options{}, Access{Tenant: tenant})
	c := s.client()
	c.do("+OK\r\n", "SET", "m@1@0@ab@half", "v")
	c.do(":1\r\n", "EXISTS", "m@1@0@ab@half")
	if got := tenant.Stats(); got.Pins != 1 {
		t.Fatalf("%d pins of a native client, not 1", got.Pins)
	}
	// What it asked as a native client ends with its being one.
	c.do("+PONG\r\n", "PING")
	c.do(":1\r\n", "EXISTS", "m@1@0@ab@half")
	if got := tenant.Stats(); got.Pins != 0 {
		t.Fatalf("%d pins, not 0", got.Pins)
	}
}

func TestExistsHoldsTheBlockThatIsThereAfterOthersEndedTheOneBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tier, tenant, _, w := pinned(t, inProcess)
		mustSet(t, w, key(inProcess, 1))
		mustExist(t, w, key(inProcess, 1), true)
		// People drop it, and it is stored anew, while it is pinned.
		stored := tier.order[len(tier.order)-1]
		if _, err := tier.Delete(t.Context(), stored); err != nil {
			t.Fatal(err)
		}
		put, err := tier.Put(stored, 4096, stored, false)
		if err != nil {
			t.Fatal(err)
		}
		copy(put.Bytes(), strings.Repeat("w", 4096))
		put.Fill(4096)
		if err := put.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustExist(t, w, key(inProcess, 1), true)
		tier.pressure()
		mustGet(t, w, key(inProcess, 1), true)
		if got := tenant.Stats(); got.PinnedBytes > 4096 {
			t.Errorf("%d bytes are pinned", got.PinnedBytes)
		}
	})
}
