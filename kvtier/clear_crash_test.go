package kvtier

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
)

// clear ends all blocks of the tenant "a": until it is done each may still be there.
func (l *history) clear() error {
	for n := range l.may {
		if n.tenant == "a" {
			l.may[n][0] = true
		}
	}
	if _, err := l.tenant().Clear(context.Background()); err != nil {
		return err
	}
	for n := range l.may {
		if n.tenant == "a" {
			l.may[n] = map[int]bool{0: true}
		}
	}
	return nil
}

// clearing is a history of a tenant that is cleared and goes on, and of another
// whose blocks stay.
func (l *history) clearing() []func() error {
	ctx := context.Background()
	var steps []func() error
	step := func(do func() error) { steps = append(steps, do) }
	both := func(n named) {
		step(func() error { return l.put(n) })
		step(func() error { return l.use(n) })
	}
	step(l.open)
	step(l.addOther)
	both(named{"b", "x", 1})
	step(func() error { return l.write(l.otherTenant()) })
	for key := range 8 {
		both(x(key))
	}
	step(func() error { return l.write(l.tenant()) })
	step(func() error { _, err := l.tenant().PinBlocks(ctx, keyOf(1)); return pinned(err) })
	step(func() error { l.tenant().flush(ctx); return l.alive() })
	for range 2 {
		step(l.clear)
		for key := 2; key < 6; key++ {
			both(x(key))
		}
		step(func() error { return l.write(l.tenant()) })
		step(func() error { l.tenant().checkpoint(ctx); return l.alive() })
	}
	step(func() error { l.tenant().flush(ctx); return l.alive() })
	step(func() error { return l.cache.Close() })
	return steps
}

func TestACrashAtAnyChangeOfAClearBringsNothingElseBack(t *testing.T) {
	t.Parallel()
	step, most := 7, 0
	switch {
	case everyCrash:
		step, most = 1, 6
	case testing.Short():
		step = 19
	}
	random := rand.New(rand.NewPCG(7, 3))
	for n := 1 + random.IntN(step); ; n += step {
		l, err := newHistory(2)
		if err != nil {
			t.Fatal(err)
		}
		l.fs.CrashAt(l.fs.Changes()+n, n%2 == 0)
		dead := false
		for i, do := range l.clearing() {
			err := do()
			if dead = l.alive() != nil; dead {
				break
			}
			if err != nil {
				t.Fatalf("change %d, step %d: %v", n, i, err)
			}
		}
		must := l.safe()
		if l.cache != nil {
			_ = l.cache.Close() // of the process that is gone
		}
		for _, f := range fates(l.fs, random, most) {
			may := map[named]map[int]bool{}
			for k, versions := range l.may {
				may[k] = map[int]bool{}
				for v := range versions {
					may[k][v] = true
				}
			}
			if err := l.recover(l.fs.CrashWith(f.sector, f.lives), must, f.name == "everything"); err != nil {
				t.Fatal(fmt.Errorf("crash at change %d, what survives: %s: %w", n, f.name, err))
			}
			l.may = may
		}
		if !dead {
			t.Logf("%d changes", n)
			return
		}
	}
}
