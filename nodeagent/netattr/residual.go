package netattr

import "slices"

// residualWindow is how many differences the counter looks back on: sockets and
// devices are read one after the other, and what is skew alone is not in the
// lowest of them.
const residualWindow = 5

// residual turns differences between devices and owners into a counter that
// never falls.
type residual struct {
	recent []int64
	total  uint64
}

// add takes the difference now, in bytes since the same moment each time.
func (r *residual) add(now int64) {
	r.recent = append(r.recent, now)
	if len(r.recent) > residualWindow {
		r.recent = slices.Delete(r.recent, 0, 1)
	}
	if len(r.recent) < residualWindow {
		return
	}
	if low := slices.Min(r.recent); low > 0 && uint64(low) > r.total {
		r.total = uint64(low)
	}
}
