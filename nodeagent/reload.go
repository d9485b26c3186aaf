package nodeagent

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// reloadPeriod is how often the configuration file's content is looked at.
const reloadPeriod = 2 * time.Second

// watchConfig takes the configuration file whenever its content changes.
// Content, not time: mounted ConfigMaps are swapped links. A file that cannot be
// read or is invalid leaves the one before in place, and is a problem of the node; it
// is tried again until it is taken. One that is a pipe was read at the start alone.
func (a *Agent) watchConfig(ctx context.Context) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	var seen [sha256.Size]byte // of none: what changed since the start is taken, too
	ticker := time.NewTicker(reloadPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		data, err := durable.ReadRegular(durable.OS, a.opts.ConfigFile, configfile.MaxSize)
		if errors.Is(err, durable.ErrIrregular) { // to read a pipe again would wait for ever
			a.setProblem("configuration", "the configuration file is not read again: "+err.Error())
			a.listenLate(ctx, &serving)
			continue
		}
		now := sha256.Sum256(data)
		if err == nil && now == seen {
			a.listenLate(ctx, &serving) // a tenant may come later than the file
			continue
		}
		if a.reload(ctx) && err == nil { // else it is tried again: what it needs may come
			seen = now
		}
		if ctx.Err() == nil {
			a.listenLate(ctx, &serving)
		}
	}
}

// reload reads the file and takes what can change while running, and says whether all
// of it is taken.
func (a *Agent) reload(ctx context.Context) bool {
	config, err := a.opts.Load()
	var changed bool
	var late []string
	if err == nil {
		changed, late, err = a.apply(ctx, config)
	}
	if ctx.Err() != nil {
		return false
	}
	text := ""
	switch {
	case err != nil:
		text = "the configuration file is not taken, or in part, which is tried again; what is missing serves as before: " + err.Error()
	case len(late) > 0:
		text = "the configuration file differs in what needs a restart: " + strings.Join(late, ", ")
	}
	news := a.setProblem("configuration", text)
	switch {
	case err != nil && news:
		a.log.Error("configuration not taken, or in part, trying again", slog.String("file", a.opts.ConfigFile), slog.Any("error", err))
	case err != nil:
	case len(late) > 0 && news:
		a.log.Warn("configuration: some changed fields need a restart", slog.Any("fields", late))
	}
	if err == nil && changed {
		a.log.Info("configuration taken", slog.String("file", a.opts.ConfigFile))
	}
	return err == nil
}

// apply takes of a valid configuration what can change while running, which is the
// KV space's budgets and tenants, and names what needs a restart.
func (a *Agent) apply(ctx context.Context, config Config) (changed bool, late []string, err error) {
	before := a.settings()
	late = differing(before, config)
	if a.space == nil {
		return false, late, nil // the process of the data role takes it
	}
	next := before
	next.KV = config.KV
	// What the file may say of KV also depends on what was read at the start.
	if err := next.Validate(); err != nil {
		return false, nil, fmt.Errorf("check with the fields that need a restart: %w", err)
	}
	more, err := a.space.take(ctx, config.KV)
	late = append(late, more...)
	return !reflect.DeepEqual(a.space.settings(), before.KV), late, err
}

// settings is the configuration as it stands now.
func (a *Agent) settings() Config {
	c := a.config
	if a.space != nil {
		c.KV = a.space.settings()
	}
	return c
}

// differing names the sections of two configurations that differ, but for kv.
func differing(before, now Config) (names []string) {
	b, n := reflect.ValueOf(before), reflect.ValueOf(now)
	for i := range b.NumField() {
		name, _, _ := strings.Cut(b.Type().Field(i).Tag.Get("yaml"), ",")
		if name != "kv" && !same(b.Field(i), n.Field(i)) {
			names = append(names, name)
		}
	}
	return names
}

// same is DeepEqual of exported fields for whom an empty list is as good as none.
func same(a, b reflect.Value) bool {
	switch a.Kind() {
	case reflect.Struct:
		for i := range a.NumField() {
			if !same(a.Field(i), b.Field(i)) {
				return false
			}
		}
		return true
	case reflect.Slice, reflect.Map:
		if a.Len() == 0 && b.Len() == 0 {
			return true
		}
	default:
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// listenLate binds listen.resp where its first tenant came after the start.
func (a *Agent) listenLate(ctx context.Context, serving *sync.WaitGroup) {
	if a.space == nil || a.config.Listen.RESP == "" || !a.space.hasClients() || a.isBound("resp") {
		return
	}
	listener, err := identity.ListenTCP(ctx, a.config.Listen.RESP, identity.StalledTimeout, a.network.mark(traffic.KV))
	if err != nil {
		a.setProblem("resp", "listen.resp is not served: "+err.Error())
		return
	}
	a.setProblem("resp", "")
	s := a.respServer(ctx, listener)
	stop := context.AfterFunc(ctx, func() { s.stop(ctx) })
	serving.Go(func() {
		defer stop()
		if err := s.serve(); err != nil && !errors.Is(err, context.Canceled) {
			a.log.Error("listen.resp is served no more", slog.Any("error", err))
		}
	})
}

func (a *Agent) isBound(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.listeners[name] != ""
}
