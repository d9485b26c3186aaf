package netattr

import (
	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// class decides what the kernel left open. What was counted before this process
// began stays in the class that it was counted in.
func (b *books) class(key bpf.Key, g *group, pods map[string]Pod) traffic.Class {
	if key.Class != traffic.ByCgroup {
		return key.Class
	}
	pod, told := pods[g.owner.PodUID]
	if !b.counted || !g.found || g.owner.PodUID != "" && !told {
		if class, kept := b.decided[key.Cgroup]; kept {
			return class // who decided it knew more
		}
	}
	return classOf(b.rules, g.path, g.owner, pod)
}

// decide keeps what was decided of cgroups that moved something: whoever reads
// the counts after this process, before it has heard of a pod or when a cgroup is
// gone, would put them under another class. Other is what all are without.
func (b *books) decide(r reading, source keeper) {
	live := make(map[uint64]bool, len(b.accounts))
	for key, a := range b.accounts {
		live[key.Cgroup] = true
		if key.Class != traffic.ByCgroup || !named(key.Cgroup) || a.changed != r.at {
			continue
		}
		class, kept := b.class(key, b.group(key.Cgroup, r.at), r.pods), b.decided[key.Cgroup]
		if class == kept || class == traffic.Other && kept == traffic.ByCgroup {
			continue
		}
		if source.Decide(key.Cgroup, class) == nil {
			b.decided[key.Cgroup] = class
		}
	}
	for cgroup := range b.decided {
		if !live[cgroup] && source.Decide(cgroup, traffic.ByCgroup) == nil {
			delete(b.decided, cgroup)
		}
	}
}
