package nodeagent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/test/fakekubelet"
	"github.com/hearth-dev/hearth/units"
)

// registered plays a kubelet that finds the driver.
func registered(t *testing.T, c Config) *fakekubelet.Plugin {
	t.Helper()
	kubelet, err := fakekubelet.Register(t.Context(), c.Kubernetes.RegistrarDir, identity.Driver)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kubelet.Close() })
	return kubelet
}

func TestAnAgentIsNotReadyWhileTheKubeletCannotReachItAndComesBack(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	a, _ := runAgent(t, c, Options{Kubernetes: newServer(t), BootID: "boot-1"})
	ready := "http://" + a.Listeners()["admin"] + "/readyz"
	registered(t, c)
	eventually(t, "the agent is ready", func() bool { code, _ := fetch(t, ready); return code == http.StatusOK })
	if err := errors.Join(os.RemoveAll(c.Kubernetes.RegistrarDir), os.RemoveAll(c.Kubernetes.PluginsDir)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it says that the kubelet cannot reach it", func() bool {
		code, _ := fetch(t, ready)
		node := a.node()
		return code == http.StatusServiceUnavailable && !node.Kubernetes.Registered && strings.Contains(strings.Join(node.Problems, "\n"), "the kubelet cannot reach the driver")
	})
	if err := os.MkdirAll(c.Kubernetes.RegistrarDir, 0o750); err != nil {
		t.Fatal(err)
	}
	registered(t, c)
	eventually(t, "the agent is ready again", func() bool { code, _ := fetch(t, ready); return code == http.StatusOK })
	eventually(t, "the problem is gone", func() bool { return !strings.Contains(strings.Join(a.node().Problems, "\n"), "kubelet") })
}

func TestASecondAgentOfANodeEndsAndTakesNothingFromTheFirst(t *testing.T) {
	t.Parallel()
	c, other := onKubernetes(t), onKubernetes(t)
	server := newServer(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})
	a, _ := runAgent(t, c, Options{Kubernetes: server, BootID: "boot-1"})
	kubelet := registered(t, c)
	eventually(t, "the first publishes its devices", func() bool { return a.node().Kubernetes.Pools[0].State == poolPublished })
	claim := fakekubelet.Claim{Namespace: "llm", Name: "smol", UID: "uid-1"}
	published, err := server.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(published.Items) == 0 {
		t.Fatalf("published are %v, %v", published, err)
	}
	gpu := string(a.tracker.Snapshot()[0].Device.ID)
	if _, err := server.ResourceV1().ResourceClaims("llm").Create(t.Context(), newClaim(gpu), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if answer, err := kubelet.PrepareUntil(t.Context(), time.Second, claim); err != nil || len(answer.Devices) != 2 {
		t.Fatalf("prepared are %+v, %v", answer, err)
	}

	// Its stores and listeners are its own.
	other.Kubernetes.PluginsDir, other.Kubernetes.RegistrarDir, other.Kubernetes.CDIDir = c.Kubernetes.PluginsDir, c.Kubernetes.RegistrarDir, c.Kubernetes.CDIDir
	other.Kubernetes.Devices = []string{"kv"}
	second, err := New(other, Options{Kubernetes: server, BootID: "boot-1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Run(t.Context()); !errors.Is(err, dradriver.ErrServed) {
		t.Errorf("the second agent ended with %v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Kubernetes.CDIDir, "hearth.dev-claim_uid-1.json")); err != nil {
		t.Errorf("the first one's claim is gone: %v", err)
	}
	after, err := server.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(after.Items) != len(published.Items) {
		t.Errorf("published are %v, %v", after, err)
	}
	if errs, err := kubelet.Unprepare(t.Context(), claim); err != nil || errs["uid-1"] != "" {
		t.Errorf("unprepared: %v, %v", errs, err)
	}
	if !a.node().Kubernetes.Registered {
		t.Error("the first one is not registered any more")
	}
}

func TestAnEnginesDevicesFollowItsClaimAtOnce(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "engine-0", UID: "pod-1", Labels: map[string]string{kube.EngineLabel: "vllm"}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{
			{Name: "engine", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 1}}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "127.0.0.1"},
	}
	server := newServer(t, pod)
	a, _ := runAgent(t, c, Options{Kubernetes: server, BootID: "boot-1"})
	devices := func() (list []string, known bool) {
		for _, e := range a.poller.Snapshot() {
			if e.Name == "pod.llm.engine-0" {
				return e.Devices, true
			}
		}
		return nil, false
	}
	eventually(t, "the engine is known, with no devices", func() bool { list, known := devices(); return known && len(list) == 0 })
	gpu := string(a.tracker.Snapshot()[0].Device.ID)
	if _, err := server.ResourceV1().ResourceClaims("llm").Create(t.Context(), newClaim(gpu), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	kubelet, claim := registered(t, c), fakekubelet.Claim{Namespace: "llm", Name: "smol", UID: "uid-1"}
	if answer, err := kubelet.PrepareUntil(t.Context(), time.Second, claim); err != nil || len(answer.Devices) != 2 {
		t.Fatalf("prepared are %+v, %v", answer, err)
	}
	eventually(t, "the engine has the claim's GPU", func() bool { list, _ := devices(); return slices.Equal(list, []string{gpu}) })
	if errs, err := kubelet.Unprepare(t.Context(), claim); err != nil || errs["uid-1"] != "" {
		t.Errorf("unprepared: %v, %v", errs, err)
	}
	eventually(t, "the engine has none", func() bool { list, known := devices(); return known && len(list) == 0 })
}

func TestAnAgentWhoseAPIServerHangsIsReadySaysSoAndEnds(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
		_, _ = io.Copy(io.Discard, r.Body) // else the server does not see that nobody waits any more
		<-r.Context().Done()
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	c := onKubernetes(t)
	c.Kubernetes.EvictionHard = map[string]string{"nodefs.available": "1Mi"} // so that nobody is asked for it
	c.Weights.KeepFree = 2 * units.MiB
	a, stop := runAgent(t, c, Options{Kubernetes: client, BootID: "boot-1"})
	kubelet := registered(t, c)
	ready := "http://" + a.Listeners()["admin"] + "/readyz"
	eventually(t, "the agent is ready", func() bool { code, _ := fetch(t, ready); return code == http.StatusOK })
	<-asked
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	claim := fakekubelet.Claim{Namespace: "llm", Name: "smol", UID: "uid-1"}
	if answer, err := kubelet.Prepare(ctx, claim); err == nil {
		t.Errorf("a claim that nobody could read is answered with %+v", answer)
	}
	if errs, err := kubelet.Unprepare(t.Context(), claim); err != nil || errs["uid-1"] != "" {
		t.Errorf("unprepared: %v, %v", errs, err)
	}
	if pools := a.node().Kubernetes.Pools; pools[0].State == poolPublished || a.node().Kubernetes.Server != "" {
		t.Errorf("it says that it published: %+v", pools)
	}
	stop() // as a signal does: it waits for no answer
}
