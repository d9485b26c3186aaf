package admin

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"
)

// Bounds on how long the other process may take: to let itself be called, and
// to begin to answer a question. What changes something begins when it is done.
const (
	passDialWithin   = 2 * time.Second
	passAnswerWithin = 3 * time.Second
)

// NewPass gives a handler that passes calls to the same API on the socket of
// the process that runs the data role, and streams its answers.
func NewPass(socket string, log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	dialer := net.Dialer{Timeout: passDialWithin}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "data"})
	transport := func(answerWithin time.Duration) *http.Transport {
		return &http.Transport{
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 32 << 10, ResponseHeaderTimeout: answerWithin,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, "unix", socket)
			},
		}
	}
	proxy.Transport = byMethod{questions: transport(passAnswerWithin), others: transport(0)}
	proxy.FlushInterval = -1
	proxy.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	proxy.ErrorHandler = func(w http.ResponseWriter, r *http.Request, err error) {
		log.Debug("call not passed to the data role", slog.String("call", r.URL.Path), slog.Any("error", err))
		fail(w, &Error{
			Code: CodeUnavailable, Status: http.StatusServiceUnavailable, Message: "the data role does not answer: " + err.Error(),
			Hint: "it runs in a process of its own: see that one's log; try again when it is up",
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The whole question is read first: a server closes what is left of its
		// body once the answer begins, and a client that still reads it for the
		// other side would then break the answer off.
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			fail(w, &Error{Code: CodeBadRequest, Status: http.StatusBadRequest, Message: "read the call: " + err.Error()})
			return
		}
		whole := r.WithContext(r.Context()) // the server goes by the body that it made
		whole.Body, whole.ContentLength, whole.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
		proxy.ServeHTTP(w, whole)
	})
}

// byMethod sends questions one way and what changes something another.
type byMethod struct{ questions, others http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b byMethod) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		return b.questions.RoundTrip(r)
	}
	return b.others.RoundTrip(r)
}
