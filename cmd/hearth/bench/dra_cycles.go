package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

// draCycles is after how many Prepare and Unprepare memory is read. At the first
// the driver has more tombstones than it keeps (256), and the first half counts
// as its warm-up. The long run warms up until the order of Unprepares is full.
var (
	draCycles     = []int{500, 1000, 1500, 2000}
	draCyclesFull = []int{5000, 10_000, 15_000, 20_000}
)

// Aims of what a thousand cycles may add, in MiB: of live heap, where the order of
// Unprepares grows in steps until it is full, and of resident memory, which has
// its own play.
const (
	heapAim = 0.5
	anonAim = 4
)

// memory is that of the driver once it has given back what nothing needs: MiB.
// The pages of its program are not in anon: the kernel takes and brings them as
// it likes, and they are in rss.
type memory struct {
	heap, anon, rss float64
	goroutines      int
}

// cycleRows prepares and unprepares some thousand times and looks what that
// leaves, in memory and on the drive.
func (r *draRig) cycleRows(ctx context.Context, cycles []int) ([]Row, error) {
	s := shapes[1]
	begin, done := time.Now(), 0
	var at []memory
	for _, until := range cycles {
		if _, err := r.measure(ctx, s, until-done); err != nil {
			return nil, err
		}
		done = until
		m, err := r.memory(ctx)
		if err != nil {
			return nil, err
		}
		at = append(at, m)
	}
	took := time.Since(begin)
	left, what, err := r.left(ctx)
	if err != nil {
		return nil, err
	}
	rest := float64(left)
	return append(memoryRows(cycles, at, fmt.Sprintf("%s, %d cycles in %.0f s", s.note, done, took.Seconds())), Row{
		Name: "cycles_left", Value: rest, Unit: "things", Better: lower, Pairs: 1, Spread: [2]float64{rest, rest}, Met: left == 0,
		Note: "begun or prepared claims, CDI files, holds, reservations and metadata after that" + what,
	}), nil
}

// memoryRows are how much live heap and anonymous memory grew for each thousand
// cycles in the second half of at least three readings.
func memoryRows(cycles []int, at []memory, what string) []Row {
	last := len(at) - 1
	half := last / 2
	slope := func(from, to int, of func(memory) float64) float64 {
		return (of(at[to]) - of(at[from])) * 1000 / float64(cycles[to]-cycles[from])
	}
	row := func(name string, aim float64, of func(memory) float64, kind string) Row {
		v := slope(half, last, of)
		return Row{
			Name: name, Value: v, Unit: "MiB/1000", Better: lower, Pairs: 1, Spread: [2]float64{v, v}, Aim: aim, Met: v <= aim,
			Note: fmt.Sprintf("%s for each thousand Prepare and Unprepare from %d to %d, after collection; %+.2f while it warms up, from %d to %d", kind, cycles[half], cycles[last], slope(0, half, of), cycles[0], cycles[half]),
		}
	}
	heap := row("cycles_heap_growth", heapAim, func(m memory) float64 { return m.heap }, "live heap")
	heap.Note += fmt.Sprintf(", and the order of the last 8,192 Unprepares is kept (1 MiB); %.2f MiB in the end, %d goroutines (%d at first); %s", at[last].heap, at[last].goroutines, at[0].goroutines, what)
	anon := row("cycles_rss_growth", anonAim, func(m memory) float64 { return m.anon }, "anonymous resident memory")
	anon.Note += fmt.Sprintf("; %.1f MiB in the end, with the program's pages %.1f (%.1f at first)", at[last].anon, at[last].rss, at[0].rss)
	return []Row{heap, anon}
}

// memory asks the driver to settle and reads its memory.
func (r *draRig) memory(ctx context.Context) (memory, error) {
	const mib = 1 << 20
	stats, err := r.ask(ctx, settlePath)
	if err != nil {
		return memory{}, err
	}
	m := memory{heap: float64(stats.Heap) / mib, goroutines: stats.Goroutines}
	for field, to := range map[string]*float64{"RssAnon": &m.anon, "VmRSS": &m.rss} {
		resident, err := r.child.rss(field)
		if err != nil {
			return m, err
		}
		*to = float64(resident) / mib
	}
	return m, nil
}

// left counts what is there once every claim was unprepared, and names it.
func (r *draRig) left(ctx context.Context) (int, string, error) {
	stats, err := r.stats(ctx)
	if err != nil {
		return 0, "", err
	}
	n, what := stats.Entries, ""
	if n > 0 {
		what = fmt.Sprintf(": %d claims", n)
	}
	for _, place := range []string{r.cdi, filepath.Join(r.dir, "stock/holds"), filepath.Join(r.dir, "kv/reserved"), filepath.Join(r.dir, "kv/claims"), filepath.Join(r.dir, "plugin/*/*")} {
		found, err := filepath.Glob(filepath.Join(place, "*"))
		if err != nil {
			return 0, "", fmt.Errorf("look what is left: %w", err)
		}
		if n += len(found); len(found) > 0 {
			what += fmt.Sprintf(", %d in %s", len(found), place)
		}
	}
	return n, strings.Replace(what, ",", ":", 1), nil
}
