package cli

import (
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// advice lists what is odd about a valid configuration: it loads, and something
// in it cannot work as it stands.
func advice(config validator) []string {
	switch c := config.(type) {
	case *nodeagent.Config:
		return slices.Concat(agentAdvice(c), kubernetesAdvice(c), tokenAdvice(c), agentTLS(c, time.Now()))
	case *router.Config:
		addresses := map[string]string{"listen.ingress": c.Listen.Ingress, "listen.admin": c.Listen.Admin}
		for i, n := range c.Nodes {
			addresses[fmt.Sprintf("nodes[%d].address", i)] = n.Address
		}
		return slices.Concat(portAdvice(addresses), capabilityAdvice(c), routerTLS(c, time.Now()))
	}
	return nil
}

// capabilities are those that requests can need of a target.
var capabilities = []string{"tools", "vision", "json"}

// capabilityAdvice names capabilities that no request needs: beside a mistyped
// one, the one that was meant counts as lacking.
func capabilityAdvice(c *router.Config) []string {
	var odd []string
	for i, m := range c.Models {
		for j, t := range m.Targets {
			for k, name := range t.Capabilities {
				if !slices.Contains(capabilities, name) {
					odd = append(odd, fmt.Sprintf("models[%d].targets[%d].capabilities[%d]: %q is needed by no request; want %s", i, j, k, name, strings.Join(capabilities, ", ")))
				}
			}
		}
	}
	return odd
}

func agentAdvice(c *nodeagent.Config) []string {
	odd := portAdvice(map[string]string{"listen.mirror": c.Listen.Mirror, "listen.report": c.Listen.Report, "listen.admin": c.Listen.Admin})
	for i, s := range c.Sources {
		if info, err := os.Stat(s.Root); s.Type == nodeagent.SourceDir && (err != nil || !info.IsDir()) {
			odd = append(odd, fmt.Sprintf("sources[%d].root: %s is no folder here now", i, s.Root))
		}
	}
	refs := map[string]string{}
	for i, ref := range c.Models {
		refs[fmt.Sprintf("models[%d]", i)] = ref
	}
	for i, e := range c.Endpoints {
		refs[fmt.Sprintf("endpoints[%d].ref", i)] = e.Ref
	}
	for _, field := range slices.Sorted(maps.Keys(refs)) {
		if ref, err := artifact.ParseRef(refs[field]); err == nil {
			odd = append(odd, refAdvice(c, field, ref)...)
		}
	}
	return odd
}

// refAdvice says why nothing could bring a ref.
func refAdvice(c *nodeagent.Config, field string, ref artifact.Ref) []string {
	kind := nodeagent.SourceHub
	if ref.Scheme == artifact.SchemeDir {
		kind = nodeagent.SourceDir
	}
	have := false
	for _, s := range c.Sources {
		if s.Type != kind {
			continue
		}
		have = true
		if (weightcache.Rule{Refs: s.Refs}).Covers(ref) {
			return nil
		}
	}
	if !have {
		return []string{fmt.Sprintf("%s: %s needs a source of type %s, and there is none", field, ref, kind)}
	}
	return []string{fmt.Sprintf("%s: %s is allowed by no pattern under sources[].refs", field, ref)}
}

func portAdvice(addresses map[string]string) []string {
	var odd []string
	for _, field := range slices.Sorted(maps.Keys(addresses)) {
		_, port, err := net.SplitHostPort(addresses[field])
		if err != nil {
			continue // empty is off, and anything else was checked
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			odd = append(odd, fmt.Sprintf("%s: port %q is no number from 0 to 65535", field, port))
		}
	}
	return odd
}
