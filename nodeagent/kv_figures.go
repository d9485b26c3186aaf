package nodeagent

import (
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/units"
)

// Values of the label tenant. Claims are many, come and go, and are one value
// together; what each of them has is told by the admin API. So are the tenants of
// the configuration beyond the first so many names.
const (
	labelClaims  = "claims"
	labelOther   = "other"
	maxKVTenants = 64 // values, those two included
	maxKVModels  = 64 // of one value, "other" besides
)

// kvLabels are the names that have a value of their own, from the first time they
// are seen on.
type kvLabels map[string]bool

func (l kvLabels) of(kind, name string) string {
	switch {
	case kind == kvtier.TenantClaim:
		return labelClaims
	case l[name]:
		return name
	case len(l) >= maxKVTenants-2 || name == labelClaims || name == labelOther:
		return labelOther
	}
	l[name] = true
	return name
}

// kvSum is what tenants of one label have together.
type kvSum struct {
	stats  kvtier.TenantStats // without its names
	resp   resp.TenantStats   // without its models
	pinned kvtier.Pinned
	models map[string]resp.ModelStats
	// recovery is the longest of a tenant.
	recovery time.Duration
}

func (s *kvSum) add(o kvSum) {
	addNumbers(reflect.ValueOf(&s.stats).Elem(), reflect.ValueOf(o.stats))
	addNumbers(reflect.ValueOf(&s.resp).Elem(), reflect.ValueOf(o.resp))
	addNumbers(reflect.ValueOf(&s.pinned).Elem(), reflect.ValueOf(o.pinned))
	s.recovery = max(s.recovery, o.recovery)
	if s.models == nil {
		s.models = map[string]resp.ModelStats{}
	}
	for _, name := range slices.Sorted(maps.Keys(o.models)) {
		to := name
		if _, known := s.models[to]; !known && len(s.models) >= maxKVModels {
			to = labelOther
		}
		m := s.models[to]
		addNumbers(reflect.ValueOf(&m).Elem(), reflect.ValueOf(o.models[name]))
		s.models[to] = m
	}
}

// addNumbers adds every number of one struct to that of another of its type.
func addNumbers(to, from reflect.Value) {
	for i := range from.NumField() {
		switch t, f := to.Field(i), from.Field(i); f.Kind() {
		case reflect.Struct:
			addNumbers(t, f)
		case reflect.Int, reflect.Int64:
			t.SetInt(t.Int() + f.Int())
		case reflect.Uint64:
			t.SetUint(t.Uint() + f.Uint())
		default: // names and models
		}
	}
}

// counts leaves of a tenant that ends what counts on.
func (s kvSum) counts() kvSum {
	s.pinned = kvtier.Pinned{}
	for _, tier := range []*kvtier.TierStats{&s.stats.RAM, &s.stats.NVMe} {
		tier.Blocks, tier.Bytes, tier.Used, tier.Budget = 0, 0, 0, 0
	}
	s.stats.Own, s.stats.Total, s.stats.Namespaces, s.stats.IndexBytes, s.stats.Pins, s.stats.Waiting, s.stats.Recovered = 0, 0, 0, 0, 0, 0, 0
	s.recovery, s.stats.DrivesOut = 0, 0
	s.resp.Connections, s.resp.Pins, s.resp.PinnedBytes = 0, 0, 0
	return s
}

// sum is what a tenant has.
func (s *kvServed) sum() kvSum {
	one := kvSum{stats: s.tenant.Stats(), resp: s.resp.Stats(), pinned: s.tenant.Pinned(), models: map[string]resp.ModelStats{}}
	one.recovery = one.stats.Recovery
	for name, m := range one.resp.Models {
		// A client chooses its models' names.
		name = strings.ToValidUTF8(name, "?")
		of := one.models[name]
		addNumbers(reflect.ValueOf(&of).Elem(), reflect.ValueOf(m))
		one.models[name] = of
	}
	one.resp.Models = nil
	return one
}

// list gives the tenants that are served, by kind and name.
func (k *kvSpace) list() []*kvServed {
	k.mu.Lock()
	defer k.mu.Unlock()
	list := make([]*kvServed, 0, len(k.served))
	for _, key := range slices.Sorted(maps.Keys(k.served)) {
		list = append(list, k.served[key])
	}
	return list
}

// figures are the sums by label, of those tenants too that ended.
func (k *kvSpace) figures() map[string]*kvSum {
	sums := map[string]*kvSum{}
	list := k.list()
	k.mu.Lock()
	for label, past := range k.past {
		sums[label] = &kvSum{}
		sums[label].add(*past)
	}
	labels := make([]string, len(list))
	for i, served := range list {
		labels[i] = k.labels.of(served.tenant.Kind(), served.tenant.Name())
	}
	k.mu.Unlock()
	for i, served := range list {
		if sums[labels[i]] == nil {
			sums[labels[i]] = &kvSum{}
		}
		sums[labels[i]].add(served.sum())
	}
	return sums
}

// forget ends the serving of a tenant, whose counts stay.
func (k *kvSpace) forget(key string) {
	k.mu.Lock()
	served := k.served[key]
	k.mu.Unlock()
	if served == nil {
		return
	}
	last := served.sum().counts()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.served[key] != served {
		return
	}
	delete(k.served, key)
	if k.open == served {
		k.open = nil
	}
	label := k.labels.of(served.tenant.Kind(), served.tenant.Name())
	if k.past[label] == nil {
		k.past[label] = &kvSum{}
	}
	k.past[label].add(last)
}

// leftBytes is what tenants have on the drives that nobody serves.
func (k *kvSpace) leftBytes() (sum units.Bytes) {
	left, err := k.cache.Left()
	if err != nil {
		k.log.Warn("tenants that are left on the drives cannot be listed", slog.Any("error", err))
	}
	for _, l := range left {
		sum += units.Bytes(l.Bytes)
	}
	return sum
}

// How often the fill is looked at, and told while nothing but counts changes.
const (
	fillEvery  = 5 * time.Second
	fillCounts = 30 * time.Second
)

// fillKeeper keeps the fill as it was told last.
type fillKeeper struct {
	mu   sync.Mutex
	last *local.KVFill
	at   time.Time
}

// look takes the figures of now, where they say something else that matters.
func (f *fillKeeper) look(figures map[string]*kvSum) {
	var sum kvSum
	for _, one := range figures {
		sum.add(*one)
	}
	tier := func(t kvtier.TierStats) local.KVTier {
		return local.KVTier{
			Used: t.Used, Budget: t.Budget, Blocks: t.Blocks, Hits: t.Hits, SavedTokens: t.HitTokens, Damaged: t.Damaged,
		}
	}
	s := sum.stats
	now := local.KVFill{
		RAM: tier(s.RAM), NVMe: tier(s.NVMe), Blocks: s.Total, Misses: s.Misses,
		Dropped: s.DroppedFull + s.DroppedLarge + s.DroppedWear + s.DroppedDrive,
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == nil || fillMatters(*f.last, now) || now != *f.last && time.Since(f.at) >= fillCounts {
		f.last, f.at = &now, time.Now()
	}
}

// fillMatters says whether a fill is another one than before by more than counts
// that rise: a hundredth of a budget, a budget, or damage.
func fillMatters(before, now local.KVFill) bool {
	moved := func(a, b local.KVTier) bool {
		return a.Budget != b.Budget || a.Damaged != b.Damaged || max(a.Used-b.Used, b.Used-a.Used) > a.Budget/100
	}
	return moved(before.RAM, now.RAM) || moved(before.NVMe, now.NVMe)
}

// told is the fill, nil where no space is configured.
func (f *fillKeeper) told() *local.KVFill {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// watchFill looks at the fill, and at what is offered, until ctx ends.
func (k *kvSpace) watchFill(ctx context.Context) error {
	look := time.NewTicker(fillEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
			k.fill.look(k.figures())
			k.lookAtTenants()
		}
	}
}
