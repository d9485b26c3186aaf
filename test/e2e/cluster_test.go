// Package e2e runs Hearth on a real Kubernetes: the manifests as they are in a
// lab of two nodes (test/kubelab), examples as people apply them, and then what
// happens to clusters: kills, restarts, cuts, updates. Only the GPUs and the
// engines are simulated. Tests share one lab and run in turn; each leaves it as
// it found it, which it checks. TestCore... is what every change runs (make
// e2e-core), TestFull... the rest (make e2e-full).
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

const (
	labName   = "e2e"
	system    = "hearth-system"
	workloads = "llm" // the namespace of the examples
	root      = "../.."
)

// limit bounds each wait for something that a cluster does by itself. It is
// generous: what it bounds is a hang, not a speed.
const limit = 4 * time.Minute

// cluster is the lab with Hearth on it.
type cluster struct{ *lab.Lab }

var c cluster

// envLab names a lab that is up with Hearth on it, for a person who runs single
// tests again and again: it is neither made nor taken down.
const envLab = "HEARTH_E2E_LAB"

func TestMain(m *testing.M) {
	flag.Parse()
	ctx, cancel := context.WithCancel(context.Background())
	code := 1
	if name := os.Getenv(envLab); name != "" {
		os.Exit(onLab(m, name))
	}
	if err := bringUp(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
	} else {
		code = m.Run()
	}
	if err := lab.Down(ctx, labName); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	cancel()
	os.Exit(code)
}

// onLab runs the tests on a lab that is up.
func onLab(m *testing.M, name string) int {
	l, err := lab.Open(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	c = cluster{l}
	return m.Run()
}

// bringUp makes a lab of two nodes with Hearth's image in them and applies the
// lab's overlay, as the README says. The programs and the image are built by
// make before.
func bringUp(ctx context.Context) error {
	l, err := lab.Up(ctx, lab.Options{
		Name: labName, Nodes: 2, Replace: true, Images: []string{filepath.Join(root, "bin/images/lab/hearth.tar")}, Log: os.Stderr,
		Forwards: []lab.Forward{{Name: "router", Namespace: system, Service: "hearth-router", Port: "http"}},
	})
	if err != nil {
		return err
	}
	c = cluster{l}
	if err := c.install(ctx); err != nil {
		c.dump()
		return err
	}
	return nil
}

func (c cluster) install(ctx context.Context) error {
	secrets, err := exec.CommandContext(ctx, filepath.Join(root, "bin/hearth"), "certs").Output()
	if err != nil {
		return fmt.Errorf("make certificates: %w", err)
	}
	for _, step := range []struct {
		input []byte
		args  []string
	}{
		{nil, []string{"apply", "-f", filepath.Join(root, "deployments/manifests/namespace.yaml")}},
		{secrets, []string{"apply", "-f", "-"}},
		{nil, []string{"apply", "-k", filepath.Join(root, "deployments/overlays/lab")}},
		{nil, []string{"apply", "-f", filepath.Join(root, "deployments/examples/namespace.yaml")}},
		{nil, []string{"-n", system, "rollout", "status", "deployment/hub-sim", "--timeout=4m"}},
		{nil, []string{"-n", system, "rollout", "status", "daemonset/hearth-agent", "--timeout=4m"}},
		{nil, []string{"-n", system, "rollout", "status", "deployment/hearth-router", "--timeout=4m"}},
	} {
		if _, err := c.try(ctx, step.input, step.args...); err != nil {
			return err
		}
	}
	return nil
}

// begin is what each test starts with: at its end nothing may be left of it.
func (c cluster) begin(t *testing.T) {
	t.Helper()
	began := time.Now()
	t.Cleanup(func() {
		failed := t.Failed()
		c.settled(t)
		if t.Failed() && !failed {
			c.dump()
		}
		t.Logf("took %s", time.Since(began).Round(100*time.Millisecond))
	})
}

// dump tells how the cluster was when something failed.
func (c cluster) dump() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "resourceclaims", "-A"},
		{"get", "resourceslices"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp", "--field-selector=reason!=Pulled,reason!=Created,reason!=Scheduled"},
		{"-n", workloads, "describe", "pods"},
		{"-n", system, "logs", "-l", "app.kubernetes.io/name=hearth-agent", "--all-containers", "--prefix", "--tail=60"},
		{"-n", system, "logs", "-l", "app.kubernetes.io/name=hearth-agent", "--all-containers", "--prefix", "--tail=20", "--previous", "--ignore-errors"},
		{"-n", system, "logs", "-l", "app.kubernetes.io/name=hearth-router", "--prefix", "--tail=40"},
	} {
		out, _ := c.Kubectl(ctx, args...).CombinedOutput()
		fmt.Fprintf(os.Stderr, "--- kubectl %s\n", strings.Join(args, " "))
		for line := range strings.Lines(string(out)) {
			if !strings.Contains(line, "effective configuration") && !strings.Contains(line, `"router starts"`) {
				fmt.Fprint(os.Stderr, line)
			}
		}
	}
	for _, node := range c.Nodes() {
		for _, args := range [][]string{{"status"}, {"claims"}, {"models", "list"}} {
			out, err := c.hearth(ctx, node, args...)
			fmt.Fprintf(os.Stderr, "--- hearth %s on %s: %v\n%s\n", strings.Join(args, " "), node.Name(), err, out)
		}
		fmt.Fprintln(os.Stderr, "---", lab.Tail(c.Log(node.Name(), "kubelet"), 20))
	}
}

// try runs kubectl; its error output is in the error.
func (c cluster) try(ctx context.Context, input []byte, args ...string) (string, error) {
	cmd := c.Kubectl(ctx, args...)
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(said.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// kubectl is try, and its failure the test's.
func (c cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.try(t.Context(), nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// apply makes the objects of a manifest and takes them away when the test ends,
// which must leave nothing on any node.
func (c cluster) apply(t *testing.T, manifest string) {
	t.Helper()
	if out, err := c.try(t.Context(), []byte(manifest), "apply", "-f", "-"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		if t.Failed() {
			c.dump() // before what there is to see is gone
		}
		c.remove(t, manifest)
	})
}

func (c cluster) remove(t *testing.T, manifest string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if _, err := c.try(ctx, []byte(manifest), "delete", "--ignore-not-found", "--cascade=foreground", "-f", "-"); err != nil {
		t.Error(err)
	}
}

// example reads one of the examples that people apply.
func example(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "deployments/examples", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// get reads objects as JSON into v.
func (c cluster) get(ctx context.Context, v any, args ...string) error {
	out, err := c.try(ctx, nil, append([]string{"get", "-o", "json"}, args...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), v)
}

// eventually tries until there is no error, and fails with the last one.
func eventually(t *testing.T, what string, try func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, last)
		}
	}
}

// hearth runs the command line against a node's agent, as a person on the node would.
func (c cluster) hearth(ctx context.Context, node *lab.Node, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "bin/hearth"), args...)
	cmd.Env = append(os.Environ(), "HEARTH_RUNTIME_DIR="+filepath.Join(node.Root(), "run/hearth"))
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("hearth %s on %s: %w: %s", strings.Join(args, " "), node.Name(), err, strings.TrimSpace(said.String()))
	}
	return string(out), nil
}

// errAgain says that the answer is not there yet.
var errAgain = errors.New("not yet")

// ask sends a chat request through the router.
func (c cluster) ask(ctx context.Context, model string) (int, error) {
	body := fmt.Sprintf(`{"model":%q,"max_tokens":4,"messages":[{"role":"user","content":"hello"}]}`, model)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.Address("router")+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return response.StatusCode, fmt.Errorf("read the answer: %w", err)
	}
	if response.StatusCode == http.StatusOK && (len(answer.Choices) == 0 || answer.Choices[0].Message.Content == "") {
		return response.StatusCode, fmt.Errorf("the answer has no content")
	}
	return response.StatusCode, nil
}

// answered waits until the router answers for a model.
func (c cluster) answered(t *testing.T, model string) {
	t.Helper()
	eventually(t, "an answer of "+model, func(ctx context.Context) error {
		status, err := c.ask(ctx, model)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%w: the router answers %d", errAgain, status)
		}
		return err
	})
}
