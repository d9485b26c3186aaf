package nodeagent

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// wellAndBad is a configuration of two tenants, one of which something is done to,
// and a claim.
func wellAndBad(t *testing.T) (c KV, folder string) {
	t.Helper()
	c = newKV(t)
	dir := t.TempDir()
	well, bad := tenant("well", 2*units.MiB, 50*units.MiB), tenant("bad", 2*units.MiB, 50*units.MiB)
	bad.Anonymous = false
	bad.CredentialFile, bad.EncryptionKeyFile = filepath.Join(dir, "password"), filepath.Join(dir, "key")
	c.Tenants = []KVTenant{well, bad}
	for file, text := range map[string]string{bad.CredentialFile: "secret\n", bad.EncryptionKeyFile: strings.Repeat("k", 32)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	k, err := openKV(c, plenty, kvPeering{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"well", "bad"} {
		store(t, k, kvtier.TenantCredential, name, "key", "value of "+name)
	}
	if err := errors.Join(k.cache.DetachTenant(t.Context(), kvtier.TenantCredential, "well"),
		k.cache.DetachTenant(t.Context(), kvtier.TenantCredential, "bad"), k.Close()); err != nil {
		t.Fatal(err)
	}
	folders, err := filepath.Glob(filepath.Join(c.Dir, "tenants", "*"))
	if err != nil || len(folders) != 2 {
		t.Fatal(folders, err)
	}
	for _, f := range folders {
		if text, _ := os.ReadFile(filepath.Join(f, "tenant.json")); strings.Contains(string(text), `"bad"`) {
			folder = filepath.Base(f)
		}
	}
	return c, folder
}

func TestWhatIsWrongWithOneTenantCostsThatTenantAlone(t *testing.T) {
	t.Parallel()
	aside := func(path string) (mend func() error) {
		return func() error {
			return errors.Join(os.RemoveAll(path), os.Rename(path+".aside", path))
		}
	}
	for name, spoil := range map[string]func(c KV, folder string) (path string, plant func(path string) error){
		"a directory in place of its record": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "tenants", folder, "tenant.json"), func(p string) error { return os.Mkdir(p, 0o700) }
		},
		"a pipe in place of its record": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "tenants", folder, "tenant.json"), func(p string) error { return syscall.Mkfifo(p, 0o600) }
		},
		"a pipe in place of a segment": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "blocks", folder, "0.seg"), func(p string) error { return syscall.Mkfifo(p, 0o600) }
		},
		"a pipe in place of a drive's generation": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "blocks", folder, "generation"), func(p string) error { return syscall.Mkfifo(p, 0o600) }
		},
		"a pipe in place of a drive's list": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "blocks", folder, "files"), func(p string) error { return syscall.Mkfifo(p, 0o600) }
		},
		"a pipe in place of its password": func(c KV, _ string) (string, func(string) error) {
			return c.Tenants[1].CredentialFile, func(p string) error { return syscall.Mkfifo(p, 0o600) }
		},
		"a newer generation": func(c KV, folder string) (string, func(string) error) {
			return filepath.Join(c.Dir, "tenants", folder, "checkpoint"), func(p string) error {
				return os.WriteFile(p, append([]byte("HRTHKVC1\x02"), make([]byte, 100)...), 0o600)
			}
		},
		"no password": func(c KV, _ string) (string, func(string) error) {
			return c.Tenants[1].CredentialFile, func(string) error { return nil }
		},
		"no key": func(c KV, _ string) (string, func(string) error) {
			return c.Tenants[1].EncryptionKeyFile, func(string) error { return nil }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, folder := wellAndBad(t)
			path, plant := spoil(c, folder)
			if err := errors.Join(os.Rename(path, path+".aside"), plant(path)); err != nil {
				t.Fatal(err)
			}
			k := openedKV(t, c, plenty)
			if !has(t, k, kvtier.TenantCredential, "well", "key") {
				t.Error("the other lost a block")
			}
			if k.serves(kvtier.TenantCredential, "bad") || k.refusedTenants()[kvtier.TenantCredential] != 1 {
				t.Error("it is served")
			}
			if !slices.ContainsFunc(k.told(), func(p string) bool { return strings.Contains(p, "KV tenant bad is not served") }) {
				t.Errorf("nothing is told: %q", k.told())
			}
			// Another change of the configuration is taken all the same.
			more := c
			more.Tenants = append(slices.Clone(c.Tenants), tenant("third", units.MiB, 0))
			more.Tenants[2].Anonymous, more.Tenants[2].Socket = false, filepath.Join(t.TempDir(), "s")
			if late, err := k.take(t.Context(), more); err != nil || len(late) > 0 {
				t.Errorf("a change about another: %v, %v", late, err)
			}
			if !k.serves(kvtier.TenantCredential, "third") || k.serves(kvtier.TenantCredential, "bad") {
				t.Error("the change was not taken")
			}
			k.tryRefused(t.Context(), time.Now().Add(time.Hour))
			if k.serves(kvtier.TenantCredential, "bad") {
				t.Error("it is served with nothing mended")
			}
			if err := aside(path)(); err != nil {
				t.Fatal(err)
			}
			k.tryRefused(t.Context(), time.Now().Add(time.Hour))
			if k.refusedTenants()[kvtier.TenantCredential] != 0 || slices.ContainsFunc(k.told(), func(p string) bool { return strings.Contains(p, "bad") }) {
				t.Errorf("it is refused once all is well: %q", k.told())
			}
			if !has(t, k, kvtier.TenantCredential, "bad", "key") {
				t.Error("its block is lost")
			}
		})
	}
}

func TestARefusedTenantMayBecomeAnotherOrGo(t *testing.T) {
	t.Parallel()
	c, _ := wellAndBad(t)
	there := c.Tenants[1].CredentialFile
	c.Tenants[1].CredentialFile += ".none"
	k := openedKV(t, c, plenty)
	if k.serves(kvtier.TenantCredential, "bad") {
		t.Fatal("it is served without its password")
	}
	next := c
	next.Tenants = slices.Clone(c.Tenants)
	next.Tenants[1].CredentialFile = there
	if late, err := k.take(t.Context(), next); err != nil || len(late) > 0 || !k.serves(kvtier.TenantCredential, "bad") {
		t.Errorf("with its file's right name: %v, %v", late, err)
	}
	next.Tenants = []KVTenant{c.Tenants[0], c.Tenants[1]}
	next.Tenants[1].Name = "other"
	if _, err := k.take(t.Context(), next); err != nil {
		t.Error(err)
	}
	if k.refusedTenants()[kvtier.TenantCredential] != 1 {
		t.Error("a new one without its password is not told")
	}
	next.Tenants = next.Tenants[:1]
	if _, err := k.take(t.Context(), next); err != nil || k.refusedTenants()[kvtier.TenantCredential] != 0 {
		t.Errorf("one that is not to be served any more is refused still: %v", err)
	}
}

func TestAClaimThatCannotBeServedAtAStartIsTriedAgain(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	k, err := openKV(c, plenty, kvPeering{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range []string{"one", "two"} {
		if _, err := k.Reserve(t.Context(), kvtier.Reservation{Claim: claim, Namespace: "n", Memory: units.MiB, NVMe: 40 * units.MiB}); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(c.Dir, "tenants", "*", "tenant.json"))
	if err != nil || len(records) != 2 {
		t.Fatal(records, err)
	}
	if err := errors.Join(os.Rename(records[0], records[0]+".aside"), os.Mkdir(records[0], 0o700)); err != nil {
		t.Fatal(err)
	}
	k = openedKV(t, c, plenty)
	if n := k.refusedTenants()[kvtier.TenantClaim]; n != 1 || len(k.list()) != 1 {
		t.Fatalf("%d claims are refused, %d served", n, len(k.list()))
	}
	if err := errors.Join(os.Remove(records[0]), os.Rename(records[0]+".aside", records[0])); err != nil {
		t.Fatal(err)
	}
	k.tryRefused(t.Context(), time.Now().Add(time.Hour))
	if n := k.refusedTenants()[kvtier.TenantClaim]; n != 0 || len(k.list()) != 2 {
		t.Errorf("%d claims are refused, %d served once all is well", n, len(k.list()))
	}
	for _, claim := range []string{"one", "two"} {
		if err := k.Release(t.Context(), claim); err != nil {
			t.Error(err)
		}
	}
}

func TestTheBlocksOfARefusedTenantMayBeDropped(t *testing.T) {
	t.Parallel()
	c, folder := wellAndBad(t)
	spoil := func() {
		t.Helper()
		record := filepath.Join(c.Dir, "tenants", folder, "tenant.json")
		if err := errors.Join(os.Remove(record), os.Mkdir(record, 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	spoil()
	k := openedKV(t, c, plenty)
	if k.serves(kvtier.TenantCredential, "bad") {
		t.Fatal("it is served with a folder in place of its record")
	}
	if _, err := k.DropAll(t.Context(), "tenant/bad"); err != nil {
		t.Fatal(err)
	}
	if !k.serves(kvtier.TenantCredential, "bad") || len(k.told()) != 0 || has(t, k, kvtier.TenantCredential, "bad", "key") {
		t.Errorf("it has not begun anew: %q", k.told())
	}
	if !has(t, k, kvtier.TenantCredential, "well", "key") {
		t.Error("the other lost a block")
	}
}

func TestARefusedTenantThatGoesIsOneThatIsLeft(t *testing.T) {
	t.Parallel()
	c, _ := wellAndBad(t)
	c.Tenants[1].EncryptionKeyFile += ".none"
	k := openedKV(t, c, plenty)
	next := c
	next.Tenants = c.Tenants[:1]
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if told := strings.Join(k.told(), "\n"); !strings.Contains(told, "tenants that nobody serves have") {
		t.Errorf("what it has on the drives is not told: %q", told)
	}
	if _, err := k.DropAll(t.Context(), "bad"); err != nil || len(k.told()) != 0 {
		t.Errorf("its blocks are there still: %v, %q", err, k.told())
	}
}

func TestAClaimThatIsReleasedWhileItIsTriedAgainIsNotServed(t *testing.T) {
	t.Parallel()
	k := openedKV(t, newKV(t), plenty)
	r := kvtier.Reservation{Claim: "one", Namespace: "n", Memory: units.MiB, NVMe: 40 * units.MiB}
	if _, err := k.Reserve(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	k.refuse(kvtier.TenantClaim, r.Claim, errors.New("a fault"))
	before := k.Reservations()
	if err := k.Release(t.Context(), r.Claim); err != nil {
		t.Fatal(err)
	}
	k.refuse(kvtier.TenantClaim, r.Claim, errors.New("a fault")) // by one that began before
	k.orRefuse(t.Context(), kvtier.TenantClaim, r.Claim, func() error { return k.addClaim(t.Context(), before[0]) })
	if n := k.refusedTenants()[kvtier.TenantClaim]; n != 0 || len(k.list()) != 0 || len(k.cache.Tenants()) != 0 {
		t.Errorf("of a claim that is gone %d are refused, %d served, %d in the store", n, len(k.list()), len(k.cache.Tenants()))
	}
}
