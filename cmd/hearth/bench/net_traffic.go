package bench

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// settled is how long after a switch nothing is measured: what was detached is
// freed meanwhile.
const settled = 100 * time.Millisecond

// trafficRows compare throughput and rates of connections with the accounting and
// without it, in turn. In both there are many other sockets.
func (b *netBench) trafficRows(ctx context.Context) ([]Row, error) {
	r, err := newRoom()
	if err != nil {
		return nil, err
	}
	defer r.end()
	s, err := r.listen()
	if err != nil {
		return nil, err
	}
	defer s.end()
	if err := s.hold(b.sizes.many / 2); err != nil {
		return nil, err
	}
	child, err := startAccountant(ctx, b.dir)
	if err != nil {
		return nil, err
	}
	defer child.stop()
	f := newFlows(s, b.sizes.window)
	for pair := range b.sizes.pairs {
		order := []bool{true, false}
		if pair%2 == 1 {
			slices.Reverse(order)
		}
		for _, with := range order {
			if err := account(ctx, child, with); err != nil {
				return nil, err
			}
			if err := f.turn(ctx, pair, with); err != nil {
				return nil, err
			}
		}
	}
	var rows []Row
	for _, flow := range f {
		rows = append(rows, flow.row(2*len(s.pairs)))
	}
	return rows, nil
}

// account turns accounting on or off.
func account(ctx context.Context, child *accountant, on bool) (err error) {
	if on {
		err = child.on(ctx, accountingOn)
	} else {
		_, err = child.do(ctx, accountingOff)
	}
	if err != nil {
		return err
	}
	return pass(ctx, settled)
}

// flow is one kind of traffic: values with the accounting and without, of as many
// turns.
type flow struct {
	name, what, unit string
	of               float64 // in one unit
	measure          func(context.Context) (float64, error)
	with, without    []float64
}

type flows []*flow

func newFlows(s *server, window time.Duration) flows {
	return flows{
		{name: "throughput_with", what: "one TCP stream over loopback", unit: "GB/s", of: 1e9, measure: func(ctx context.Context) (float64, error) {
			return s.stream(ctx, within(window))
		}},
		{
			name: "connections_with", what: "connections made, accepted and ended one after another by one thread, with nothing on them", unit: "1,000 per second", of: 1e3,
			measure: func(ctx context.Context) (float64, error) {
				each, err := s.churn(ctx, nil, within(window))
				return float64(time.Second) / float64(max(1, each)), err
			},
		},
		{
			name: "requests_with", what: "connections with a request and a response of a byte between two threads, one after another", unit: "1,000 per second", of: 1e3,
			measure: func(ctx context.Context) (float64, error) { return s.room.exchange(ctx, within(window)) },
		},
	}
}

// turn measures each once. Which is first moves on from pair to pair: a walk comes
// once a second, so it is not always in the same.
func (f flows) turn(ctx context.Context, pair int, with bool) error {
	for i := range f {
		one := f[(i+pair)%len(f)]
		value, err := one.measure(ctx)
		if err != nil {
			return err
		}
		if with {
			one.with = append(one.with, value)
		} else {
			one.without = append(one.without, value)
		}
	}
	return nil
}

// row holds the ratios' upper end against the aim: whether a loss of as much can be
// told from none.
func (f *flow) row(sockets int) Row {
	row := netRow(f.name)
	ratios := make([]float64, len(f.with))
	for i := range ratios {
		ratios[i] = f.with[i] / f.without[i]
	}
	mean, low, high := interval(ratios)
	row.Value, row.Ratio, row.Pairs, row.Spread = mean, mean, len(ratios), [2]float64{low, high}
	row.References = []Reference{{Name: "without accounting", Value: 1, Ratio: mean}}
	row.Met = high >= row.Aim
	row.Note = fmt.Sprintf("%s, sampled once a second, beside %d idle sockets: 95 %% interval %.3f to %.3f over %d pairs, medians %.3g and %.3g %s",
		f.what, sockets, low, high, len(ratios), median(f.with)/f.of, median(f.without)/f.of, f.unit)
	if row.Aim != 0 {
		row.Note += "; the interval's upper end must reach the aim"
	}
	return row
}
