package router

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// podOf is a Ready pod whose engine answers at a URL.
func podOf(t *testing.T, name, engineURL string) *corev1.Pod {
	t.Helper()
	u, err := url.Parse(engineURL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: name, UID: "uid-1", Labels: map[string]string{"app": "m"}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{
			{Name: "engine", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: int32(port)}}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: u.Hostname(), Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

// serveReport serves a node's report and gives the address.
func serveReport(t *testing.T, p *report.Publisher) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(report.ServerOptions()...)
	report.RegisterNodeReportServer(s, p)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(listener) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return listener.Addr().String()
}

func inCluster(t *testing.T) Config {
	t.Helper()
	cfg := config(t, "http://127.0.0.1:1")
	cfg.Kubernetes.Enabled = true
	cfg.Kubernetes.Namespace = "llm"
	cfg.Pools = []pool.PoolConfig{{Name: "p", Pods: pool.PodsConfig{Selector: "app=m", Port: "http"}}}
	return cfg
}

func TestARouterInAClusterServesPodsThatNoNodeReports(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	client := fake.NewClientset(podOf(t, "a", s.URL))
	r, _ := start(t, inCluster(t), Options{Cluster: client})
	at := r.Status().Listeners
	until(t, func() bool {
		code, _ := request(t, http.MethodGet, "http://"+at["admin"]+"/readyz", "")
		return code == 200
	})
	until(t, func() bool { return len(r.Endpoints()) == 1 })
	const chat = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`
	if code, got := request(t, http.MethodPost, "http://"+at["ingress"]+"/v1/chat/completions", chat); code != 200 {
		t.Fatalf("chat gave %d %s", code, got)
	}
	if err := client.CoreV1().Pods("llm").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return len(r.Endpoints()) == 0 })
	// It goes on to say why, and stays ready to.
	if code, got := request(t, http.MethodPost, "http://"+at["ingress"]+"/v1/chat/completions", chat); code != 503 || !strings.Contains(got, "endpoint") {
		t.Errorf("chat gave %d %s", code, got)
	}
	if code, got := request(t, http.MethodGet, "http://"+at["admin"]+"/readyz", ""); code != 200 {
		t.Errorf("readyz gave %d %s", code, got)
	}
}

func TestARouterFindsAgentsAndTheirWordsOfPods(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	p, err := report.NewPublisher(report.PublisherOptions{Node: "node-1", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	err = p.SetEndpoints([]*report.Endpoint{{Name: "pod.llm.a", Pod: "uid-1", Url: s.URL, Reachable: true, Load: &report.Load{UnixMillis: 1, Running: 5}}})
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(serveReport(t, p))
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseInt(port, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	name, node, small := "report", "node-1", int32(number)
	client := fake.NewClientset(podOf(t, "a", s.URL), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "hearth-system", Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "hearth-agents"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &small}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{host}, NodeName: &node}},
	})
	cfg := inCluster(t)
	cfg.Kubernetes.Agents = Agents{Namespace: "hearth-system", Service: "hearth-agents", Port: "report"}
	cfg.Listen.Insecure = true
	r, _ := start(t, cfg, Options{Cluster: client})
	until(t, func() bool { e := r.Endpoints(); return len(e) == 1 && e[0].ID == "pod/llm/a" && e[0].Running == 5 })
	if nodes := r.Status().Nodes; len(nodes) != 1 || nodes[0].Node != "node-1" {
		t.Errorf("nodes %+v", nodes)
	}
	// A reload of the list keeps those that were found.
	next := cfg
	next.Nodes = []feed.Node{{Address: "127.0.0.1:1", Name: "node-1"}, {Address: "127.0.0.1:2"}}
	if err := r.apply(next); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return len(r.Status().Nodes) == 2 }) // node-1 is where the list says
	if err := r.apply(cfg); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { n := r.Status().Nodes; return len(n) == 1 && n[0].Connected })
}

func TestARouterIsReadyWithoutThePoolsThatItMayNotRead(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	client := fake.NewClientset(podOf(t, "a", s.URL))
	client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetNamespace() != "team" {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("no RoleBinding"))
	})
	cfg := inCluster(t)
	cfg.Pools = append(cfg.Pools, pool.PoolConfig{Name: "theirs", Pods: pool.PodsConfig{Namespace: "team", Selector: "app=m", Port: "http"}})
	cfg.Kubernetes.Agents = Agents{Namespace: "hearth-system", Service: "hearth-agents", Port: "report"}
	cfg.Listen.Insecure = true
	r, _ := start(t, cfg, Options{Cluster: client})
	admin := "http://" + r.Status().Listeners["admin"]
	until(t, func() bool {
		code, _ := request(t, http.MethodGet, admin+"/readyz", "")
		return code == 200 && len(r.Endpoints()) == 1
	})
	if problems := r.Status().Problems; len(problems) != 1 || !strings.Contains(problems[0], "pool theirs has no endpoints") || !strings.Contains(problems[0], "no RoleBinding") {
		t.Errorf("problems %q", problems)
	}
	var text string
	until(t, func() bool {
		_, text = request(t, http.MethodGet, admin+"/metrics", "")
		return strings.Contains(text, `hearth_router_cluster_watch_listed{pool="",watch="agents"} 1`)
	})
	for _, want := range []string{
		`hearth_router_cluster_watch_listed{pool="p",watch="pods"} 1`, `hearth_router_cluster_watch_listed{pool="theirs",watch="pods"} 0`,
		`hearth_router_cluster_watch_forbidden{pool="p",watch="pods"} 0`, `hearth_router_cluster_watch_forbidden{pool="theirs",watch="pods"} 1`,
		`hearth_router_cluster_watch_stale_seconds{pool="p",watch="pods"} 0`, `hearth_router_cluster_watch_events_total{pool="p",watch="pods"} 1`,
		`hearth_router_endpoints_by_state{pool="p",state="ready"} 1`, `hearth_router_endpoints_by_state{pool="p",state="suspended"} 0`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("metrics lack %s", want)
		}
	}
}

func TestARouterWhoseAPIServerHangsSaysSoEndsAndCatchesUp(t *testing.T) {
	t.Parallel()
	api, answers := kubeapi.New(), make(chan struct{})
	pod := podOf(t, "a", "http://127.0.0.1:1")
	pod.APIVersion, pod.Kind = "v1", "Pod"
	if err := api.Put(pod); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-answers:
			api.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	hung, stop := start(t, inCluster(t), Options{Cluster: client})
	admin := "http://" + hung.Status().Listeners["admin"]
	if code, got := request(t, http.MethodGet, admin+"/readyz", ""); code != 503 {
		t.Errorf("readyz gave %d %s", code, got)
	}
	until(t, func() bool { return strings.Contains(strings.Join(hung.Status().Problems, "\n"), "no answer for") })
	if err := stop(); err != nil { // as a signal does: it waits for no answer
		t.Errorf("it ended with %v", err)
	}

	r, _ := start(t, inCluster(t), Options{Cluster: client})
	admin = "http://" + r.Status().Listeners["admin"]
	close(answers)
	until(t, func() bool {
		code, _ := request(t, http.MethodGet, admin+"/readyz", "")
		return code == 200 && len(r.Endpoints()) == 1
	})
}

func TestPodsWithoutKubernetesAreAnError(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want   string
		change func(*Config)
	}{
		{"", func(*Config) {}},
		{"pools[0].pods", func(c *Config) { c.Kubernetes.Enabled = false }},
		{"kubernetes.agents.service", func(c *Config) {
			c.Kubernetes = Kubernetes{Agents: Agents{Service: "a", Port: "report"}}
			c.Pools[0].Pods = pool.PodsConfig{}
		}},
		{"kubernetes.agents: are not on loopback", func(c *Config) { c.Kubernetes.Agents = Agents{Service: "a", Port: "report"} }},
		{"kubernetes.agents.port", func(c *Config) {
			c.Kubernetes.Agents, c.Listen.Insecure = Agents{Service: "a"}, true
		}},
		{"kubernetes.kubeconfig", func(c *Config) { c.Kubernetes.Kubeconfig = "file" }},
	} {
		cfg := inCluster(t)
		c.change(&cfg)
		err := cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
	// A reload cannot enable it.
	cfg := config(t, "http://127.0.0.1:1")
	r, _ := start(t, cfg, Options{})
	if err := r.apply(inCluster(t)); err == nil || !strings.Contains(err.Error(), "restart") {
		t.Errorf("a reload gave %v", err)
	}
}
