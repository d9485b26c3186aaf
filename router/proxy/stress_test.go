package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestManyStreamsAtOnceKeepTheirBytes sends streams of many shapes over reused
// connections: bursts, pieces that end anywhere, whole answers, early ends.
func TestManyStreamsAtOnceKeepTheirBytes(t *testing.T) {
	t.Parallel()
	want := func(n int) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(event(strconv.Itoa(i)))
		}
		return b.String() + "data: [DONE]\n\n"
	}
	r := newRig(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n, _ := strconv.Atoi(r.Header.Get("X-Events"))
		step, _ := strconv.Atoi(r.Header.Get("X-Step"))
		w.Header().Set("Content-Type", "text/event-stream")
		for rest := strings.Replace(want(n), "data: [DONE]", usageEvent+"data: [DONE]", 1); rest != ""; {
			cut := min(len(rest), step)
			_, _ = io.WriteString(w, rest[:cut])
			rest = rest[cut:]
			if step%2 == 0 {
				w.(http.Flusher).Flush()
			}
		}
	})
	r.done = make(chan Exchange, 10_000)
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	t.Cleanup(transport.CloseIdleConnections)
	var clients sync.WaitGroup
	for c := range 32 {
		clients.Go(func() {
			for i := range 40 {
				n, step := (c*7+i*13)%200, 1+(c*31+i*17)%3000
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions", strings.NewReader(chatStream))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Events", fmt.Sprint(n))
				req.Header.Set("X-Step", fmt.Sprint(max(step, n)))
				resp, err := transport.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || string(got) != want(n) {
					t.Errorf("%d events in steps of %d: %d bytes, %v", n, step, len(got), err)
					return
				}
			}
		})
	}
	clients.Wait()
	if t.Failed() {
		return
	}
	for range 32 * 40 {
		if x := <-r.done; x.Outcome != "ok" || x.CompletionTokens != 3 || x.Estimated {
			t.Fatalf("exchange %+v", x)
		}
	}
	if r.held != 0 {
		t.Fatalf("%d reservations are left", r.held)
	}
}
