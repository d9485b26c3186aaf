package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// maxExplain bounds the request body of an explanation in bytes.
const maxExplain = 32 << 20

// Answers is what the API asks; the router gives them.
type Answers interface {
	Status() Status
	Endpoints() []Endpoint
	Models() []Model
	ScaleOuts() ScaleOuts
	// Explain reads a request body as the ingress would. The error is the client's fault.
	Explain(body []byte) (Explanation, error)
}

// Handler serves the API.
func Handler(b Answers) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { answer(w, b.Status()) })
	mux.HandleFunc("GET /v1/endpoints", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string][]Endpoint{"endpoints": b.Endpoints()})
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string][]Model{"models": b.Models()})
	})
	mux.HandleFunc("GET /v1/scaleouts", func(w http.ResponseWriter, _ *http.Request) { answer(w, b.ScaleOuts()) })
	mux.HandleFunc("POST /v1/explain", Explain(b))
	return Routes(mux)
}

// Routes serves mux, and answers what it has no route for in the API's form of
// an error: 404, or 405 with Allow.
func Routes(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		own := unrouted{header: http.Header{}}
		h.ServeHTTP(&own, r)
		err := fmt.Errorf("no such route: %s %.200s", r.Method, r.URL.Path)
		if allow := own.header.Get("Allow"); allow != "" {
			w.Header().Set("Allow", allow)
			err = fmt.Errorf("method %s is not allowed here, use %s", r.Method, allow)
		}
		refuse(w, own.status, err)
	})
}

// unrouted takes a mux's own answer, of which the text is left out.
type unrouted struct {
	header http.Header
	status int
}

func (u *unrouted) Header() http.Header         { return u.header }
func (u *unrouted) WriteHeader(status int)      { u.status = status }
func (u *unrouted) Write(p []byte) (int, error) { return len(p), nil }

// Explain is the handler of POST /v1/explain, also served as /debug/decide.
func Explain(b Answers) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxExplain))
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			refuse(w, http.StatusRequestEntityTooLarge, fmt.Errorf("the body is longer than %d bytes", maxExplain))
			return
		}
		if err != nil {
			return
		}
		e, err := b.Explain(body)
		if err != nil {
			refuse(w, http.StatusBadRequest, err)
			return
		}
		answer(w, e)
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Hearth-API", Version)
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(v)
}

func refuse(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Hearth-API", Version)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]map[string]string{"error": {"message": err.Error()}})
}
