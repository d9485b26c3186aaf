package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// runs reports whether a role is among those of the configuration.
func (c Config) runs(role string) bool { return slices.Contains(c.Roles, role) }

// apart reports whether the other role runs in a process of its own.
func (c Config) apart() bool { return !c.runs(RoleControl) || !c.runs(RoleData) }

// runs reports whether the agent runs a role.
func (a *Agent) runs(role string) bool { return a.config.runs(role) }

// build makes the rooms of the roles, the data role's first: the control role
// reaches them through a.data.
func (a *Agent) build() error {
	if a.runs(RoleData) {
		if err := a.buildData(); err != nil {
			return err
		}
		a.data = a.inside
	} else {
		a.remote = local.NewRemote(local.DialOptions{Socket: a.config.Listen.DataSocket, Log: a.log})
		a.data = a.remote
	}
	a.cache, a.kv = a.data.Cache(), a.data.KV()
	if !a.runs(RoleControl) {
		return nil
	}
	if err := a.buildControl(); err != nil {
		return err
	}
	return a.buildCluster()
}

// buildData makes the weights store, its puller, the KV space and the mirror.
func (a *Agent) buildData() error {
	w := a.config.Weights
	a.buildNetwork()
	var err error
	var rules []weightcache.Rule
	for _, s := range a.config.Sources {
		origin, err := a.newSource(s)
		if err != nil {
			return fmt.Errorf("make source %s: %w", s.Name, err)
		}
		rules = append(rules, weightcache.Rule{Source: origin, Refs: s.Refs})
	}
	a.keeper = newKeeper(a.config, rules)
	a.store, err = weightcache.Open(weightcache.Options{
		Dir: w.Dir, ViewsDir: w.ViewsDir, Budget: w.Budget, KeepFree: w.KeepFree, Keep: a.keep, Log: a.log,
		MayView: a.keeper.mayView,
	})
	if err != nil {
		return err
	}
	scrub := w.ScrubEvery.Std()
	if scrub == 0 {
		scrub = -1
	}
	limiter := weightcache.NewLimiter(w.Rate)
	a.puller, err = weightcache.NewPuller(weightcache.PullerOptions{
		Store: a.store, Sources: rules, Limiter: limiter, SegmentSize: w.SegmentSize, Streams: w.Streams,
		StallTimeout: w.StallTimeout.Std(), ScrubEvery: scrub, ScrubRate: w.ScrubRate, Log: a.log, Began: a.network.began,
	})
	if err != nil {
		return err
	}
	peering, err := a.newKVPeering(limiter)
	if err != nil {
		return err
	}
	a.space, err = openKV(a.config.KV, capacityOf(a.config), peering, a.log)
	if err != nil {
		return err
	}
	a.inside, err = local.NewInProcess(local.Options{
		Store: a.store, Puller: a.puller, KV: a.space, KVFill: a.space.fill.told, Log: a.log,
		SetPods: a.network.collector.SetPods, Network: a.network.seen, ScaleOuts: a.network.scaleouts.List,
	})
	if err != nil {
		return err
	}
	a.space.offers = a.inside.KVChanged
	if bad := a.inside.Bad(); len(bad) > 0 {
		a.setProblem("claims", fmt.Sprintf("%d files about what claims hold could not be read and were put aside: their claims ask again", len(bad)))
	}
	a.mirror = hubmirror.New(hubmirror.Options{
		Library: library{store: a.store, puller: a.puller}, Auth: a.authOptions(), Log: a.log,
	})
	return nil
}

func (a *Agent) newSource(s Source) (source.Source, error) {
	if s.Type != SourceHub {
		return source.NewDir(source.DirOptions{Name: s.Name, Root: s.Root})
	}
	return source.NewHub(source.HubOptions{
		Name: s.Name, URL: s.URL, TokenFile: s.TokenFile, Streams: a.config.Weights.Streams, UserAgent: "hearth/" + a.opts.Version,
		DialContext: a.dial(traffic.Weights), BodyTimeout: a.config.Weights.StallTimeout.Std(),
	})
}

// pullsLimit is how long Close waits for pulls to put away what has landed.
const pullsLimit = 5 * time.Second

// Close gives the stores back, once no pull writes into them any more. Run does
// it itself.
func (a *Agent) Close() error {
	var err error
	if a.puller != nil {
		ctx, cancel := context.WithTimeout(context.Background(), pullsLimit)
		defer cancel()
		err = a.puller.Wait(ctx)
	}
	if a.space != nil {
		err = errors.Join(err, a.space.Close())
	}
	if a.store != nil {
		err = errors.Join(err, a.store.Close())
	}
	a.network.close()
	return errors.Join(err, a.cluster.close())
}

// startData starts what the data role runs.
func (a *Agent) startData(running context.Context, start func(name string, run func() error)) {
	start("weights", func() error { return ending(running, a.puller.Run(running)) })
	start("claims' weights", func() error { return a.inside.Run(running) })
	start("KV space", func() error { return a.space.run(running) })
	start("views", func() error { return a.publishViews(running) })
	start("access", func() error { return a.checkAccess(running) })
	a.network.run(running, start)
	start("network state", func() error { return a.network.follow(running, a.inside.NetworkChanged) })
	for _, ref := range a.keep {
		start("keep", func() error { return a.keepReady(running, ref) })
	}
}

// startControl starts what the control role runs.
func (a *Agent) startControl(running context.Context, start func(name string, run func() error)) {
	start("health", func() error { return a.tracker.Run(running) })
	start("endpoints", func() error { return a.poller.Run(running) })
	start("report", func() error { return a.reportState(running) })
	start("leases", func() error { return a.lendServed(running) })
	if a.remote != nil {
		start("data role", func() error { return a.remote.Run(running) })
	}
	if a.cluster != nil {
		a.cluster.run(running, a, start)
	}
}

// epoch is another one after each start.
func (a *Agent) epoch() uint64 { return uint64(a.started.UnixNano()) }

// node is what the agent says of itself.
func (a *Agent) node() admin.Node {
	state, _ := a.data.Snapshot()
	n := admin.Node{
		Name: a.config.Node, Version: a.opts.Version, Roles: a.config.Roles, Epoch: a.epoch(),
		StartedAt: a.started.UTC(), Listeners: map[string]string{},
		Space: admin.Space{Capacity: int64(state.Space.Capacity), Used: int64(state.Space.Used), Free: int64(state.Space.Free)},
		KV:    kvAtAGlance(state.KV),
	}
	n.Kubernetes = a.cluster.state(a.config)
	if state.Network != nil {
		n.Network = &admin.NetSight{Sight: state.Network.Sight, Reason: state.Network.Reason}
	}
	n.Problems = append(a.problemTexts(), a.dataProblems(state)...)
	slices.Sort(n.Problems)
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(n.Listeners, a.listeners)
	return n
}

// problemTexts are those of this process's own rooms, sorted.
func (a *Agent) problemTexts() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.Collect(maps.Values(a.problems))
	if a.space != nil {
		list = append(list, a.space.told()...)
	}
	slices.Sort(list)
	return list
}

// dataProblems are those that the data role tells of itself, and that it does
// not answer, where it runs apart.
func (a *Agent) dataProblems(state local.State) []string {
	if a.remote == nil {
		return nil
	}
	list := slices.Clone(state.Problems)
	if since, err := a.remote.Down(); err != nil {
		list = append(list, fmt.Sprintf("the data role does not answer since %s, what is told of models is of before: %v", since.UTC().Format("15:04:05"), err))
	}
	return list
}
