package nodeagent

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/units"
)

// counted gives the counters of some metrics that are not 0, by name and labels.
func counted(k *kvSpace, names ...string) map[string]int64 {
	values := map[string]int64{}
	k.collect(func(*prometheus.Desc, float64, ...string) {}, func(d *prometheus.Desc, n int64, labels ...string) {
		for _, name := range names {
			if n != 0 && strings.Contains(d.String(), `"hearth_`+name+`"`) {
				values[name+" "+strings.Join(labels, " ")] += n
			}
		}
	})
	return values
}

func TestHitsAreCountedByTierTenantAndModelInBlocksBytesAndTokens(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	socket := filepath.Join(t.TempDir(), "kv.sock")
	c.Tenants = []KVTenant{{Name: "chat", Memory: 2 * units.MiB, BlockTokens: 256, Socket: socket}}
	k := openedKV(t, c, plenty)
	value := strings.Repeat("v", 2048)
	// LMCache keeps two keys of a chunk: its bytes, and what they are, which saves
	// no tokens.
	ask(t, "unix", socket, "SET m@1@0@ab@halfkv_bytes "+value, "SET m@1@0@ab@halfmetadata x",
		"GET m@1@0@ab@halfkv_bytes", "GET m@1@0@ab@halfmetadata", "GET n@1@0@ab@half", "SET k v", "GET k")
	hits := []string{"kv_hits_total", "kv_hit_bytes_total", "kv_saved_tokens_total", "kv_misses_total"}
	want := map[string]int64{
		"kv_hits_total chat ram m": 2, "kv_hit_bytes_total chat ram m": 2049, "kv_saved_tokens_total chat ram m": 256,
		"kv_misses_total chat n": 1, "kv_hits_total chat ram other": 1, "kv_hit_bytes_total chat ram other": 1,
	}
	if diff := cmp.Diff(want, counted(k, hits...)); diff != "" {
		t.Errorf("the counts differ (-want +got):\n%s", diff)
	}
	// Of a drive, and of a tenant that ended.
	k.mu.Lock()
	k.past["chat"] = &kvSum{models: map[string]resp.ModelStats{"m": {NVMe: resp.ModelHits{Hits: 3, Bytes: 30, Tokens: 768}}}}
	k.mu.Unlock()
	want["kv_hits_total chat nvme m"], want["kv_hit_bytes_total chat nvme m"], want["kv_saved_tokens_total chat nvme m"] = 3, 30, 768
	if diff := cmp.Diff(want, counted(k, hits...)); diff != "" {
		t.Errorf("the counts differ (-want +got):\n%s", diff)
	}
	d := describeTenant(k.list()[0])
	if got := d.Models["m"]; got.Hits != 2 || got.SavedTokens != 256 || d.RAM.Hits != 3 || d.RAM.SavedTokens != 256 {
		t.Errorf("the API tells of %+v and %+v", got, d.RAM)
	}
}
