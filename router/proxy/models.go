package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
)

type modelEntry struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	// MaxModelLen is vLLM's own field: the context in tokens, left out if undeclared.
	MaxModelLen int `json:"max_model_len,omitempty"`
}

func entry(m Model) modelEntry {
	return modelEntry{ID: m.Name, Object: "model", OwnedBy: "hearth", MaxModelLen: m.ContextTokens}
}

func (p *Proxy) listModels(w http.ResponseWriter, r *http.Request) {
	if !p.allow(w, r, "/v1/models", http.MethodGet, http.MethodHead) {
		return
	}
	list := struct {
		Object string       `json:"object"`
		Data   []modelEntry `json:"data"`
	}{Object: "list", Data: []modelEntry{}}
	for _, m := range p.balancer.Models() {
		list.Data = append(list.Data, entry(m))
	}
	p.answerJSON(w, r, list)
}

func (p *Proxy) showModel(w http.ResponseWriter, r *http.Request, name string) {
	if !p.allow(w, r, "/v1/models", http.MethodGet, http.MethodHead) {
		return
	}
	for _, m := range p.balancer.Models() {
		if m.Name == name {
			p.answerJSON(w, r, entry(m))
			return
		}
	}
	p.refuse(w, r, p.begin(w, r, "/v1/models"), refusalFor(ErrUnknownModel, name))
}

func (p *Proxy) answerJSON(w http.ResponseWriter, r *http.Request, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		WriteRefusal(w, refusalFor(err, ""))
		return
	}
	p.boundRest(w, r)
	w.Header()["Content-Type"] = []string{"application/json"}
	w.Header()["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body)
	}
}
