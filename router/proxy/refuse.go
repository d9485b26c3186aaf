package proxy

import (
	"io"
	"net/http"
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

// Bounds of linger.
const (
	lingerTime  = 5 * time.Second
	lingerBytes = 256 << 20
)

// linger reads on after an answer that was given before the body's end. Most
// clients send all of a body before they read; a connection closed under them
// shows them a reset in place of the answer.
func linger(w http.ResponseWriter, r *http.Request) {
	if r.Header["Expect"] != nil {
		return // it waits for a word before it sends, and has one
	}
	control := http.NewResponseController(w)
	if control.SetReadDeadline(time.Now().Add(lingerTime)) != nil || control.Flush() != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, r.Body, lingerBytes)
}
