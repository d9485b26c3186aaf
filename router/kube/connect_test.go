package kube

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/router/pool"
)

// apiServer answers lists and watches of pods as a real one does, streaming
// lists included, until it is closed.
type apiServer struct{ pods []*corev1.Pod }

func (a apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/api/v1/namespaces/llm/pods" || r.URL.Query().Get("labelSelector") != "app=m" {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") == "" {
		list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "5"}}
		for _, p := range a.pods {
			list.Items = append(list.Items, *p)
		}
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	event := func(kind string, p *corev1.Pod) {
		p.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": p})
	}
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		for _, p := range a.pods {
			event("ADDED", p)
		}
		event("BOOKMARK", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "5", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	}
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

func serveAPI(t *testing.T, address string, a apiServer) (string, func()) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: a, ReadHeaderTimeout: time.Minute}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(listener) }()
	stop := func() { _ = s.Close(); <-done }
	t.Cleanup(stop)
	return listener.Addr().String(), stop
}

func TestARealConnectionTellsThatTheServerIsAwayAndKeepsThePods(t *testing.T) {
	t.Parallel()
	pod := enginePod("a", "10.0.0.1")
	address, stop := serveAPI(t, "127.0.0.1:0", apiServer{[]*corev1.Pod{pod}})
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://%s'}}]\nusers: [{name: u}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u, namespace: llm}}]\ncurrent-context: c\n", address)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	connection, err := Connect(file)
	if err != nil {
		t.Fatal(err)
	}
	if connection.Namespace != "llm" {
		t.Errorf("namespace %q", connection.Namespace)
	}
	o := newTold()
	c := followWith(t, Options{Client: connection.Client, Namespace: connection.Namespace, Failing: connection.Failing, SetPods: o.setPods, SetNodes: o.setNodes},
		[]pool.PoolConfig{poolOf("m", "app=m")})
	o.untilPods(t, "m", "a")
	if texts := c.Problems(); len(texts) > 0 {
		t.Errorf("problems %q", texts)
	}
	stop()
	eventually(t, "the problem", func() bool {
		return slices.ContainsFunc(c.Problems(), func(s string) bool { return strings.Contains(s, "the API server does not answer") })
	})
	o.untilPods(t, "m", "a")
	serveAPI(t, address, apiServer{[]*corev1.Pod{pod, enginePod("b", "10.0.0.2")}})
	eventually(t, "the end of the problem", func() bool { return len(c.Problems()) == 0 })
}

func TestAKubeconfigThatIsNotThereIsAnError(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"", filepath.Join(t.TempDir(), "none")} {
		if _, err := Connect(file); err == nil || !strings.HasPrefix(err.Error(), "connect to API server: ") {
			t.Errorf("kubeconfig %q gave %v", file, err)
		}
	}
}
