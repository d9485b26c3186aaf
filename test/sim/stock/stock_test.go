package stock_test

import (
	"testing"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/dradriver/stock/stocktest"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestTheCacheOfTestsDoesWhatACachePromises(t *testing.T) {
	t.Parallel()
	stocktest.Cache(t, func(t *testing.T) stocktest.CacheRig {
		t.Helper()
		dir := t.TempDir()
		warm, cold, hidden := simstock.Sample("warm", 1), simstock.Sample("cold", 2), simstock.Sample("hidden", 3)
		forbidden := artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/forbidden", Revision: "main"}
		open := func(t *testing.T) *simstock.Cache {
			t.Helper()
			c, err := simstock.OpenCache(dir, stock.Drive{Tier: "nvme", Free: 1 << 30})
			if err != nil {
				t.Fatal(err)
			}
			c.Offer(cold.Ref, simstock.Origin{Artifact: cold})
			c.Offer(forbidden, simstock.Origin{Failed: "403: ask the owner", Reason: "Forbidden", Final: true})
			c.Restrict(hidden.Digest)
			return c
		}
		c := open(t)
		for _, a := range []stock.Artifact{warm, hidden} {
			if err := c.Add(a); err != nil {
				t.Fatal(err)
			}
		}
		return stocktest.CacheRig{
			Cache: c, Warm: warm, Cold: cold.Ref, Forbidden: forbidden, Restricted: hidden.Digest,
			Remove: c.Remove,
			Reopen: func(t *testing.T) stock.Cache { t.Helper(); return open(t) },
		}
	})
}

func TestTheKVOfTestsDoesWhatKVPromises(t *testing.T) {
	t.Parallel()
	stocktest.KV(t, func(t *testing.T) stocktest.KVRig {
		t.Helper()
		dir := t.TempDir()
		open := func(t *testing.T) stock.KV {
			t.Helper()
			k, err := simstock.OpenKV(dir, stocktest.KVSpace)
			if err != nil {
				t.Fatal(err)
			}
			return k
		}
		return stocktest.KVRig{KV: open(t), Reopen: open}
	})
}
