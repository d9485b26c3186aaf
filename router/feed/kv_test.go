package feed

import (
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

func TestTheKVOfANodeShowsAsItLastReportedIt(t *testing.T) {
	t.Parallel()
	p := publisher(t, "n1", 7, "a")
	address, _ := serve(t, "127.0.0.1:0", p)
	f, sink := run(t, Node{Address: address})
	sink.until(t, "the snapshot", func(s seen) bool { return s.endpoints == 1 })
	if err := p.SetKV(&report.KV{
		Ram: &report.KVTier{UsedBytes: 5, BudgetBytes: 10, Hits: 3, SavedTokens: 48}, Nvme: &report.KVTier{UsedBytes: 7}, Blocks: 4, Misses: 2, Dropped: 1,
	}); err != nil {
		t.Fatal(err)
	}
	set(t, p, "a", "b") // by its arrival that of the KV is over
	sink.until(t, "the delta after it", func(s seen) bool { return s.endpoints == 2 })
	got := f.Stats()[0].KV
	want := KVStats{RAM: KVTier{Used: 5, Budget: 10, Hits: 3, SavedTokens: 48}, NVMe: KVTier{Used: 7}, Blocks: 4, Misses: 2, Dropped: 1}
	if got == nil || *got != want {
		t.Errorf("KV is %+v, want %+v", got, want)
	}
}
