package proxy

import (
	"crypto/rand"
	"encoding/hex"
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// hopByHop headers belong to one connection and are removed both ways, as are
// those that a Connection header names.
var hopByHop = [...]string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate",
	"Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func removeHopByHop(h http.Header) {
	for _, names := range h["Connection"] {
		for name := range strings.SplitSeq(names, ",") {
			if name = textproto.TrimString(name); name != "" {
				h.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
}

// isOwned says whether a header is the router's alone to set.
func isOwned(name string) bool { return strings.HasPrefix(name, "X-Hearth-") }

var (
	identityEncoding = []string{"identity"}
	http1Proto       = []string{"http"}
	httpsProto       = []string{"https"}
)

// upstreamHeaders turns the client's headers, in place, into those the engine
// gets: end-to-end ones only, nothing a client could forge on the router's
// behalf, no compression (events are scanned), and no credentials: those are
// put back per attempt for a pool that opts in.
func (p *Proxy) upstreamHeaders(r *http.Request, id string) (authorization []string) {
	h := r.Header
	removeHopByHop(h)
	for name := range h {
		if isOwned(name) {
			delete(h, name)
		}
	}
	authorization = h["Authorization"]
	delete(h, "Authorization")
	delete(h, "Cookie")
	delete(h, "Expect")
	delete(h, "Content-Length")
	delete(h, "Http2-Settings")
	if p.options.ConsumerHeader != "" {
		delete(h, http.CanonicalHeaderKey(p.options.ConsumerHeader))
	}
	h["Accept-Encoding"] = identityEncoding
	if client, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		h["X-Forwarded-For"] = []string{client}
	} else {
		delete(h, "X-Forwarded-For")
	}
	h["X-Forwarded-Host"] = []string{r.Host}
	h["X-Forwarded-Proto"] = http1Proto
	if r.TLS != nil {
		h["X-Forwarded-Proto"] = httpsProto
	}
	delete(h, "Forwarded")
	h["X-Request-Id"] = []string{id}
	return authorization
}

// copyResponseHeaders gives the client the engine's end-to-end headers; the
// router's own headers stay as they are set.
func copyResponseHeaders(to http.Header, from []wire.Field) {
	connection := ""
	values := make([]string, len(from))
	for i := range from {
		f := &from[i]
		switch f.Name {
		case "X-Request-Id":
			continue
		case "Connection":
			if connection != "" {
				connection += ","
			}
			connection += f.Value
			continue
		}
		if isOwned(f.Name) || isHopByHop(f.Name) {
			continue
		}
		if have := to[f.Name]; have != nil {
			if f.Name != "Content-Length" { // the same one twice
				to[f.Name] = append(have, f.Value)
			}
			continue
		}
		values[i] = f.Value
		to[f.Name] = values[i : i+1 : i+1]
	}
	if connection == "" {
		return
	}
	for name := range strings.SplitSeq(connection, ",") {
		name = http.CanonicalHeaderKey(textproto.TrimString(name))
		if name != "X-Request-Id" && name != "Connection" && !isOwned(name) {
			delete(to, name)
		}
	}
}

func isHopByHop(name string) bool { return slices.Contains(hopByHop[:], name) }

const maxRequestID = 128

// requestID is the client's id where it is sane, else a fresh one.
func requestID(h http.Header) string {
	if ids := h["X-Request-Id"]; len(ids) == 1 && saneID(ids[0]) {
		return ids[0]
	}
	var raw [16]byte
	_, _ = rand.Read(raw[:])
	var out [36]byte
	copy(out[:], "req_")
	hex.Encode(out[4:], raw[:])
	return string(out[:])
}

func saneID(id string) bool {
	if len(id) == 0 || len(id) > maxRequestID {
		return false
	}
	for i := range len(id) {
		c := id[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.:", rune(c)) {
			return false
		}
	}
	return true
}
