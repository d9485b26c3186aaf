package proxy

import (
	"io"
	"net/http"
	"net/textproto"
	"strings"
	"time"
)

// plainPath says whether every reader of a path takes it for the same one. What
// a normalising hop behind the router would rewrite could leave /v1/ and reach
// an engine's own pages.
func plainPath(path string) bool {
	for segment := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(path, "/"), "/"), "/") {
		if segment == "" || segment == "." || segment == ".." || strings.ContainsAny(segment, "\\\x00") {
			return false
		}
	}
	return true
}

// foreign refuses what an engine must not be asked: a tunnel, an echo of the
// request's own headers, another protocol. An offer of HTTP/2 is no demand:
// clients make it of every server, and take the answer in HTTP/1.1.
func foreign(r *http.Request) *Refusal {
	switch r.Method {
	case http.MethodConnect, http.MethodTrace:
		return invalid(http.StatusMethodNotAllowed, "method_not_allowed", "method", "Method "+r.Method+" is not allowed.")
	}
	if r.ProtoMajor != 1 || r.Header["Upgrade"] == nil {
		return nil
	}
	for _, list := range r.Header["Upgrade"] {
		for protocol := range strings.SplitSeq(list, ",") {
			if protocol = textproto.TrimString(protocol); !strings.EqualFold(protocol, "h2c") {
				return invalid(http.StatusBadRequest, "unsupported_upgrade", "upgrade",
					"Upgrade to "+clip(protocol)+" is not supported: this router speaks HTTP only.")
			}
		}
	}
	return nil
}

// serverDrains is how much of an unread body net/http's server reads itself
// before it closes the connection under its client.
const serverDrains = 256 << 10

// unread says whether a refusal leaves more of the body behind than the server
// takes. Where the body has been read, reading on ends at once.
func unread(r *http.Request) bool { return r.Body != http.NoBody && r.ContentLength > serverDrains }

// boundRest bounds, before an answer that does not want what is left of the
// body, how long the server waits for it: it reads up to serverDrains before it
// sends the answer, and again after, else without end.
func (p *Proxy) boundRest(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil && r.Body != http.NoBody {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(p.lingers()))
	}
}

// lingers is how long what is left of a body is waited for.
func (p *Proxy) lingers() time.Duration { return min(lingerTime, p.options.BodyTimeout) }

// Bounds of linger and of boundRest.
const (
	lingerTime  = 5 * time.Second
	lingerBytes = 256 << 20
)

// linger reads on after an answer that was given before the body's end. Most
// clients send all of a body before they read; a connection closed under them
// shows them a reset in place of the answer.
func (p *Proxy) linger(w http.ResponseWriter, r *http.Request) {
	if r.Header["Expect"] != nil {
		return // it waits for a word before it sends, and has one
	}
	control := http.NewResponseController(w)
	if control.SetReadDeadline(time.Now().Add(p.lingers())) != nil || control.Flush() != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, r.Body, lingerBytes)
}
