package proxy

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// BenchmarkASmallRequestThroughTheProxy sends requests over real sockets, one
// after the other. cpu-us/op is of client, proxy and engine together.
func BenchmarkASmallRequestThroughTheProxy(b *testing.B) {
	for name, c := range map[string]struct{ kind, answer, body string }{
		"json":   {"application/json", `{"choices":[{"text":"a"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}`, chat},
		"stream": {"text/event-stream", strings.Repeat(vllmEvent(1), 64) + "data: [DONE]\n\n", chatStream},
	} {
		b.Run(name, func(b *testing.B) {
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", c.kind)
				_, _ = io.WriteString(w, c.answer)
			}))
			defer engine.Close()
			transport := wire.New(wire.Options{})
			defer transport.CloseIdleConnections()
			balancer := &fakeBalancer{models: []string{"m"}, targets: []Target{{URL: engine.URL, EndpointID: "e", Pool: "p", LogicalModel: "m", ServedModel: "served"}}}
			p := New(Options{Balancer: balancer, Transport: transport})
			s := httptest.NewUnstartedServer(p)
			s.Listener = p.Guard(s.Config, s.Listener)
			s.Start()
			defer s.Close()
			client := &http.Transport{}
			defer client.CloseIdleConnections()
			before := cpuMicros()
			for b.Loop() {
				req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(c.body))
				if err != nil {
					b.Fatal(err)
				}
				resp, err := client.RoundTrip(req)
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			b.ReportMetric(float64(cpuMicros()-before)/float64(b.N), "cpu-us/op")
		})
	}
}

// cpuMicros is the processor time of this process so far.
func cpuMicros() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano()/1000 + u.Stime.Nano()/1000
}
