package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
)

// shape is one form of a Prepare call.
type shape struct {
	name   string
	claims int
	gpus   int  // of each claim
	stock  bool // each claim has weights that are warm, and KV space
	note   string
}

var shapes = []shape{
	{"1_device", 1, 1, false, "a claim of one GPU"},
	{"8_devices", 1, 6, true, "a claim of 6 GPUs, warm weights and KV space"},
	{"32_devices", 1, 30, true, "a claim of 30 GPUs, warm weights and KV space"},
	{"8x8_devices", 8, 6, true, "one call for 8 claims of 6 GPUs, warm weights and KV space"},
}

// Aims of Prepare, in ms.
const (
	prepareAim  = 20
	prepareGoal = 10
)

func runDRA(cmd *cobra.Command, dir string, o options) ([]Row, error) {
	r, err := startDRA(cmd.Context(), dir)
	if err != nil {
		return nil, err
	}
	defer r.stop()
	var rows []Row
	add := func(more ...Row) {
		for _, row := range more {
			o.progress(describe(row))
		}
		rows = append(rows, more...)
	}
	calls, cycles := 100, draCycles
	if o.full {
		calls, cycles = 500, draCyclesFull
	}
	if _, err := r.measure(cmd.Context(), shapes[1], 20); err != nil { // the first ones open connections
		return nil, err
	}
	for _, s := range shapes {
		more, err := r.prepareRows(cmd.Context(), s, o.pairs, calls)
		if err != nil {
			return nil, err
		}
		add(more...)
	}
	more, err := r.cycleRows(cmd.Context(), cycles)
	if err != nil {
		return nil, err
	}
	add(more...)
	published, err := r.publishRow(cmd.Context(), o.pairs)
	if err != nil {
		return nil, err
	}
	add(published)
	idle, err := controlRow(cmd.Context(), filepath.Join(dir, "idle"))
	if err != nil {
		return nil, err
	}
	add(idle)
	if more, err = nodesRows(cmd.Context(), filepath.Join(dir, "nodes"), o.kubeconfig, o.pairs); err != nil {
		return nil, err
	}
	add(more...)
	return rows, nil
}

// figures are those of one kind of call, in ms, sorted.
type figures struct{ wall, syncs, beyond, unprepare []float64 }

func (f *figures) add(more figures) {
	f.wall, f.syncs = append(f.wall, more.wall...), append(f.syncs, more.syncs...)
	f.beyond, f.unprepare = append(f.beyond, more.beyond...), append(f.unprepare, more.unprepare...)
}

// quantile of unsorted values.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// prepareRows measures one shape: its time beyond the fsyncs, the fsyncs, and
// the whole, beside the same files written, synced and renamed alone.
func (r *draRig) prepareRows(ctx context.Context, s shape, pairs, calls int) ([]Row, error) {
	var all figures
	var p99s, p50s, wholes, raw []float64
	var cpu time.Duration
	own := func() (float64, error) {
		before, err := r.child.cpu()
		if err != nil {
			return 0, err
		}
		f, err := r.measure(ctx, s, calls)
		if err != nil {
			return 0, err
		}
		after, err := r.child.cpu()
		if err != nil {
			return 0, err
		}
		cpu += after - before
		all.add(f)
		p99s, p50s = append(p99s, quantile(f.beyond, 0.99)), append(p50s, quantile(f.beyond, 0.5))
		wholes = append(wholes, quantile(f.wall, 0.99))
		return quantile(f.syncs, 0.99), nil
	}
	alone := func() (float64, error) {
		whole, syncs, err := rawCalls(filepath.Join(r.dir, "raw"), r.cdi, s, calls)
		raw = append(raw, quantile(whole, 0.99))
		return quantile(syncs, 0.99), err
	}
	name := "prepare_" + s.name
	syncs, err := rounds(Row{Name: name + "_fsyncs_p99", Unit: "ms", Better: lower}, pairs, own, contender{"the same fsyncs alone", alone})
	if err != nil {
		return nil, err
	}
	syncs.Note = fmt.Sprintf("what a call waits for its %d fsyncs of the ledger, measured around them; p50 %.2f", 2*s.claims+1, quantile(all.syncs, 0.5))
	whole, err := rounds(Row{Name: name + "_whole_p99", Unit: "ms", Better: lower}, pairs, replay(wholes), contender{"the same files written, synced and renamed alone", replay(raw)})
	if err != nil {
		return nil, err
	}
	whole.Note = fmt.Sprintf("with the fsyncs, the CDI files in memory as on a node; p50 %.2f; Unprepare p50 %.2f, p99 %.1f", quantile(all.wall, 0.5), quantile(all.unprepare, 0.5), quantile(all.unprepare, 0.99))
	row := func(name string, q float64, spread []float64, note string) Row {
		return Row{
			Name: name, Value: quantile(all.beyond, q), Unit: "ms", Better: lower, Pairs: pairs,
			Spread: [2]float64{slices.Min(spread), slices.Max(spread)}, Met: true, Note: note,
		}
	}
	p50 := row(name+"_p50", 0.5, p50s, fmt.Sprintf("%s; beyond its fsyncs; Prepare and Unprepare take %.2f ms of CPU in the driver", s.note, ms(cpu)/float64(pairs*calls)))
	p99 := row(name+"_p99", 0.99, p99s, fmt.Sprintf("the same; goal %d", prepareGoal))
	if s.claims == 1 {
		p99.Aim, p99.Met = prepareAim, p99.Value < prepareAim
	} else { // must and goal are those of a claim
		p99.Note = fmt.Sprintf("the same; %.1f a claim", p99.Value/float64(s.claims))
	}
	return []Row{p50, p99, syncs, whole}, nil
}

// replay gives values that were measured before, in their order.
func replay(values []float64) func() (float64, error) {
	next := -1
	return func() (float64, error) {
		next++
		return values[next], nil
	}
}
