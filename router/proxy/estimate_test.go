package proxy

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// halfway answers with the first part of a body that promises more.
func halfway(sent, promised int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Engine", "e")
		w.Header().Set("Content-Length", strconv.Itoa(promised))
		_, _ = io.WriteString(w, strings.Repeat("x", sent))
	}
}

func TestAShortAnswerThatBreaksOffIsAStatusAndCostsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, halfway(80, 160))
	resp, got := r.post(t, "/v1/completions", `{"model":"m","prompt":"12345678"}`)
	wantError(t, resp, got, http.StatusBadGateway, "engine_lost")
	if resp.Header.Get("X-Engine") != "" || resp.Header.Get("X-Request-Id") == "" {
		t.Errorf("the answer has headers of the one it replaces: %v", resp.Header)
	}
	if x := <-r.done; x.CompletionTokens != 0 || x.PromptTokens != 0 || x.Outcome != "engine_lost" || r.held != 0 {
		t.Errorf("exchange %+v", x)
	}
}

func TestALongAnswerThatBreaksOffIsNotChargedForWhatCame(t *testing.T) {
	t.Parallel()
	const long = 100_000
	for sent, want := range map[int]int{long: long / 4, long - 1: 0} {
		r := newRig(t, Options{}, halfway(sent, long))
		resp, got := r.post(t, "/v1/completions", `{"model":"m","prompt":"12345678"}`)
		if resp.StatusCode != http.StatusOK || strings.HasSuffix(got, ">") != (sent < long) {
			t.Errorf("%d bytes sent: got %s and %d bytes", sent, resp.Status, len(got))
		}
		if x := <-r.done; x.CompletionTokens != want || x.PromptTokens != 2 || !x.Estimated {
			t.Errorf("%d bytes sent: exchange %+v, want %d completion tokens", sent, x, want)
		}
	}
}

func TestAChunkedErrorKeepsItsStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusTeapot)
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, "{}")
	})
	if resp, got := r.post(t, "/v1/completions", `{"model":"m","prompt":"x"}`); resp.StatusCode != http.StatusTeapot || got != "{}" {
		t.Errorf("got %s %q", resp.Status, got)
	}
}

func TestWhatEscapesAddToATextIsCountedToTheByte(t *testing.T) {
	t.Parallel()
	pieces := []string{`a`, `\n`, `\"`, `\\`, `\/`, `\u0000`, `\u007f`, `\u0080`, `\u07FF`, `\u0800`, `\uffff`, `\ud83d\ude00`, `\uD83D\uDE00`, `é`, `語`, strings.Repeat("x", 50)}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var inner strings.Builder
		for kinds := 1 + rng.IntN(len(pieces)); rng.IntN(12) > 0; {
			inner.WriteString(pieces[rng.IntN(kinds)])
		}
		var text string
		if err := json.Unmarshal([]byte(`"`+inner.String()+`"`), &text); err != nil {
			t.Fatal(err)
		}
		if _, got := skipText([]byte(`"`+inner.String()+`"`), 0); got != inner.Len()-len(text) {
			t.Fatalf("%s: %d, want %d", inner.String(), got, inner.Len()-len(text))
		}
	}
}
