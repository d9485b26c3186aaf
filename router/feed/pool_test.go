package feed

import (
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/pool"
)

var _ Sink = (*pool.Pools)(nil)

func TestWhatANodeSaysOfADeviceReachesTheNextChoice(t *testing.T) {
	t.Parallel()
	p, err := report.NewPublisher(report.PublisherOptions{Node: "n1", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	address, _ := serve(t, "127.0.0.1:0", p)
	pools, err := pool.New(pool.Config{Models: []pool.ModelConfig{{Name: "m", Targets: []pool.TargetConfig{{Pool: "p"}}}}}, pool.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(Options{Nodes: []Node{{Address: address}}, Sink: pools})
	if err != nil {
		t.Fatal(err)
	}
	start(t, f)
	err = p.SetEndpoints([]*report.Endpoint{
		{Name: "a", Url: "http://127.0.0.1:1", Pool: "p", Reachable: true, Devices: []string{"gpu-0"}},
		{Name: "b", Url: "http://127.0.0.1:2", Pool: "p", Reachable: true, Devices: []string{"gpu-1"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"n1/a", "n1/b"} {
		devices := []*report.Device{{Id: "gpu-0", Health: report.Health_HEALTH_HEALTHY}, {Id: "gpu-1", Health: report.Health_HEALTH_HEALTHY}}
		devices[map[string]int{"n1/a": 1, "n1/b": 0}[want]].Health = report.Health_HEALTH_UNHEALTHY
		if err := p.SetDevices(devices); err != nil {
			t.Fatal(err)
		}
		tick := time.NewTicker(5 * time.Millisecond)
		for {
			if x := pools.Explain(&pick.Request{Model: "m"}); x.Chosen == want && x.Reason == pick.ReasonOnlyOne {
				break
			}
			select {
			case <-tick.C:
			case <-t.Context().Done():
				t.Fatal("ended before the choice followed the device")
			}
		}
		tick.Stop()
	}
}
