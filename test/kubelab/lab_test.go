package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// daemonSet has a pod on each node, with the directories that a node agent
// mounts from its node.
const daemonSet = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: probe}
spec:
  selector: {matchLabels: {app: probe}}
  template:
    metadata: {labels: {app: probe}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: probe
        image: hearth.dev/probe:test
        imagePullPolicy: IfNotPresent
        args: [serve]
        env:
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: DIRS, value: /plugins /run/hearth /var/lib/hearth /var/run/cdi /etc/cdi}
        ports: [{name: http, containerPort: 8080}]
        readinessProbe: {httpGet: {path: /node, port: http}, periodSeconds: 1}
        securityContext: {seccompProfile: {type: RuntimeDefault}}
        volumeMounts:
        - {name: plugins, mountPath: /plugins}
        - {name: run, mountPath: /run/hearth}
        - {name: data, mountPath: /var/lib/hearth}
        - {name: var-run-cdi, mountPath: /var/run/cdi}
        - {name: etc-cdi, mountPath: /etc/cdi}
      volumes:
      - {name: plugins, hostPath: {path: /var/lib/kubelet/plugins, type: Directory}}
      - {name: run, hostPath: {path: /run/hearth, type: DirectoryOrCreate}}
      - {name: data, hostPath: {path: /var/lib/hearth, type: DirectoryOrCreate}}
      - {name: var-run-cdi, hostPath: {path: /var/run/cdi, type: DirectoryOrCreate}}
      - {name: etc-cdi, hostPath: {path: /etc/cdi, type: DirectoryOrCreate}}
---
apiVersion: v1
kind: Service
metadata: {name: probe}
spec:
  selector: {app: probe}
  ports: [{name: http, port: 80, targetPort: http}]
---
apiVersion: v1
kind: Service
metadata: {name: probe-headless}
spec:
  clusterIP: None
  selector: {app: probe}
  ports: [{name: http, port: 8080}]
`

// bench is a lab under test, with what tests ask of it.
type bench struct {
	*lab.Lab
	t *testing.T
}

// kubectl runs the lab's kubectl with input and gives its output without the
// space around it.
func (b bench) kubectl(input string, args ...string) string {
	b.t.Helper()
	output, err := b.tryKubectl(input, args...)
	if err != nil {
		b.t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, output)
	}
	return output
}

func (b bench) tryKubectl(input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 3*time.Minute)
	defer cancel()
	cmd := b.Kubectl(ctx, args...)
	cmd.Stdin = strings.NewReader(input)
	output, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(output)), err
}

// pod names the ready probe on a node.
func (b bench) pod(node *lab.Node) string {
	b.t.Helper()
	var found string
	b.eventually("a ready pod on "+node.Name(), func() error {
		output, err := b.tryKubectl("", "get", "pods", "--selector=app=probe", "--field-selector=spec.nodeName="+node.Name(),
			"--output=jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].ready} {.metadata.deletionTimestamp}{\"\\n\"}{end}")
		if err != nil {
			return fmt.Errorf("%w: %s", err, output)
		}
		for line := range strings.Lines(output) {
			if fields := strings.Fields(line); len(fields) == 2 && fields[1] == "true" {
				found = fields[0]
				return nil
			}
		}
		return fmt.Errorf("there is none in %q", output)
	})
	return found
}

// from fetches an address from inside a probe.
func (b bench) from(pod, url string, ca ...string) string {
	b.t.Helper()
	return b.kubectl("", append([]string{"exec", pod, "--", "probe", "get", url}, ca...)...)
}

// eventually tries until there is no error.
func (b bench) eventually(what string, try func() error) {
	b.t.Helper()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			b.t.Fatalf("%s: %v", what, err)
		}
	}
}

// buildProbe builds kubelab and an image of the probe.
func buildProbe(t *testing.T) (program, image string) {
	t.Helper()
	dir := t.TempDir()
	for output, pkg := range map[string]string{"kubelab": ".", "probe": "./probe"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", filepath.Join(dir, output), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v: %s", err, output)
		}
	}
	image = filepath.Join(dir, "probe.tar")
	if output, err := exec.CommandContext(t.Context(), "../../scripts/image", "hearth.dev/probe:test", image, filepath.Join(dir, "probe")).CombinedOutput(); err != nil {
		t.Fatalf("pack image: %v: %s", err, output)
	}
	return filepath.Join(dir, "kubelab"), image
}

func TestALabOfTwoNodesIsACluster(t *testing.T) {
	before := traces(t)
	program, image := buildProbe(t)
	const name = "check"
	l, err := lab.Up(t.Context(), lab.Options{
		Name: name, Nodes: 2, Replace: true, Program: program, Images: []string{image}, Log: logWriter{t},
		Forwards: []lab.Forward{{Name: "probe", Namespace: "default", Service: "probe", Port: "http"}},
	})
	t.Cleanup(func() {
		if err := lab.Down(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
		before.compare(t)
	})
	if err != nil {
		t.Fatal(err)
	}
	b := bench{l, t}
	b.kubectl(daemonSet, "apply", "--filename=-")
	pods := []string{b.pod(l.Node(0)), b.pod(l.Node(1))}

	t.Run("its version is that of the modules", func(t *testing.T) {
		got := bench{l, t}.kubectl("", "get", "nodes", "--output=jsonpath={.items[*].status.nodeInfo.kubeletVersion}")
		if got != "v1.37.2 v1.37.2" {
			t.Errorf("kubelets are %q", got)
		}
	})
	t.Run("each node has its own of every directory that pods mount", func(t *testing.T) {
		for _, n := range l.Nodes() {
			for _, dir := range []string{"/var/lib/kubelet/plugins", "/run/hearth", "/var/lib/hearth", "/var/run/cdi", "/etc/cdi"} {
				text, err := os.ReadFile(n.Root() + dir + "/node")
				if err != nil || string(text) != n.Name() {
					t.Errorf("%s on %s holds %q, %v", dir, n.Name(), text, err)
				}
			}
		}
	})
	t.Run("pods reach each other, services by name, and the API server", func(t *testing.T) {
		b := bench{l, t}
		address := b.kubectl("", "get", "pod", pods[1], "--output=jsonpath={.status.podIP}")
		if got := b.from(pods[0], "http://"+address+":8080/node"); got != "node-1" {
			t.Errorf("the pod of node-1 answers %q", got)
		}
		b.eventually("a service by name", func() error {
			output, err := b.tryKubectl("", "exec", pods[0], "--", "probe", "get", "http://probe.default.svc.cluster.local/node")
			if err != nil || !strings.HasPrefix(output, "node-") {
				return fmt.Errorf("%w: %s", err, output)
			}
			return nil
		})
		if got := b.from(pods[0], "http://probe-headless:8080/node"); !strings.HasPrefix(got, "node-") {
			t.Errorf("the headless service answers %q", got)
		}
		const ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
		if got := b.from(pods[1], "https://kubernetes.default.svc/version", ca); !strings.Contains(got, "v1.37.2") {
			t.Errorf("the API server answers %q", got)
		}
	})
	t.Run("a service answers on this system's loopback", func(t *testing.T) {
		seen := map[string]bool{}
		for range 4 {
			seen[fetch(t, "http://"+l.Address("probe")+"/node")] = true
		}
		if !seen["node-0"] || !seen["node-1"] {
			t.Errorf("answers came from %v", seen)
		}
	})
	t.Run("logs are read through the API server", func(t *testing.T) {
		if got := (bench{l, t}).kubectl("", "logs", pods[1]); got != "serving on node-1" {
			t.Errorf("the log is %q", got)
		}
	})
	t.Run("a boot is a node's own and a reboot a new one", func(t *testing.T) { reboot(t, l, pods) })
	t.Run("a kubelet stops and starts under its pods", func(t *testing.T) {
		b, n := bench{l, t}, l.Node(0)
		if err := n.Stop(t.Context(), "kubelet"); err != nil {
			t.Fatal(err)
		}
		if got := fetch(t, "http://"+l.Address("probe")+"/node"); got == "" {
			t.Error("no pod answers")
		}
		if _, err := b.tryKubectl("", "logs", pods[0]); err == nil {
			t.Error("a stopped kubelet gives logs")
		}
		if err := n.Start(t.Context(), "kubelet"); err != nil {
			t.Fatal(err)
		}
		b.eventually("logs of the kubelet that is back", func() error {
			_, err := b.tryKubectl("", "logs", pods[0])
			return err
		})
	})
	t.Run("the API server comes back with other gates", func(t *testing.T) { gates(t, l) })
}

func reboot(t *testing.T, l *lab.Lab, pods []string) {
	b, n := bench{l, t}, l.Node(1)
	ids := []string{b.from(pods[0], "http://127.0.0.1:8080/boot"), b.from(pods[1], "http://127.0.0.1:8080/boot")}
	if ids[0] != l.Node(0).BootID() || ids[1] != n.BootID() || ids[0] == ids[1] {
		t.Errorf("pods read the boots %q", ids)
	}
	if err := os.WriteFile(n.Root()+"/var/lib/hearth/kept", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.Root()+"/run/hearth/lost", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n.BootID() == ids[1] {
		t.Error("the boot id stayed")
	}
	b.eventually("a pod of the new boot", func() error {
		output, err := b.tryKubectl("", "exec", b.pod(n), "--", "probe", "get", "http://127.0.0.1:8080/boot")
		if err != nil || output != n.BootID() {
			return fmt.Errorf("the pod reads %q, %w", output, err)
		}
		return nil
	})
	if _, err := os.Stat(n.Root() + "/var/lib/hearth/kept"); err != nil {
		t.Errorf("the drive: %v", err)
	}
	if _, err := os.Stat(n.Root() + "/run/hearth/lost"); err == nil {
		t.Error("/run outlived the boot")
	}
}

// slice has a field that an API server without consumable capacity drops.
const slice = `
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: probe}
spec:
  driver: probe.hearth.dev
  nodeName: node-0
  pool: {name: node-0, generation: 1, resourceSliceCount: 1}
  devices: [{name: shared, allowMultipleAllocations: true}]
`

func gates(t *testing.T, l *lab.Lab) {
	b := bench{l, t}
	kept := func() string {
		b.t.Helper()
		b.kubectl("", "delete", "resourceslice", "probe", "--ignore-not-found")
		b.kubectl(slice, "apply", "--filename=-")
		return b.kubectl("", "get", "resourceslice", "probe", "--output=jsonpath={.spec.devices[0].allowMultipleAllocations}")
	}
	if got := kept(); got != "true" {
		t.Errorf("with the gate the field is %q", got)
	}
	if err := l.Stop(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	if output, err := b.tryKubectl("", "get", "nodes"); err == nil {
		t.Errorf("a stopped API server answers %q", output)
	}
	if err := l.Start(t.Context(), "kube-apiserver", "--feature-gates=DRAConsumableCapacity=false"); err != nil {
		t.Fatal(err)
	}
	if err := l.WaitAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := kept(); got != "" {
		t.Errorf("without the gate the field is %q", got)
	}
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// logWriter gives progress to the test's log.
type logWriter struct{ t *testing.T }

// Write logs lines.
func (w logWriter) Write(text []byte) (int, error) {
	for line := range bytes.Lines(text) {
		w.t.Logf("%s", bytes.TrimSpace(line))
	}
	return len(text), nil
}
