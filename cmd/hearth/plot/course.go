// Package plot draws the course of a scale-out, for a terminal and as an SVG. The
// command line calls it. It reads a record's series and nothing else, and neither
// smooths nor guesses: between two points a rate is their difference over the time
// between them.
package plot

import (
	"slices"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

// unattributed is the name of what devices counted and nobody owns.
const unattributed = "unattributed"

// bandNames are the bands of a stack from the bottom up: the classes, then what
// has none.
var bandNames = []string{
	traffic.Weights.String(), traffic.Serving.String(), traffic.KV.String(), traffic.Image.String(), traffic.Other.String(), unattributed,
}

// course is a record's series over intervals of time.
type course struct {
	edges       []float64 // of the intervals, one more than there are; seconds
	received    []band    // as bandNames
	transmitted []band    // as bandNames, without what nobody owns
	p90         []float64 // seconds by interval, 0 where nothing was served
	before      float64   // p90 before the scale-out in seconds, 0 where not known
}

// band is what moved of one class.
type band struct {
	name  string
	rates []float64 // bytes a second by interval
	bytes uint64    // in all
}

// seconds is how long the series of a record is.
func seconds(r *scaleout.Record) float64 {
	if len(r.Series) == 0 {
		return 0
	}
	return r.Series[len(r.Series)-1].Seconds
}

// sample reads a series at intervals.
func sample(r *scaleout.Record, edges []float64) course {
	c := course{edges: edges}
	if r.Before.Samples > 0 {
		c.before = r.Before.P90
	}
	for _, name := range bandNames {
		c.received = append(c.received, bandOf(r.Series, edges, name, func(p *scaleout.Point) uint64 {
			if name == unattributed {
				return p.UnattributedReceived
			}
			return p.Received[name]
		}))
		if name != unattributed {
			c.transmitted = append(c.transmitted, bandOf(r.Series, edges, name, func(p *scaleout.Point) uint64 { return p.Transmitted[name] }))
		}
	}
	for i := range len(edges) - 1 {
		c.p90 = append(c.p90, worst(r.Series, edges[i], edges[i+1]))
	}
	return c
}

func bandOf(series []scaleout.Point, edges []float64, name string, bytes func(*scaleout.Point) uint64) band {
	b := band{name: name, bytes: bytes(&series[len(series)-1])}
	last := total(series, edges[0], bytes)
	for i := range len(edges) - 1 {
		now := total(series, edges[i+1], bytes)
		b.rates = append(b.rates, max(now-last, 0)/(edges[i+1]-edges[i]))
		last = now
	}
	return b
}

// total is how many bytes had moved at a moment, on the line between the points
// around it; at 0 there were none.
func total(series []scaleout.Point, at float64, bytes func(*scaleout.Point) uint64) float64 {
	next, _ := slices.BinarySearchFunc(series, at, func(p scaleout.Point, at float64) int {
		if p.Seconds < at {
			return -1
		}
		return 1
	})
	if next == len(series) {
		return float64(bytes(&series[next-1]))
	}
	to, toBytes := series[next].Seconds, float64(bytes(&series[next]))
	from, fromBytes := 0.0, 0.0
	if next > 0 {
		from, fromBytes = series[next-1].Seconds, float64(bytes(&series[next-1]))
	}
	if to <= from {
		return toBytes
	}
	return fromBytes + (toBytes-fromBytes)*(at-from)/(to-from)
}

// worst is the highest p90 of the points whose interval reaches into that from a
// to b.
func worst(series []scaleout.Point, a, b float64) float64 {
	var most, begin float64
	for _, p := range series {
		if p.Seconds > a && begin < b {
			most = max(most, p.P90)
		}
		begin = p.Seconds
	}
	return most
}

// evenly cuts a time into n intervals.
func evenly(seconds float64, n int) []float64 {
	edges := make([]float64, n+1)
	for i := range edges {
		edges[i] = seconds * float64(i) / float64(n)
	}
	return edges
}

// pointwise cuts a series into the intervals of its points. Points that almost
// meet, as the last two may, make one interval: the clock's steps and not the
// bytes would decide the rate between them.
func pointwise(series []scaleout.Point) []float64 {
	long := series[len(series)-1].Seconds
	least := min(max(long/400, 0.1), long/2)
	edges := []float64{0}
	for _, p := range series {
		if p.Seconds-edges[len(edges)-1] >= least {
			edges = append(edges, p.Seconds)
		}
	}
	if len(edges) == 1 {
		return append(edges, long)
	}
	edges[len(edges)-1] = long
	return edges
}

// peak is the highest sum of the bands in one interval.
func peak(bands []band) float64 {
	var most float64
	for i := range bands[0].rates {
		var sum float64
		for _, b := range bands {
			sum += b.rates[i]
		}
		most = max(most, sum)
	}
	return most
}

// bytesOf is what all bands moved.
func bytesOf(bands []band) uint64 {
	var sum uint64
	for _, b := range bands {
		sum += b.bytes
	}
	return sum
}
