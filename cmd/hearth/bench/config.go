package bench

import (
	"fmt"
	"path/filepath"
)

// routerConfig is a router in front of one static endpoint, metering on.
func routerConfig(dir, ingress, admin, engine string) []byte {
	return fmt.Appendf(nil, `apiVersion: hearth.dev/v1alpha1
kind: RouterConfig
name: bench
listen: {ingress: %q, admin: %q, socket: ""}
pools:
  - name: bench
    endpoints: [{url: %q, engine: vllm, servedModels: [served]}]
models:
  - name: %s
    targets: [{pool: bench, servedModel: served, weight: 1}]
metering: {file: %q}
`, ingress, admin, "http://"+engine, benchModel, filepath.Join(dir, "usage", "usage.jsonl"))
}

// agentConfig is an agent whose only source is the bench's origin.
func agentConfig(dir, socket, mirror, report, admin, origin string) []byte {
	return fmt.Appendf(nil, `apiVersion: hearth.dev/v1alpha1
kind: AgentConfig
listen: {mirror: %q, report: %q, admin: %q, socket: %q}
weights: {dir: %q}
health: {stateDir: %q}
sources:
  - {name: origin, type: hub, url: %q, refs: ["bench/*"]}
`, mirror, report, admin, socket, filepath.Join(dir, "weights"), filepath.Join(dir, "health"), origin)
}
