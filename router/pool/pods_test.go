package pool

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

func podPools(names ...string) Config {
	cfg := Config{}
	for _, name := range names {
		cfg.Pools = append(cfg.Pools, PoolConfig{Name: name, Pods: PodsConfig{Selector: "app=" + name, Port: "http"}})
		cfg.Models = append(cfg.Models, ModelConfig{Name: name, Targets: []TargetConfig{{Pool: name}}})
	}
	return cfg
}

// pod is a Ready pod; its address is made of its name.
func pod(name string, change ...func(*Pod)) Pod {
	p := Pod{UID: "uid-" + name, Namespace: "ns", Name: name, Node: "n", URL: "http://10.0.0." + fmt.Sprint(len(name)) + ":8000", Ready: true}
	for _, c := range change {
		c(&p)
	}
	return p
}

func (f *fleet) pods(pool string, pods ...Pod) { f.pools.SetPods(map[string][]Pod{pool: pods}) }

func ofPod(uid string, change ...func(*report.Endpoint)) *report.Endpoint {
	return engine("pod.ns."+uid, "", append([]func(*report.Endpoint){func(e *report.Endpoint) {
		e.Pod, e.ServedModels, e.Url = "uid-"+uid, nil, "http://10.9.9.9:1"
	}}, change...)...)
}

func (f *fleet) ids() (list []string) {
	for _, e := range f.pools.Stats().Endpoints {
		list = append(list, e.ID)
	}
	return list
}

func (f *fleet) wants(ids ...string) {
	f.t.Helper()
	if got := f.ids(); !slices.Equal(got, ids) {
		f.t.Errorf("endpoints %v, want %v", got, ids)
	}
}

func TestAPodWithoutAReportServes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	r := f.acquire(ask(1, 4))
	if r.EndpointID != "pod/ns/a" || r.URL != "http://10.0.0.1:8000" || r.Decision().Alarm {
		t.Errorf("got %+v", r)
	}
	if e := f.endpoint("pod/ns/a"); e.LoadAgeSeconds != -1 || !e.Reachable || e.Health != "healthy" || e.Node != "n" {
		t.Errorf("stats %+v", e)
	}
}

func TestAPodServesAlsoATargetWhoseRefNoNodeReports(t *testing.T) {
	t.Parallel()
	cfg := podPools("m")
	cfg.Models[0].Targets[0].Ref = "hub://org/name"
	f := newFleet(t, cfg)
	f.pods("m", pod("a"))
	f.acquire(ask(1, 4))
}

func TestAPodIsNoEndpointBeforeItIsReadyAndStaysOneAfter(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	unready := func(p *Pod) { p.Ready = false }
	f.pods("m", pod("a", unready))
	f.wants()
	f.pods("m", pod("a"))
	f.wants("pod/ns/a")
	req := ask(1, 20)
	f.acquire(req).Done(Outcome{})
	for range 3 { // its probes flap
		f.pods("m", pod("a", unready), pod("bb"))
		if r := f.acquire(ask(1, 20)); r.EndpointID != "pod/ns/bb" {
			t.Errorf("a request went to %s, whose probes fail", r.EndpointID)
		}
		f.pods("m", pod("a"), pod("bb"))
	}
	if e := f.endpoint("pod/ns/a"); e.HeldBlocks != 20 || e.Suspended {
		t.Errorf("after its probes flapped: %+v", e)
	}
	// Where all fail their probes, none is worse than another.
	f.pods("m", pod("a", unready), pod("bb", unready))
	if r := f.acquire(req); !r.Decision().Alarm {
		t.Errorf("decided %+v", r.Decision())
	}
}

func TestAPodThatIsBeingDeletedDrainsAndGoesWithThePod(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	running := f.acquire(ask(1, 4))
	leaving := func(p *Pod) { p.Leaving = true }
	f.pods("m", pod("a", leaving))
	_, err := f.pools.Acquire(ask(2, 4), nil)
	if !errors.Is(err, ErrNoEndpoint) || !strings.Contains(err.Error(), "drain") {
		t.Errorf("got %v", err)
	}
	if e := f.endpoint("pod/ns/a"); !e.Draining || e.InFlight != 1 {
		t.Errorf("stats %+v", e)
	}
	f.pods("m")
	f.wants()
	running.Done(Outcome{})
	// One that is seen for the first time as it leaves is none.
	f.pods("m", pod("a", leaving))
	f.wants()
}

func TestAReportAddsLoadAndHealthToPodsAndNoEndpoint(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	told := &report.Report{
		Endpoints: []*report.Endpoint{
			ofPod("a", func(e *report.Endpoint) { e.Load.Running, e.Load.UnixMillis = 7, f.now.UnixMilli() }),
			ofPod("other"),        // of a pod that no pool selects
			engine("static", "m"), // in a pool of pods, by another address
		},
		Devices: []*report.Device{{Id: "gpu-pod.ns.a", Health: report.Health_HEALTH_UNHEALTHY}},
	}
	f.snapshot("n", told)
	f.wants()
	f.pods("m", pod("a"), pod("bb"))
	f.snapshot("n", told)
	f.wants("pod/ns/a", "pod/ns/bb")
	if e := f.endpoint("pod/ns/a"); e.Running != 7 || e.Health != "unhealthy" || e.URL != "http://10.0.0.1:8000" || e.LoadAgeSeconds != 0 {
		t.Errorf("stats %+v", e)
	}
	if r := f.acquire(ask(1, 4)); r.EndpointID != "pod/ns/bb" {
		t.Errorf("a request went to %s, whose device is unhealthy", r.EndpointID)
	}
	// The agent is silent, then starts anew and does not know its pods yet.
	f.now = f.now.Add(time.Minute)
	f.snapshot("n", &report.Report{})
	if e := f.endpoint("pod/ns/a"); e.Health != "unhealthy" || e.LoadAgeSeconds != 60 {
		t.Errorf("after the agent lost its pods: %+v", e)
	}
	// The node is gone for good: nothing is known of its pods, which are there.
	f.pools.Forget("n")
	if e := f.endpoint("pod/ns/a"); e.Health != "healthy" || e.LoadAgeSeconds != -1 {
		t.Errorf("after the node was forgotten: %+v", e)
	}
}

func TestANodeSpeaksOfItsOwnPodsOnly(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	f.snapshot("stranger", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Draining, e.Reachable = true, false })}})
	if e := f.endpoint("pod/ns/a"); e.Draining || !e.Reachable {
		t.Errorf("stats %+v", e)
	}
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Draining = true })}})
	if e := f.endpoint("pod/ns/a"); !e.Draining {
		t.Errorf("stats %+v", e)
	}
}

func TestAListedEngineIsFoundByThePodsAddress(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("e", "m", func(e *report.Endpoint) {
		e.Url, e.Load.Running = "http://10.0.0.1:8000/", 3
	})}})
	f.wants("pod/ns/a")
	if e := f.endpoint("pod/ns/a"); e.Running != 3 {
		t.Errorf("stats %+v", e)
	}
}

func TestAnAddressThatAnotherPodGetsBringsNothingOfTheFirst(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	f.acquire(ask(1, 20)).Done(Outcome{Failure: FailureConnect})
	next := pod("b") // its name has the same length: the address is a's
	f.pods("m", next)
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Draining = true })}})
	f.wants("pod/ns/b")
	if e := f.endpoint("pod/ns/b"); e.URL != "http://10.0.0.1:8000" || e.HeldBlocks != 0 || e.Suspended || e.Draining {
		t.Errorf("stats %+v", e)
	}
}

func TestARestartedContainerIsAnotherIncarnation(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("m"))
	f.pods("m", pod("a"))
	old := f.acquire(ask(1, 20))
	again := func(p *Pod) { p.Restarts = 1 }
	f.pods("m", pod("a", again, func(p *Pod) { p.Ready = false }))
	f.wants()
	f.pods("m", pod("a", again))
	if e := f.endpoint("pod/ns/a"); e.HeldBlocks != 0 || e.InFlight != 0 {
		t.Errorf("stats %+v", e)
	}
	old.Done(Outcome{})
	if e := f.endpoint("pod/ns/a"); e.InFlight != 0 {
		t.Errorf("stats %+v", e)
	}
	// The node may know of it before the API server does.
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Incarnation = 100 })}})
	f.acquire(ask(1, 20)).Done(Outcome{})
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Incarnation = 200 })}})
	if e := f.endpoint("pod/ns/a"); e.HeldBlocks != 0 {
		t.Errorf("stats %+v", e)
	}
	f.wants("pod/ns/a")
}

func TestAPodBelongsToOnePool(t *testing.T) {
	t.Parallel()
	f := newFleet(t, podPools("first", "second"))
	f.pools.SetPods(map[string][]Pod{"second": {pod("a")}, "first": {pod("a"), pod("bb")}})
	at := func() (list []string) {
		for _, e := range f.pools.Stats().Endpoints {
			list = append(list, e.Pool+":"+e.ID)
		}
		return list
	}
	if got := at(); !slices.Equal(got, []string{"first:pod/ns/a", "first:pod/ns/bb"}) {
		t.Errorf("endpoints %v", got)
	}
	f.pools.SetPods(map[string][]Pod{"second": {pod("a")}, "first": {pod("bb")}})
	if got := at(); !slices.Equal(got, []string{"first:pod/ns/bb", "second:pod/ns/a"}) {
		t.Errorf("endpoints %v", got)
	}
	// A pool that is not told of keeps what it has.
	f.pools.SetPods(map[string][]Pod{"second": {}})
	if got := at(); !slices.Equal(got, []string{"first:pod/ns/bb"}) {
		t.Errorf("endpoints %v", got)
	}
}

func TestAReloadKeepsPodsAndWhatTheyHoldAndDropsThoseOfADroppedPool(t *testing.T) {
	t.Parallel()
	cfg := podPools("m")
	f := newFleet(t, cfg)
	f.pods("m", pod("a"))
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{ofPod("a", func(e *report.Endpoint) { e.Load.Running, e.Accelerator = 7, "told" })}})
	f.acquire(ask(1, 20)).Done(Outcome{})
	cfg = podPools("m")
	cfg.Pools[0].Pods.Accelerator, cfg.Pools[0].Pods.Engine, cfg.Pools[0].Pods.ServedModels = "H200", "vllm", []string{"m", "lora"}
	if err := f.pools.SetModels(cfg); err != nil {
		t.Fatal(err)
	}
	if e := f.endpoint("pod/ns/a"); e.HeldBlocks != 20 || e.Accelerator != "H200" || e.Engine != "sim" || e.Running != 7 || len(e.Served) != 2 {
		t.Errorf("stats %+v", e)
	}
	cfg.Pools[0].Pods = PodsConfig{}
	if err := f.pools.SetModels(cfg); err != nil {
		t.Fatal(err)
	}
	f.wants()
	// What comes late for it is nothing.
	f.pods("m", pod("a"))
	f.wants()
}

func TestThePodsConfigurationNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*PodsConfig){
		"":                   func(*PodsConfig) {},
		"selector: is empty": func(c *PodsConfig) { c.Selector = "" },
		"selector: unable":   func(c *PodsConfig) { c.Selector = "app in" },
		"every pod":          func(c *PodsConfig) { c.Selector = " " },
		"port:":              func(c *PodsConfig) { c.Port = "" },
		"1 to 65535":         func(c *PodsConfig) { c.Port = "70000" },
		"namespace:":         func(c *PodsConfig) { c.Namespace = "A" },
		"maxRunning":         func(c *PodsConfig) { c.MaxRunning = -1 },
	} {
		cfg := podPools("m")
		change(&cfg.Pools[0].Pods)
		_, err := New(cfg, Options{})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	many := Config{}
	for i := range MaxPodPools + 1 {
		many.Pools = append(many.Pools, podPools(fmt.Sprint("p", i)).Pools...)
	}
	if _, err := New(many, Options{}); err == nil || !strings.Contains(err.Error(), "select pods") {
		t.Errorf("%d pools of pods gave %v", len(many.Pools), err)
	}
}
