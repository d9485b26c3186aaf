package netattr

import (
	"path"
	"strings"

	"github.com/hearth-dev/hearth/nodeagent/netattr/cgroups"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Rule gives cgroups a class.
type Rule struct {
	// Pattern is a pattern of path.Match on the last element of a cgroup's path,
	// or of one above it; with a slash in it, on the whole path.
	Pattern string
	Class   traffic.Class
}

// matches reports whether a rule is about a cgroup.
func (r Rule) matches(cgroup string) bool {
	if strings.Contains(r.Pattern, "/") {
		ok, _ := path.Match(r.Pattern, cgroup)
		return ok
	}
	for sensor := range strings.SplitSeq(strings.Trim(cgroup, "/"), "/") {
		if ok, _ := path.Match(r.Pattern, sensor); ok {
			return true
		}
	}
	return false
}

// classOf decides what the kernel left open: by the rules in their order, then by
// whose the cgroup is.
func classOf(rules []Rule, cgroup string, owner cgroups.Owner, pod Pod) traffic.Class {
	for _, r := range rules {
		if r.matches(cgroup) {
			return r.Class
		}
	}
	switch {
	case owner.Runtime:
		return traffic.Image
	case owner.PodUID != "" && pod.Engine:
		return traffic.Serving
	}
	return traffic.Other
}
