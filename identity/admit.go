package identity

import (
	"encoding/json"
	"net/http"
	"slices"
)

// ForRoles serves /healthz and /readyz to everyone, since who probes a process
// has no certificate to show, and all else only to callers whose certificate
// carries one of the roles. It is for listeners of OpenTLS, which checks who
// signed a certificate; on a plain connection, which only loopback or an
// insecure listener has, everyone is served.
func ForRoles(h http.Handler, roles ...Role) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || isProbe(r) || hasRole(r, roles) {
			h.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(map[string]map[string]string{"error": {"message": "a certificate with another role, or none, was shown"}})
	})
}

func isProbe(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && (r.URL.Path == "/healthz" || r.URL.Path == "/readyz")
}

func hasRole(r *http.Request, roles []Role) bool {
	if len(r.TLS.PeerCertificates) == 0 {
		return false
	}
	peer, err := PeerOf(r.TLS.PeerCertificates[0])
	return err == nil && slices.Contains(roles, peer.Role)
}
