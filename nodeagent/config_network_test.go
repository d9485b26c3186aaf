package nodeagent

import (
	"maps"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

func TestPortsOfEnginesAreServingButThoseOfTheWeb(t *testing.T) {
	t.Parallel()
	c := Config{Network: Network{Ports: []NetPort{{Port: 9000, To: 9001, Class: "kv"}}}}
	for _, engine := range []string{"http://127.0.0.1:8000", "http://[::1]:9001", "https://engine.example", "http://engine.example", "http://127.0.0.1:80", "https://e:443"} {
		c.Endpoints = append(c.Endpoints, Endpoint{URL: engine})
	}
	want := map[uint16]traffic.Class{8000: traffic.Serving, 9000: traffic.KV, 9001: traffic.KV}
	if got := c.networkOptions().Ports; !maps.Equal(got, want) {
		t.Errorf("ports are %v, want %v", got, want)
	}
}
