package proxy

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
)

// ReasonHeader tells a client and its operator why it got what it got: a
// decision's reason, or why the request was refused.
const ReasonHeader = "X-Hearth-Reason"

// Refusal is an answer the router gives itself, in OpenAI's error form.
type Refusal struct {
	Status  int
	Message string
	Type    string // invalid_request_error, server_error, ...
	Param   string // "" becomes null
	Code    string // "" becomes null
	Reason  string // for ReasonHeader and metrics, one of a bounded set
	// RetryAfter in seconds; 0 says that trying again cannot help, which sets
	// x-should-retry: false so that client libraries stop at once.
	RetryAfter int
}

// Error implements error.
func (e *Refusal) Error() string { return e.Message }

func invalid(status int, code, reason, message string) *Refusal {
	return &Refusal{Status: status, Message: message, Type: "invalid_request_error", Code: code, Reason: reason}
}

// refusalFor turns a scan's or the balancer's error into an answer.
func refusalFor(err error, model string) *Refusal {
	var refusal *Refusal
	switch {
	case errors.As(err, &refusal):
		return refusal
	case errors.Is(err, ErrUnknownModel):
		r := invalid(http.StatusNotFound, "model_not_found", "unknown-model",
			"The model `"+clip(model)+"` does not exist. GET /v1/models lists those that do.")
		r.Param = "model"
		return r
	case errors.Is(err, ErrUnmetNeeds):
		return invalid(http.StatusBadRequest, "unsupported_feature", "unmet-needs", err.Error())
	case errors.Is(err, ErrNoEndpoint):
		return &Refusal{
			Status: http.StatusServiceUnavailable, Message: "No endpoint can serve this model now.",
			Type: "server_error", Code: "no_endpoint", Reason: "no-endpoint", RetryAfter: 2,
		}
	case errors.Is(err, ErrDuplicateModel), errors.Is(err, ErrModelType), errors.Is(err, ErrModelSpelling):
		r := invalid(http.StatusBadRequest, "invalid_model", "bad-model", err.Error())
		r.Param = "model"
		return r
	case errors.Is(err, ErrNotObject):
		return invalid(http.StatusBadRequest, "invalid_body", "not-an-object", "The request body must be a JSON object.")
	case errors.Is(err, ErrTooDeep), errors.Is(err, ErrMalformed):
		return invalid(http.StatusBadRequest, "invalid_json", "bad-json", "Could not read the request body: "+err.Error()+".")
	default:
		return &Refusal{
			Status: http.StatusInternalServerError, Message: "The router failed to handle the request.",
			Type: "server_error", Code: "internal_error", Reason: "internal", RetryAfter: 1,
		}
	}
}

// clip keeps a client's text short enough to quote back.
func clip(s string) string {
	const most = 200
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

type errorBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// json is the body of the answer: {"error":{"message","type","param","code"}}.
func (e *Refusal) json() []byte {
	body := errorBody{Message: e.Message, Type: e.Type}
	if e.Param != "" {
		body.Param = &e.Param
	}
	if e.Code != "" {
		body.Code = &e.Code
	}
	raw, err := json.Marshal(struct {
		Error errorBody `json:"error"`
	}{body})
	if err != nil {
		return []byte(`{"error":{"message":"internal error","type":"server_error","param":null,"code":null}}`)
	}
	return raw
}

// WriteRefusal answers w with e. Nothing may have been written before.
func WriteRefusal(w http.ResponseWriter, e *Refusal) {
	h := w.Header()
	body := e.json()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	h[ReasonHeader] = []string{e.Reason}
	if e.RetryAfter > 0 {
		h["Retry-After"] = []string{strconv.Itoa(e.RetryAfter)}
	} else {
		h["X-Should-Retry"] = []string{"false"}
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(body)
}

// errorFrame is a broken stream's last event.
func errorFrame(message, code string) []byte {
	e := Refusal{Message: message, Type: "server_error", Code: code}
	return append(append([]byte("data: "), e.json()...), "\n\n"...)
}
