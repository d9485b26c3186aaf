package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// moved are bytes of payload.
type moved struct{ Received, Transmitted int64 }

// share is what one owner moved of one class.
type share struct {
	Pod, Unit, Class, Locality string
	moved
}

// scaleOut is what the data role tells of one pull.
type scaleOut struct {
	ID, State, Ref, Visible, Unseen string
	SizeBytes, MissingBytes         int64
	Sources                         []struct {
		Name, Kind string
		Bytes      int64
	}
	Connections, Devices moved
	Unattributed         *moved
	Shares               []share
}

// dataRole asks the data role of a node, which a person does on the node.
func dataRole(ctx context.Context, node *lab.Node, path string, v any) error {
	socket := filepath.Join(node.Root(), "run/hearth/data.sock")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://data"+path, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s of %s: status %s", path, node.Name(), response.Status)
	}
	return json.NewDecoder(response.Body).Decode(v)
}

// accounted waits until a node's condition says that every byte has an owner.
func (c cluster) accounted(t *testing.T, node *lab.Node) {
	t.Helper()
	eventually(t, "the condition of "+node.Name(), func(ctx context.Context) error {
		out, err := c.try(ctx, nil, "get", "node", node.Name(), "-o", `jsonpath={range .status.conditions[?(@.type=="hearth.dev/NetworkAccounting")]}{.status} {.reason}: {.message}{end}`)
		if err == nil && !strings.HasPrefix(out, "True Full") {
			err = fmt.Errorf("%w: %s", errAgain, out)
		}
		return err
	})
}

// peers makes a's data role serve its mirror without certificates, which those of
// `hearth certs` do not name it by, and b's pull demo/other from there. Both pull
// at 4 MiB/s, so that what goes on meanwhile is seen. The test's end undoes it.
func (c cluster) peers(t *testing.T, a, b *lab.Node) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deployments/overlays/lab/agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const token = "of-the-peers"
	sum := sha256.Sum256([]byte(token))
	base := replaced(t, string(text),
		"  mirror: \"\"\n  report: \":7411\"\n  admin: \":7412\"\n  dataAdmin: \":7416\"\ntls:\n  cert: /etc/hearth/tls/tls.crt\n  key: /etc/hearth/tls/tls.key\n  ca: /etc/hearth/tls/ca.crt\n",
		"  mirror: \"0.0.0.0:7410\"\n  report: \"\"\n  admin: \"\"\n  dataAdmin: \"\"\n  insecure: true\naccess:\n  tokens: [{name: peers, sha256: "+hex.EncodeToString(sum[:])+"}]\n",
		"weights:\n", "weights:\n  rate: 4MiB/s\n")
	config, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "e2e-peers", "namespace": system},
		"data": map[string]string{
			"token": token, a.Name() + ".yaml": base,
			b.Name() + ".yaml": replaced(t, base, "    refs: [\"demo/*\"]\n", "    refs: [\"demo/tiny\"]\n"+
				"  - name: peer\n    type: hub\n    url: http://"+a.Address()+":7410\n    tokenFile: /etc/peers/token\n    peer: true\n    refs: [\"demo/other\"]\n"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	const data = "/spec/template/spec/containers/1/"
	patch := `[
{"op": "replace", "path": "` + data + `args", "value": ["agent", "--config", "/etc/peers/$(NODE_NAME).yaml", "--node", "$(NODE_NAME)", "--role", "data"]},
{"op": "remove", "path": "` + data + `startupProbe"}, {"op": "remove", "path": "` + data + `readinessProbe"}, {"op": "remove", "path": "` + data + `livenessProbe"},
{"op": "add", "path": "` + data + `ports/-", "value": {"name": "mirror", "containerPort": 7410, "hostPort": 7410}},
{"op": "add", "path": "` + data + `volumeMounts/-", "value": {"name": "peers", "mountPath": "/etc/peers", "readOnly": true}},
{"op": "add", "path": "/spec/template/spec/volumes/-", "value": {"name": "peers", "configMap": {"name": "e2e-peers"}}}]`
	c.apply(t, string(config))
	c.kubectl(t, "-n", system, "patch", "daemonset", "hearth-agent", "--type=json", "-p", patch)
	t.Cleanup(func() {
		if t.Failed() {
			c.dump()
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		for _, args := range [][]string{{"rollout", "undo", "daemonset/hearth-agent"}, {"rollout", "status", "daemonset/hearth-agent", "--timeout=4m"}} {
			if _, err := c.try(ctx, nil, append([]string{"-n", system}, args...)...); err != nil {
				t.Error(err)
			}
		}
	})
	c.kubectl(t, "-n", system, "rollout", "status", "daemonset/hearth-agent", "--timeout=4m")
	for _, n := range []*lab.Node{a, b} {
		eventually(t, "the data role of "+n.Name(), func(ctx context.Context) error {
			_, err := c.models(ctx, n)
			return err
		})
	}
}

// replaced replaces each text of pairs, which must be there, by the next.
func replaced(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("there is no %q in\n%s", pairs[i], text)
		}
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// byItself is a pod on a node that downloads demo/tiny and asks nobody: slowly
// enough that it does so all through a test.
func byItself(node string) string {
	return `
apiVersion: v1
kind: ConfigMap
metadata: {name: by-itself, namespace: ` + workloads + `}
data:
  agent.yaml: |
    apiVersion: hearth.dev/v1alpha1
    kind: AgentConfig
    roles: [data]
    listen: {mirror: "", report: "", admin: "", dataAdmin: "", socket: "", dataSocket: /data/data.sock}
    network: {enabled: false}
    weights: {dir: /data/weights, rate: 128KiB/s}
    health: {stateDir: ""}
    kv: {dir: /data/kv}
    sources: [{name: hub, type: hub, url: "http://hub-sim.hearth-system.svc:8400", refs: ["demo/*"]}]
    models: ["hub://demo/tiny@main"]
---
apiVersion: v1
kind: Pod
metadata: {name: by-itself, namespace: ` + workloads + `, labels: {app: by-itself}}
spec:
  nodeName: ` + node + `
  automountServiceAccountToken: false
  containers:
    - name: download
      image: hearth/hearth:lab
      imagePullPolicy: Never
      args: [agent, --config, /etc/hearth/agent.yaml, --node, by-itself]
      volumeMounts: [{name: config, mountPath: /etc/hearth}, {name: data, mountPath: /data}]
  volumes:
    - {name: config, configMap: {name: by-itself}}
    - {name: data, emptyDir: {}}
`
}

// busy has a pod answer requests from other machines until the func is called.
func (c cluster) busy(t *testing.T, p pod) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, one := range []func() error{
		func() error {
			_, err := c.try(ctx, nil, "get", "--raw", "/api/v1/namespaces/"+p.Metadata.Namespace+"/pods/"+p.Metadata.Name+":8000/proxy/v1/models")
			return err
		},
		func() error { _, err := c.ask(ctx, "tiny"); return err },
	} {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := one(); err != nil && ctx.Err() == nil {
					t.Errorf("a request of %s: %v", p.Metadata.Name, err)
					return
				}
			}
		})
	}
	end = func() { cancel(); all.Wait() }
	t.Cleanup(end)
	return end
}

// pulled pulls demo/other on a node and gives the record of it.
func (c cluster) pulled(t *testing.T, node *lab.Node) scaleOut {
	t.Helper()
	const ref = "hub://demo/other@main"
	if out, err := c.hearth(t.Context(), node, "models", "pull", ref); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var found scaleOut
	eventually(t, "the record of a scale-out on "+node.Name(), func(ctx context.Context) error {
		var list struct{ ScaleOuts []scaleOut }
		if err := dataRole(ctx, node, "/v1/scaleouts", &list); err != nil {
			return err
		}
		for _, s := range list.ScaleOuts {
			if s.Ref == ref && s.State == "ready" {
				found = s
				return nil
			}
		}
		return fmt.Errorf("%w: %+v", errAgain, list.ScaleOuts)
	})
	return found
}

// within reports whether bytes are a size and at most 2 % more.
func within(bytes, size int64) bool { return bytes >= size && bytes <= size+size/50 }

// of sums what matches.
func of(shares []share, accept func(share) bool) (sum moved) {
	for _, s := range shares {
		if accept(s) {
			sum.Received += s.Received
			sum.Transmitted += s.Transmitted
		}
	}
	return sum
}

func TestFullAScaleOutsBytesHaveOwners(t *testing.T) {
	c.begin(t)
	hub, err := c.pods(t.Context(), system, "app.kubernetes.io/name=hub-sim")
	if err != nil || len(hub) != 1 {
		t.Fatalf("the origin's pods are %v, %v", hub, err)
	}
	// What comes from the origin comes over the wire, and from the peer back.
	a, b := c.Node(0), c.Node(1)
	if hub[0].Spec.NodeName == a.Name() {
		a, b = b, a
	}
	c.peers(t, a, b)
	for _, n := range c.Nodes() {
		c.accounted(t, n)
		c.drop(t, "demo/other", n)
		t.Cleanup(func() { c.dropLater(t, "demo/other", n) })
	}
	c.only(t, "demo/tiny", a)
	c.apply(t, example(t, "one-gpu-sim"))
	engine := c.ready(t, "one-gpu", 1)[0]
	if engine.Spec.NodeName != a.Name() {
		t.Fatalf("the engine is on %s", engine.Spec.NodeName)
	}
	c.answered(t, "tiny")
	c.apply(t, byItself(a.Name()))
	c.ready(t, "by-itself", 1)

	end := c.busy(t, engine)
	origin := c.pulled(t, a)
	end()
	t.Logf("from the origin: %+v", origin)
	// What the manifest was made of came before: files whose digest the origin does
	// not give.
	size := origin.MissingBytes
	if len(origin.Sources) != 1 || origin.Sources[0].Name != "hub" || origin.Sources[0].Kind != "origin" || origin.Sources[0].Bytes != size || !within(origin.SizeBytes, size) {
		t.Errorf("the weights came from %+v, want %d bytes of the origin", origin.Sources, size)
	}
	agent := system + "/" + c.agentPod(t, a.Name()).Metadata.Name
	weights := of(origin.Shares, func(s share) bool { return s.Pod == agent && s.Class == "weights" && s.Locality == "off_node" })
	if !within(origin.Connections.Received, size) || !within(weights.Received, size) {
		t.Errorf("the pull's connections received %d bytes, %s %d of class weights, want %d", origin.Connections.Received, agent, weights.Received, size)
	}
	if s := of(origin.Shares, func(s share) bool {
		return s.Pod == engine.Metadata.Namespace+"/"+engine.Metadata.Name && s.Class == "serving" && s.Locality == "off_node"
	}); s.Received == 0 || s.Transmitted == 0 {
		t.Errorf("the engine that served meanwhile moved %+v", s)
	}
	stranger := func(class string) moved {
		return of(origin.Shares, func(s share) bool { return s.Pod == workloads+"/by-itself" && s.Class == class })
	}
	if stranger("other").Received == 0 || stranger("weights").Received != 0 {
		t.Errorf("the pod that downloads by itself moved %+v of class other and %+v of class weights", stranger("other"), stranger("weights"))
	}
	if origin.Visible != "full" || origin.Unattributed == nil || origin.Devices.Received < size {
		t.Errorf("seen is %s (%s), devices counted %+v, unattributed is %+v", origin.Visible, origin.Unseen, origin.Devices, origin.Unattributed)
	}

	before := c.sent(t, a, agent)
	peer := c.pulled(t, b)
	t.Logf("from the peer: %+v", peer)
	if len(peer.Sources) != 1 || peer.Sources[0].Name != "peer" || peer.Sources[0].Kind != "peer" || peer.Sources[0].Bytes != size || !within(peer.Connections.Received, size) {
		t.Errorf("the weights came from %+v over connections of %+v, want %d bytes of the peer", peer.Sources, peer.Connections, size)
	}
	eventually(t, "the weights that "+a.Name()+" sent", func(context.Context) error {
		if sent := c.sent(t, a, agent) - before; !within(sent, size) {
			return fmt.Errorf("%w: %d bytes, want %d", errAgain, sent, size)
		}
		return nil
	})
	for _, n := range c.Nodes() {
		c.accounted(t, n)
	}
}

// sent is how many bytes of weights a pod has sent over the wire.
func (c cluster) sent(t *testing.T, node *lab.Node, pod string) int64 {
	t.Helper()
	var seen struct{ Owners []share }
	if err := dataRole(t.Context(), node, "/v1/network", &seen); err != nil {
		t.Fatal(err)
	}
	return of(seen.Owners, func(s share) bool { return s.Pod == pod && s.Class == "weights" && s.Locality == "off_node" }).Transmitted
}

// dropLater takes a model off a node when a test has ended.
func (c cluster) dropLater(t *testing.T, repo string, n *lab.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if out, err := c.hearth(ctx, n, "models", "rm", "hub://"+repo+"@main"); err != nil && !strings.Contains(err.Error(), "unknown") {
		t.Logf("%v\n%s", err, out)
	}
}

func TestFullAnAgentMayNotWriteMoreOfANodeThanConditionsOfItsOwn(t *testing.T) {
	// kubectl reads a status before it patches it, which the agent has no right to.
	c.apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: e2e-node-status}
rules: [{apiGroups: [""], resources: [nodes/status], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: e2e-node-status}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: e2e-node-status}
subjects: [{kind: ServiceAccount, name: hearth-agent, namespace: `+system+`}]
`)
	as := []string{"--as=system:serviceaccount:" + system + ":hearth-agent", "--subresource=status"}
	here := "--as-user-extra=authentication.kubernetes.io/node-name=" + c.Node(0).Name()
	patch := func(node *lab.Node, patch string, more ...string) error {
		args := append([]string{"patch", "node", node.Name(), "-p", patch}, as...)
		_, err := c.try(t.Context(), nil, append(args, more...)...)
		return err
	}
	const ours = `{"status":{"conditions":[{"type":"hearth.dev/Test","status":"False"}]}}`
	eventually(t, "a condition of its own", func(context.Context) error { return patch(c.Node(0), ours, here) })
	for name, err := range map[string]error{
		"another node":         patch(c.Node(1), ours, here),
		"a token of no node":   patch(c.Node(0), ours),
		"a condition of other": patch(c.Node(0), `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, here),
		"capacity":             patch(c.Node(0), `{"status":{"capacity":{"nvidia.com/gpu":"8"}}}`, here),
		"a label":              patch(c.Node(0), `{"metadata":{"labels":{"e2e":"x"}},"status":{"phase":""}}`, here),
	} {
		if err == nil || !strings.Contains(err.Error(), "nodes.hearth.dev") {
			t.Errorf("%s: refused with %v", name, err)
		}
	}
	if err := patch(c.Node(0), strings.Replace(ours, `"status":"False"`, `"$patch":"delete"`, 1), here); err != nil {
		t.Error(err)
	}
}
