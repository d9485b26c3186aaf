package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// pod is what tests read of a pod.
type pod struct {
	Metadata struct {
		Name, Namespace, UID string
		DeletionTimestamp    string
	}
	Spec struct {
		NodeName string
	}
	Status struct {
		Phase      string
		Conditions []struct{ Type, Status, Message string }
		// ResourceClaimStatuses tell the claims made for the pod.
		ResourceClaimStatuses []struct{ Name, ResourceClaimName string }
	}
}

func (p pod) ready() bool {
	return p.Metadata.DeletionTimestamp == "" && slices.ContainsFunc(p.Status.Conditions, func(c struct{ Type, Status, Message string }) bool {
		return c.Type == "Ready" && c.Status == "True"
	})
}

// pods lists the pods of an app, by name.
func (c cluster) pods(ctx context.Context, namespace, selector string) ([]pod, error) {
	var list struct{ Items []pod }
	if err := c.get(ctx, &list, "pods", "-n", namespace, "-l", selector); err != nil {
		return nil, err
	}
	return list.Items, nil
}

// ready waits until an app has so many ready pods and no other.
func (c cluster) ready(t *testing.T, app string, count int) []pod {
	t.Helper()
	var list []pod
	eventually(t, fmt.Sprintf("%d ready pods of %s", count, app), func(ctx context.Context) error {
		var err error
		if list, err = c.pods(ctx, workloads, "app="+app); err != nil {
			return err
		}
		if len(list) != count {
			return fmt.Errorf("%w: there are %d", errAgain, len(list))
		}
		for _, p := range list {
			if !p.ready() {
				return fmt.Errorf("%w: %s is %s: %+v", errAgain, p.Metadata.Name, p.Status.Phase, p.Status.Conditions)
			}
		}
		return nil
	})
	return list
}

// agentPod is the agent's pod of a node.
func (c cluster) agentPod(t *testing.T, node string) pod {
	t.Helper()
	var found pod
	eventually(t, "an agent on "+node, func(ctx context.Context) error {
		list, err := c.pods(ctx, system, "app.kubernetes.io/name=hearth-agent")
		if err != nil {
			return err
		}
		for _, p := range list {
			if p.Spec.NodeName == node && p.ready() {
				found = p
				return nil
			}
		}
		return fmt.Errorf("%w: no ready pod", errAgain)
	})
	return found
}

// node gives a node by name.
func (c cluster) node(t *testing.T, name string) *lab.Node {
	t.Helper()
	n, err := c.NodeNamed(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// processes finds the processes of a pod whose command line has all the words,
// by this system's pids; there must be some.
func (c cluster) processes(t *testing.T, p pod, words ...string) []int {
	t.Helper()
	found := processesNow(t, p, words...)
	if len(found) == 0 {
		t.Fatalf("pod %s has no process with %q", p.Metadata.Name, words)
	}
	return found
}

// processesNow is processes of a pod that may have none.
func processesNow(t *testing.T, p pod, words ...string) []int {
	t.Helper()
	group := "pod" + p.Metadata.UID
	var found []int
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		groups, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if err != nil || !strings.Contains(string(groups), group) {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil {
			continue
		}
		args := strings.Split(string(line), "\x00")
		if !slices.ContainsFunc(words, func(word string) bool { return !slices.Contains(args, word) }) {
			found = append(found, pid)
		}
	}
	return found
}

// signal sends a signal to the process of one role of a node's agent and gives its pid.
func (c cluster) signal(t *testing.T, node, role string, s syscall.Signal) int {
	t.Helper()
	pids := c.processes(t, c.agentPod(t, node), "--role", role)
	if len(pids) != 1 {
		t.Fatalf("the role %s of %s has %d processes", role, node, len(pids))
	}
	if err := syscall.Kill(pids[0], s); err != nil {
		t.Fatal(err)
	}
	return pids[0]
}

// roleBack waits until a role has another process and its pod is ready.
func (c cluster) roleBack(t *testing.T, node, role string, before int) {
	t.Helper()
	eventually(t, "the role "+role+" of "+node+" to be back", func(context.Context) error {
		pids := processesNow(t, c.agentPod(t, node), "--role", role)
		if len(pids) != 1 || pids[0] == before {
			return fmt.Errorf("%w: pids %v", errAgain, pids)
		}
		return nil
	})
}

// claim is what `hearth claims --json` tells.
type claim struct {
	Namespace, Name, UID, State string
	Pods                        []string
	Devices                     []struct{ Request, Kind, Pool, Device, ShareID, UUID string }
	Artifacts                   []struct{ Ref, Digest string }
	KV                          *struct {
		Memory, NVMe int64
		Dir          string
	}
}

func (cl claim) device(kind string) (name, share string) {
	for _, d := range cl.Devices {
		if d.Kind == kind {
			return d.Device, d.ShareID
		}
	}
	return "", ""
}

func (c cluster) claims(ctx context.Context, node *lab.Node) ([]claim, error) {
	out, err := c.hearth(ctx, node, "claims", "--json")
	if err != nil {
		return nil, err
	}
	var list struct{ Claims []claim }
	return list.Claims, json.Unmarshal([]byte(out), &list)
}

// model is what `hearth models list --json` tells.
type model struct {
	Ref, Digest, State string
	Leases             int
}

func (c cluster) models(ctx context.Context, node *lab.Node) ([]model, error) {
	out, err := c.hearth(ctx, node, "models", "list", "--json")
	if err != nil {
		return nil, err
	}
	var list struct{ Models []model }
	return list.Models, json.Unmarshal([]byte(out), &list)
}

// prepared waits for the claim of a pod on its node.
func (c cluster) prepared(t *testing.T, p pod) claim {
	t.Helper()
	var found claim
	eventually(t, "the claim of "+p.Metadata.Name, func(ctx context.Context) error {
		list, err := c.claims(ctx, c.node(t, p.Spec.NodeName))
		if err != nil {
			return err
		}
		for _, cl := range list {
			if slices.Contains(cl.Pods, p.Metadata.Name) && cl.State == "prepared" {
				found = cl
				return nil
			}
		}
		return fmt.Errorf("%w: %+v", errAgain, list)
	})
	return found
}

// specs are the CDI files of claims on a node.
func specs(t *testing.T, node *lab.Node) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(node.Root(), "var/run/cdi", "hearth.dev-*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// held is what a node has of claims.
type held struct {
	Claims, Specs, KV []string // names of claims, CDI files, KV directories
	Leases            int
}

func (c cluster) held(ctx context.Context, t *testing.T, node *lab.Node) (held, error) {
	t.Helper()
	claims, err := c.claims(ctx, node)
	if err != nil {
		return held{}, err
	}
	h := held{Specs: specs(t, node)}
	for _, cl := range claims {
		h.Claims = append(h.Claims, cl.Name+" ("+cl.State+")")
	}
	if h.KV, err = filepath.Glob(filepath.Join(node.Root(), "var/lib/hearth/kv/claims", "*")); err != nil {
		return held{}, err
	}
	models, err := c.models(ctx, node)
	for _, m := range models {
		h.Leases += m.Leases
	}
	return h, err
}

// settled waits until no node has anything of a claim, and what the nodes
// publish is what they have.
func (c cluster) settled(t *testing.T) {
	t.Helper()
	for _, node := range c.Nodes() {
		eventually(t, "nothing of a claim on "+node.Name(), func(ctx context.Context) error {
			h, err := c.held(ctx, t, node)
			if err == nil && len(h.Claims)+len(h.Specs)+len(h.KV)+h.Leases != 0 {
				err = fmt.Errorf("%w: %+v", errAgain, h)
			}
			return err
		})
	}
	c.slicesAgree(t)
}

// slicesAgree waits until each node's slices are those of one generation, whole,
// and its weights devices are the models that are Ready there.
func (c cluster) slicesAgree(t *testing.T) {
	t.Helper()
	eventually(t, "slices that agree with the nodes", func(ctx context.Context) error {
		pools, err := c.pools(ctx)
		if err != nil {
			return err
		}
		for _, node := range c.Nodes() {
			ready := map[string]bool{}
			models, err := c.models(ctx, node)
			if err != nil {
				return err
			}
			for _, m := range models {
				if m.State == "Ready" {
					ready[strings.TrimPrefix(m.Digest, "sha256:")] = true
				}
			}
			published := map[string]bool{}
			for _, d := range pools[node.Name()+"/weights"] {
				if d.text("tier") != "cold" {
					published[d.text("digest")] = true
				}
			}
			if fmt.Sprint(ready) != fmt.Sprint(published) {
				return fmt.Errorf("%w: %s has %v and publishes %v", errAgain, node.Name(), ready, published)
			}
		}
		return nil
	})
}

// device is one published device.
type device struct {
	Name       string
	Attributes map[string]map[string]any
	Taints     []struct{ Key, Effect string }
}

// text gives a string attribute of ours.
func (d device) text(name string) string {
	for _, full := range []string{name, "hearth.dev/" + name} {
		if s, ok := d.Attributes[full]["string"].(string); ok {
			return s
		}
	}
	return ""
}

// pools gives the devices that are published by this driver, by slice pool. A
// pool that is not whole is an error.
func (c cluster) pools(ctx context.Context) (map[string][]device, error) {
	var list struct {
		Items []struct {
			Spec struct {
				Driver, NodeName string
				Pool             struct {
					Name               string
					Generation         int64
					ResourceSliceCount int
				}
				Devices []device
			}
		}
	}
	if err := c.get(ctx, &list, "resourceslices"); err != nil {
		return nil, err
	}
	pools, slicesOf, generation := map[string][]device{}, map[string]int{}, map[string]int64{}
	for _, s := range list.Items {
		if s.Spec.Driver != "hearth.dev" {
			continue
		}
		name := s.Spec.Pool.Name
		if g, known := generation[name]; known && g != s.Spec.Pool.Generation {
			return nil, fmt.Errorf("%w: the pool %s has two generations", errAgain, name)
		}
		generation[name] = s.Spec.Pool.Generation
		slicesOf[name]++
		pools[name] = append(pools[name], s.Spec.Devices...)
	}
	for _, s := range list.Items {
		if s.Spec.Driver == "hearth.dev" && slicesOf[s.Spec.Pool.Name] != s.Spec.Pool.ResourceSliceCount {
			return nil, fmt.Errorf("%w: the pool %s is not whole", errAgain, s.Spec.Pool.Name)
		}
	}
	return pools, nil
}

// warm waits until exactly these nodes publish a model's weights.
func (c cluster) warm(t *testing.T, repo string, nodes ...string) {
	t.Helper()
	eventually(t, repo+" on "+strings.Join(nodes, ", "), func(ctx context.Context) error {
		pools, err := c.pools(ctx)
		if err != nil {
			return err
		}
		var have []string
		for pool, devices := range pools {
			if slices.ContainsFunc(devices, func(d device) bool { return d.text("repo") == repo }) {
				have = append(have, strings.TrimSuffix(pool, "/weights"))
			}
		}
		slices.Sort(have)
		if !slices.Equal(have, nodes) {
			return fmt.Errorf("%w: it is on %v", errAgain, have)
		}
		return nil
	})
}

// only makes a model Ready on one node and nowhere else.
func (c cluster) only(t *testing.T, repo string, node *lab.Node) {
	t.Helper()
	for _, n := range c.Nodes() {
		if n.Name() != node.Name() {
			c.drop(t, repo, n)
			continue
		}
		if out, err := c.hearth(t.Context(), n, "models", "pull", "hub://"+repo+"@main"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	c.warm(t, repo, node.Name())
}

// drop takes a model off a node, if it is there.
func (c cluster) drop(t *testing.T, repo string, n *lab.Node) {
	t.Helper()
	ref := "hub://" + repo + "@main"
	models, err := c.models(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(models, func(m model) bool { return m.Ref == ref }) {
		return
	}
	if _, err := c.hearth(t.Context(), n, "models", "rm", ref); err != nil {
		t.Fatal(err)
	}
}

// events gives the texts of a namespace's events on an object.
func (c cluster) events(ctx context.Context, namespace, kind, name string) ([]string, error) {
	var list struct {
		Items []struct{ Reason, Message string }
	}
	if err := c.get(ctx, &list, "events", "-n", namespace, "--field-selector", "involvedObject.kind="+kind+",involvedObject.name="+name); err != nil {
		return nil, err
	}
	var texts []string
	for _, e := range list.Items {
		texts = append(texts, e.Reason+": "+e.Message)
	}
	return texts, nil
}

// told waits for an event on a pod whose text has all the words.
func (c cluster) told(t *testing.T, p pod, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("an event on %s with %q", p.Metadata.Name, words), func(ctx context.Context) error {
		texts, err := c.events(ctx, p.Metadata.Namespace, "Pod", p.Metadata.Name)
		if err != nil {
			return err
		}
		for _, text := range texts {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
				return nil
			}
		}
		return fmt.Errorf("%w: %q", errAgain, texts)
	})
}
