package nodeagent

import (
	"context"
	"slices"

	"github.com/hearth-dev/hearth/kvtier"
)

// CheckKV reads and verifies every block of a KV store that no agent serves, with
// the keys that its configuration names. Errors are those of kvtier.Check, and of
// a key file.
func CheckKV(ctx context.Context, config KV, progress func(done, total int64)) ([]kvtier.TenantCheck, error) {
	return kvtier.Check(ctx, kvtier.CheckOptions{
		Dir: config.Dir, Drives: config.Drives, Progress: progress,
		Key: func(kind, name string) ([]byte, error) {
			at := slices.IndexFunc(config.Tenants, func(t KVTenant) bool { return t.Name == name })
			if at < 0 || kind != kvtier.TenantCredential {
				return nil, nil
			}
			spec, err := config.spec(config.Tenants[at])
			return spec.EncryptionKey, err
		},
	})
}
