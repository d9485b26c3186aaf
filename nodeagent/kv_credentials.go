package nodeagent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
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

// lookAtCredentials takes the passwords that the files have now, of all tenants at
// once: two may change places. A file that cannot be read, or has what cannot be a
// password, leaves the one before, which is told.
func (k *kvSpace) lookAtCredentials() {
	wants, faults := map[string]string{}, map[string]error{}
	for _, t := range k.settings().Tenants {
		password, err := t.password()
		if wants[t.Name] = password; err != nil {
			faults[t.Name] = err
		}
	}
	for _, name := range k.takePasswords(wants, faults) {
		k.log.Info("a KV tenant has another password, who gave the one before stays connected", slog.String("tenant", name))
	}
	for name := range wants {
		text, err := "", faults[name]
		if err != nil {
			text = "KV tenant " + name + " keeps the password of before: " + err.Error()
		}
		if news := k.setFault(name, text); news && err != nil {
			k.log.Error("a KV tenant keeps the password of before", slog.String("tenant", name), slog.Any("error", err))
		}
	}
}

// takePasswords gives tenants that are served and have a password the one that they
// want, and says which became another. Where several want the same one, those keep
// theirs who did not have it: faults says so, and names those that have no wish.
func (k *kvSpace) takePasswords(wants map[string]string, faults map[string]error) (changed []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	having, next := map[string]*kvServed{}, map[string]string{}
	for name := range wants {
		if served := k.served[kvtier.TenantCredential+" "+name]; served != nil && served.password != "" {
			having[name], next[name] = served, served.password
			if faults[name] == nil && wants[name] != "" {
				next[name] = wants[name]
			}
		}
	}
	names := slices.Sorted(maps.Keys(next))
	for again := true; again; { // each turn takes a wish away: what they have is no two's
		again = false
		of := map[string]string{}
		for _, name := range names {
			other, taken := of[next[name]]
			of[next[name]] = name
			if !taken {
				continue
			}
			for one, two := range map[string]string{name: other, other: name} {
				if next[one] != having[one].password {
					next[one], faults[one], again = having[one].password, errSamePassword(one, two), true
				}
			}
		}
	}
	for _, name := range names {
		if having[name].password != next[name] {
			having[name].password = next[name]
			changed = append(changed, name)
		}
	}
	k.renewCredentialsLocked()
	return changed
}

func errSamePassword(name, other string) error {
	return fmt.Errorf("the credentialFile of KV tenant %s has the same password as that of KV tenant %s, give each another", name, other)
}

// unique says whether no other tenant is to have a tenant's password: whose it is
// nobody could tell.
func (k *kvSpace) unique(t KVTenant, password string) error {
	if password == "" {
		return nil
	}
	for _, other := range k.settings().Tenants {
		if other.Name == t.Name {
			continue
		}
		if same, err := other.password(); err == nil && same == password {
			return errSamePassword(t.Name, other.Name)
		}
	}
	return nil
}

// freeLocked says whether no other tenant that is served has a tenant's password.
func (k *kvSpace) freeLocked(t KVTenant, password string) error {
	for _, key := range slices.Sorted(maps.Keys(k.served)) {
		if other := k.served[key]; password != "" && other.password == password && other.tenant.Name() != t.Name {
			return errSamePassword(t.Name, other.tenant.Name())
		}
	}
	return nil
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
