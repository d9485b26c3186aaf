package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
)

// badRequests are refused before an engine hears of them, with this status.
var badRequests = []struct {
	name, method, path, kind string
	body                     string
	status                   int
}{
	{"no JSON", "POST", "/v1/chat/completions", "application/json", `{"model":"exact","messages":[`, 400},
	{"no object", "POST", "/v1/completions", "application/json", `[1,2,3]`, 400},
	{"empty", "POST", "/v1/embeddings", "application/json", ``, 400},
	{"model twice", "POST", "/v1/completions", "application/json", `{"model":"exact","model":"plain","prompt":"x"}`, 400},
	{"unknown model", "POST", "/v1/chat/completions", "application/json", `{"model":"nobody","messages":[]}`, 404},
	{"unknown response", "POST", "/v1/responses", "application/json", `{"model":"exact","input":"x","previous_response_id":"resp_none"}`, 404},
	{"no JSON type", "POST", "/v1/chat/completions", "text/html", `<p>`, 415},
	{"method", "GET", "/v1/chat/completions", "", ``, 405},
	{"path", "POST", "/v2/everything", "application/json", `{}`, 404},
	{"too long", "POST", "/v1/completions", "application/json", `{"model":"exact","prompt":"` + strings.Repeat("x", 9<<20) + `"}`, 413},
}

// bad sends a bad request and checks how it is refused.
func (f *Front) bad(ctx context.Context, rng *rand.Rand, id string) Sight {
	b := badRequests[rng.IntN(len(badRequests))]
	s := Sight{ID: id, Kind: b.name, Front: f.Name}
	client := f.plain
	if f.multi != nil && rng.IntN(2) == 0 {
		client = f.multi
	}
	req, err := http.NewRequestWithContext(ctx, b.method, f.URL+b.path, bytes.NewReader([]byte(b.body)))
	if err != nil {
		return s.is(sawWrong, err)
	}
	req.Header.Set("X-Request-Id", id)
	if b.kind != "" {
		req.Header.Set("Content-Type", b.kind)
	}
	resp, err := client.Do(req)
	if err != nil && f.Retired.Load() {
		return s.is(sawRetired, err)
	}
	if err != nil {
		return s.is(sawWrong, fmt.Errorf("%s: no answer: %w", b.name, err))
	}
	defer func() { _ = resp.Body.Close() }()
	s.Status = resp.StatusCode
	if resp.StatusCode != b.status {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
		return s.is(sawWrong, fmt.Errorf("%s: got %s, want %d: %s", b.name, resp.Status, b.status, text))
	}
	if err := refused(resp, resp.Body); !errors.Is(err, errRefused) {
		return s.is(sawWrong, fmt.Errorf("%s: %w", b.name, err))
	}
	return s.is(sawBad, nil)
}
