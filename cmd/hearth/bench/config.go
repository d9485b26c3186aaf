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

// controlConfig is an agent on Kubernetes in two roles, all of whose folders are
// in dir; the file kubeconfig in it says where the API server is.
func controlConfig(dir string) []byte {
	in := func(name string) string { return filepath.Join(dir, name) }
	return fmt.Appendf(nil, `apiVersion: hearth.dev/v1alpha1
kind: AgentConfig
listen: {mirror: "", report: "127.0.0.1:0", admin: "127.0.0.1:0", dataAdmin: "127.0.0.1:0", socket: %q, dataSocket: %q}
weights: {dir: %q, keepFree: 1MiB}
kv: {dir: %q, memory: 64GiB}
health: {stateDir: %q}
inventory: {sim: %q}
kubernetes:
  enabled: true
  kubeconfig: %q
  devices: [gpus, weights, kv]
  cdiDir: %q
  pluginsDir: %q
  registrarDir: %q
  claimsDir: %q
  podResources: %q
  kubeletDir: /proc
  runtimeDir: /proc
`, in("agent.sock"), in("data.sock"), in("weights"), in("kv"), in("health"), in("gpus.yaml"), in("kubeconfig"),
		in("cdi"), in("plugins"), in("registry"), in("claims"), in("none.sock"))
}

// kubeconfig leads to an API server without certificates.
func kubeconfig(server string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: bench, cluster: {server: %q}}]
contexts: [{name: bench, context: {cluster: bench}}]
current-context: bench
`, server)
}
