package router

import (
	"log/slog"
	"slices"
	"sync"

	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/kube"
)

// newCluster makes what follows pods and agents, where the configuration
// enables Kubernetes.
func (r *Router) newCluster() error {
	k := r.cfg.Kubernetes
	if !k.Enabled {
		return nil
	}
	client, namespace := r.options.Cluster, "default"
	var failing func() error
	if client == nil {
		connection, err := kube.Connect(k.Kubeconfig)
		if err != nil {
			return err
		}
		client, namespace, failing = connection.Client, connection.Namespace, connection.Failing
	}
	if k.Namespace != "" {
		namespace = k.Namespace
	}
	cluster, err := kube.New(kube.Options{
		Client: client, Namespace: namespace, Failing: failing, Agents: kube.Agents(k.Agents),
		SetPods: r.pools.SetPods, SetNodes: r.foundNodes, Log: r.log, Now: r.options.Now,
	})
	if err != nil {
		return err
	}
	cluster.SetPools(r.cfg.Pools)
	r.cluster = cluster
	return nil
}

// nodeSet is where the feed's nodes come from.
type nodeSet struct {
	mu     sync.Mutex
	listed []feed.Node // in the configuration; guarded by mu
	found  []feed.Node // agents that the cluster shows; guarded by mu
}

// foundNodes takes the agents that the cluster shows.
func (r *Router) foundNodes(found []feed.Node) {
	r.nodes.mu.Lock()
	defer r.nodes.mu.Unlock()
	if slices.Equal(r.nodes.found, found) {
		return
	}
	r.nodes.found = found
	if err := r.feed.SetNodes(r.nodes.allLocked()); err != nil {
		r.log.Error("agents of the cluster not taken, those before are watched", slog.Any("error", err))
	}
}

// listNodes takes the nodes of the configuration; on an error those before stay.
func (r *Router) listNodes(listed []feed.Node) error {
	r.nodes.mu.Lock()
	defer r.nodes.mu.Unlock()
	before := r.nodes.listed
	r.nodes.listed = listed
	if err := r.feed.SetNodes(r.nodes.allLocked()); err != nil {
		r.nodes.listed = before
		return err
	}
	return nil
}

// allLocked joins the two. A node that is listed is watched where the list says.
func (n *nodeSet) allLocked() []feed.Node {
	all := slices.Clone(n.listed)
	for _, f := range n.found {
		if !slices.ContainsFunc(n.listed, func(l feed.Node) bool { return l.Address == f.Address || l.Name != "" && l.Name == f.Name }) {
			all = append(all, f)
		}
	}
	return all
}
