package nodeagent

import (
	"fmt"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// moved is a sample in which pods have received bytes, by UID.
func moved(bytes map[string]uint64) *netattr.Snapshot {
	s := &netattr.Snapshot{}
	for uid, n := range bytes {
		s.Shares = append(s.Shares, netattr.Share{
			Owner: netattr.Owner{PodUID: uid}, Kind: netattr.Kind{Class: traffic.Other, Locality: traffic.OffNode}, Counts: traffic.Counts{Received: n},
		})
	}
	return s
}

func sumOf(series map[string]map[podKind]uint64) (sum uint64) {
	for _, of := range series {
		for _, n := range of {
			sum += n
		}
	}
	return sum
}

func TestFiveThousandShortLivedPodsMakeFewSeries(t *testing.T) {
	t.Parallel()
	var p podSeries
	now := map[string]uint64{"engine": 32 << 20}
	ever := map[string]bool{}
	var total, before uint64 = 32 << 20, 0
	p.look(moved(now))
	for i := range 5000 {
		// Of a hundred at a time each moves less than a pod with series does.
		now[fmt.Sprint("pod-", i)] = podSeriesFrom - 1
		total += podSeriesFrom - 1
		delete(now, fmt.Sprint("pod-", i-100))
		now["engine"] += 1000
		total += 1000
		series := p.look(moved(now))
		for uid := range series {
			ever[uid] = true
		}
		if sum := sumOf(series); sum != total || sum < before {
			t.Fatalf("after %d pods all series are %d bytes, want %d", i, sum, total)
		}
		before = total
	}
	if len(ever) != 2 || !ever["engine"] || !ever[podOther] {
		t.Errorf("series of %v, want engine and other", ever)
	}
}

func TestAtMostSixtyFourPodsHaveSeriesOfTheirOwn(t *testing.T) {
	t.Parallel()
	var p podSeries
	now := map[string]uint64{}
	for i := range 200 {
		now[fmt.Sprint("pod-", i)] = podSeriesFrom + uint64(i)
	}
	series := p.look(moved(now))
	if len(series) != maxPodSeries+1 || series["pod-199"] == nil || series["pod-0"] != nil {
		t.Errorf("%d series, of the busiest %v", len(series), series["pod-199"])
	}
	want := sumOf(series)
	for uid := range now {
		now[uid] += 10
	}
	series = p.look(moved(now))
	if sum := sumOf(series); sum != want+200*10 || series["pod-199"][podKind{traffic.Other, traffic.Receive}] != podSeriesFrom+199+10 {
		t.Errorf("after 10 bytes more of each the sum is %d, want %d; the busiest has %v", sum, want+2000, series["pod-199"])
	}
	// One goes: another takes its place, and what all others moved does not fall.
	other := series[podOther][podKind{traffic.Other, traffic.Receive}]
	delete(now, "pod-199")
	series = p.look(moved(now))
	if len(series) != maxPodSeries+1 || series["pod-199"] != nil || series[podOther][podKind{traffic.Other, traffic.Receive}] != other {
		t.Errorf("%d series, others %v, want %d", len(series), series[podOther], other)
	}
}

func TestBytesThatAPodMovedInTheLimitedViewNeverFall(t *testing.T) {
	t.Parallel()
	var p podSeries
	p.look(moved(map[string]uint64{"a": 100 << 20}))
	series := p.look(moved(map[string]uint64{"a": 1 << 20})) // its share was begun anew
	if got := series["a"][podKind{traffic.Other, traffic.Receive}]; got != 100<<20 {
		t.Errorf("%d bytes, want those of before", got)
	}
}

func TestAnOlderSampleCountsNothingAgain(t *testing.T) {
	t.Parallel()
	var p podSeries
	first, second := moved(map[string]uint64{"a": 32 << 20}), moved(map[string]uint64{"a": 48 << 20})
	first.At, second.At = time.Unix(1, 0), time.Unix(2, 0)
	for _, s := range []*netattr.Snapshot{first, second, first, second} {
		p.look(s)
	}
	if got := sumOf(p.look(second)); got != 48<<20 {
		t.Errorf("series have %d bytes, want %d", got, 48<<20)
	}
}
