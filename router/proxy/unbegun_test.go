package proxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

const eventsHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

// queueing answers as vLLM does: the head of a stream at once, its events once
// the request has its turn, which never comes before the engine is lost.
func queueing(t *testing.T, asked *atomic.Int32, more string) string {
	t.Helper()
	return rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		asked.Add(1)
		_, _ = io.WriteString(c, eventsHead+more)
	})
}

const streamed = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`

func answering(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n")
}

func TestAStreamThatWaitedAtALostEngineIsAskedForElsewhere(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			r := newRig(t, Options{}, answering, answering)
			r.targets[0].URL = queueing(t, &asked, "")
			for asked.Load() == 0 {
				resp, got := r.post(t, path, streamed)
				if resp.StatusCode != 200 || !strings.HasSuffix(got, "data: [DONE]\n\n") || strings.Contains(got, "error") {
					t.Fatalf("got %d %q", resp.StatusCode, got)
				}
				x := <-r.done
				if x.Outcome != "ok" || x.Retries != int(asked.Load()) || r.held != 0 {
					t.Fatalf("after %d at the lost engine: exchange %+v, held %d", asked.Load(), x, r.held)
				}
			}
		})
	}
}

// TestAWholeQueueOfALostEngineIsAnsweredElsewhere has more streams wait at one
// engine than the retry budget of a quiet minute would move.
func TestAWholeQueueOfALostEngineIsAnsweredElsewhere(t *testing.T) {
	t.Parallel()
	const queue = 40
	var asked atomic.Int32
	all, lost := make(chan struct{}), make(chan struct{})
	r := newRig(t, Options{}, answering, answering)
	r.targets[0].URL = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		_, _ = io.WriteString(c, eventsHead)
		if asked.Add(1) == queue/2 {
			close(all)
		}
		<-lost
	})
	answers := make(chan string, queue)
	for range queue {
		go func() {
			_, got := r.post(t, "/v1/chat/completions", streamed)
			answers <- got
		}()
	}
	<-all
	close(lost)
	for range queue {
		if got := <-answers; !strings.HasSuffix(got, "data: [DONE]\n\n") || strings.Contains(got, "error") {
			t.Errorf("got %q", got)
		}
		<-r.done
	}
}

func TestAStreamThatWaitedAtTwoLostEnginesGetsAStatus(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := newRig(t, Options{}, answering, answering)
	for i := range r.targets {
		r.targets[i].URL = queueing(t, &asked, "")
	}
	resp, got := r.post(t, "/v1/chat/completions", streamed)
	wantError(t, resp, got, 502, "engine_lost")
	if x := <-r.done; asked.Load() != 2 || x.Outcome != "engine_lost" || x.PromptTokens+x.CompletionTokens != 0 || r.held != 0 {
		t.Fatalf("%d engines were asked: exchange %+v, held %d", asked.Load(), x, r.held)
	}
}

func TestAStreamThatHadBegunIsNotAskedForAgain(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := newRig(t, Options{}, answering, answering)
	for i := range r.targets {
		r.targets[i].URL = queueing(t, &asked, "2\r\n: \r\n")
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions", strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != 200 || err == nil || !strings.Contains(string(got), "engine_lost") || asked.Load() != 1 {
		t.Fatalf("%d engines were asked: got %d %q, %v", asked.Load(), resp.StatusCode, got, err)
	}
	if x := <-r.done; x.Outcome != "engine_lost" || x.Retries != 0 {
		t.Fatalf("exchange %+v", x)
	}
}

func TestAStreamThatWaitedAtTheOnlyEngineIsNotAskedForThereAgain(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := newRig(t, Options{}, answering)
	r.targets[0].URL = queueing(t, &asked, "")
	resp, got := r.post(t, "/v1/chat/completions", streamed)
	wantError(t, resp, got, 502, "engine_lost")
	if x := <-r.done; asked.Load() != 1 || x.Outcome != "engine_lost" || x.Retries != 0 || r.held != 0 {
		t.Fatalf("the engine was asked %d times: exchange %+v, held %d", asked.Load(), x, r.held)
	}
}

// TestAStreamThatToldItsEndIsWholeThoughTheEngineIsLostBehindIt has an engine
// that dies between its last event and the end of its framing.
func TestAStreamThatToldItsEndIsWholeThoughTheEngineIsLostBehindIt(t *testing.T) {
	t.Parallel()
	for path, events := range map[string]string{
		"/v1/chat/completions": "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n",
		"/v1/responses":        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"usage\":{\"input_tokens\":1,\"output_tokens\":1}}}\n\n",
	} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Options{}, answering)
			r.targets[0].URL = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
				req, err := http.ReadRequest(in)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, req.Body)
				_, _ = io.WriteString(c, eventsHead+strconv.FormatInt(int64(len(events)), 16)+"\r\n"+events+"\r\n")
			})
			resp, got := r.post(t, path, streamed)
			if resp.StatusCode != 200 || got != events {
				t.Errorf("got %d %q, want %q and a clean end", resp.StatusCode, got, events)
			}
			if x := <-r.done; x.Outcome != "ok" || r.held != 0 {
				t.Errorf("exchange %+v, held %d", x, r.held)
			}
		})
	}
}
