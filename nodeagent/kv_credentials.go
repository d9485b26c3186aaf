package nodeagent

import (
	"context"
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
)

// watchCredentials takes the passwords that the files of tenants have, until ctx
// ends: whenever their content changes, as with the configuration.
func (k *kvSpace) watchCredentials(ctx context.Context) error {
	ticker := time.NewTicker(reloadPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			k.lookAtCredentials()
		}
	}
}

// lookAtCredentials takes them now.
func (k *kvSpace) lookAtCredentials() {
	for _, t := range k.settings().Tenants {
		k.lookAtCredential(t)
	}
}

// lookAtCredential takes the password of one tenant, if it is served. A file that
// cannot be read, or has what cannot be a password, leaves the one before, which is
// told.
func (k *kvSpace) lookAtCredential(t KVTenant) {
	changed, err := k.renewPassword(t)
	if changed {
		k.log.Info("a KV tenant has another password, who gave the one before stays connected", slog.String("tenant", t.Name))
	}
	text := ""
	if err != nil {
		text = "KV tenant " + t.Name + " keeps the password of before: " + err.Error()
	}
	if news := k.setFault(t.Name, text); news && err != nil {
		k.log.Error("a KV tenant keeps the password of before", slog.String("tenant", t.Name), slog.Any("error", err))
	}
}

// setFault notes what is wrong with a tenant that is served, empty for nothing,
// and says whether that is new.
func (k *kvSpace) setFault(name, text string) (news bool) {
	k.mu.Lock()
	served := k.served[kvtier.TenantCredential+" "+name]
	if served != nil {
		news = served.fault != text
		served.fault = text
	}
	k.mu.Unlock()
	if news {
		k.lookAtTenants()
	}
	return news
}

// renewPassword takes the password that a tenant's file has now; changed says that
// it is another one. An error leaves the one before.
func (k *kvSpace) renewPassword(t KVTenant) (changed bool, err error) {
	password, err := t.password()
	if err != nil {
		return false, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	served := k.served[kvtier.TenantCredential+" "+t.Name]
	if served == nil || served.password == password {
		return false, nil
	}
	before := served.password
	served.password = password
	if err := k.renewCredentialsLocked(); err != nil {
		served.password = before
		return false, err
	}
	return true, nil
}
