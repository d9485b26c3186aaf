package admin

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"
)

// passDialWithin bounds how long the other process may take to answer at all.
const passDialWithin = 2 * time.Second

// NewPass gives a handler that passes calls to the same API on the socket of
// the process that runs the data role, and streams its answers.
func NewPass(socket string, log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	dialer := net.Dialer{Timeout: passDialWithin}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "data"})
	proxy.Transport = &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 32 << 10,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		},
	}
	proxy.FlushInterval = -1
	proxy.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	proxy.ErrorHandler = func(w http.ResponseWriter, r *http.Request, err error) {
		log.Debug("call not passed to the data role", slog.String("call", r.URL.Path), slog.Any("error", err))
		fail(w, &Error{
			Code: CodeUnavailable, Status: http.StatusServiceUnavailable, Message: "the data role does not answer: " + err.Error(),
			Hint: "it runs in a process of its own: see that one's log; try again when it is up",
		})
	}
	return proxy
}
