package router

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/durable"
)

// reloadPeriod is how often the configuration file's content is looked at.
const reloadPeriod = 2 * time.Second

// watchConfig takes the configuration file whenever its content changes.
// Content, not time: mounted ConfigMaps are swapped links. A file that cannot
// be read or is invalid leaves the one before in place, and says so once.
func (r *Router) watchConfig(ctx context.Context) error {
	seen := r.fileHash
	ticker := time.NewTicker(reloadPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if now := hashFile(r.options.ConfigFile); now != seen && now != irregular {
			seen = now
			r.reload()
		}
	}
}

// hashFile is the zero hash for a file that cannot be read, and irregular's for what
// is none: to read a pipe again would wait for ever.
func hashFile(path string) (sum [sha256.Size]byte) {
	data, err := durable.ReadRegular(durable.OS, path, configfile.MaxSize)
	switch {
	case errors.Is(err, durable.ErrIrregular):
		return irregular
	case err != nil:
		return sum
	}
	return sha256.Sum256(data)
}

var irregular = sha256.Sum256([]byte("no regular file"))

// reload reads the file and takes what can change while running.
func (r *Router) reload() {
	cfg, err := Load(r.options.ConfigFile)
	if err == nil {
		err = r.apply(cfg)
	}
	r.metrics.reloaded(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.loadError = err.Error()
		r.log.Error("configuration not taken, the one before serves", slog.String("file", r.options.ConfigFile), slog.Any("error", err))
		return
	}
	r.loadError, r.loadedAt = "", r.options.Now()
	r.log.Info("configuration taken", slog.String("file", r.options.ConfigFile))
}

// apply swaps the reloadable parts of a valid configuration, all or none.
func (r *Router) apply(cfg Config) error {
	r.mu.Lock()
	now := r.effective
	r.mu.Unlock()
	now.Nodes, now.Policy, now.Pools, now.Models, now.Metering.Tokens = cfg.Nodes, cfg.Policy, cfg.Pools, cfg.Models, cfg.Metering.Tokens
	// What the file may say of nodes also depends on what was read at the start.
	if err := now.Validate(); err != nil {
		return fmt.Errorf("check with the fields that need a restart: %w", err)
	}
	consumers, err := now.Metering.consumers()
	if err != nil {
		return err
	}
	if err := r.listNodes(now.Nodes); err != nil {
		return err
	}
	if err := r.pools.SetModels(now.pool()); err != nil {
		return err
	}
	if r.cluster != nil {
		r.cluster.SetPools(now.Pools)
	}
	r.consumers.Store(consumers)
	r.mu.Lock()
	r.effective = now
	r.mu.Unlock()
	if !reflect.DeepEqual(now, cfg) {
		r.log.Warn("configuration: some changed fields need a restart", slog.String("reloadable", "nodes, policy, pools, models, metering.tokens"))
	}
	return nil
}
