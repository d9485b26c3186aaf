package resp

import (
	"testing"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

func TestClientsHoldPartsOfWhatIsTheTenantsOwn(t *testing.T) {
	t.Parallel()
	cache, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: t.TempDir(), Memory: 64 * units.MiB})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		spec kvtier.TenantSpec
		want units.Bytes
	}{
		{kvtier.TenantSpec{Name: "own", Memory: 8 * units.MiB}, 8 * units.MiB},
		{kvtier.TenantSpec{Name: "borrower", Memory: 8 * units.MiB, MemoryLimit: 64 * units.MiB}, 8 * units.MiB},
		{kvtier.TenantSpec{Name: "borrower alone", MemoryLimit: 16 * units.MiB}, 16 * units.MiB},
		{kvtier.TenantSpec{Name: "drives alone", NVMe: 64 * units.MiB}, kvtier.Transit},
	} {
		c.spec.Kind = kvtier.TenantCredential
		tenant, err := cache.AddTenant(t.Context(), c.spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := own(tenant); got != int64(c.want) {
			t.Errorf("%s: %d bytes, want %d", c.spec.Name, got, c.want)
		}
	}
}
