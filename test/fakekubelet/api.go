package fakekubelet

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// API answers what a driver asks the API server for claims, over HTTP, so that
// a driver in another process can ask too.
type API struct {
	server *httptest.Server

	mu     sync.Mutex
	claims map[string]*resourceapi.ResourceClaim // by namespace/name
	down   bool
	read   chan struct{} // holds a signal after a read began
	gate   chan struct{} // reads wait while it is open and set
}

// StartAPI starts one; Close ends it.
func StartAPI() *API {
	a := &API{claims: map[string]*resourceapi.ResourceClaim{}, read: make(chan struct{}, 1)}
	a.server = httptest.NewServer(http.HandlerFunc(a.serve))
	return a
}

// Close stops the server.
func (a *API) Close() { a.server.Close() }

// URL is where it listens.
func (a *API) URL() string { return a.server.URL }

// Client makes a client of it.
func (a *API) Client() (kubernetes.Interface, error) { return ClientOf(a.URL()) }

// ClientOf makes a client of the API at a URL.
func ClientOf(url string) (kubernetes.Interface, error) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: url, QPS: -1})
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return client, nil
}

// Put stores a claim.
func (a *API) Put(claim *resourceapi.ResourceClaim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.claims[claim.Namespace+"/"+claim.Name] = claim.DeepCopy()
}

// Delete removes a claim.
func (a *API) Delete(namespace, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.claims, namespace+"/"+name)
}

// Claim gives a claim as it is stored.
func (a *API) Claim(namespace, name string) (*resourceapi.ResourceClaim, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	claim, ok := a.claims[namespace+"/"+name]
	return claim.DeepCopy(), ok
}

// SetDown makes every read fail.
func (a *API) SetDown(down bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = down
}

// Pause makes reads wait until resume is called; Read tells that one waits.
func (a *API) Pause() (resume func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	gate := make(chan struct{})
	a.gate = gate
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.gate = nil
		close(gate)
	}
}

// Read holds a signal after a read began.
func (a *API) Read() <-chan struct{} { return a.read }

func (a *API) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	gate, down := a.gate, a.down
	a.mu.Unlock()
	select {
	case a.read <- struct{}{}:
	default:
	}
	if gate != nil {
		select {
		case <-gate:
		case <-r.Context().Done():
			return
		}
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	// apis/resource.k8s.io/v1/namespaces/<ns>/resourceclaims/<name>
	if down || len(parts) != 7 || parts[5] != "resourceclaims" || r.Method != http.MethodGet {
		tell(w, http.StatusServiceUnavailable, &metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonServiceUnavailable, Message: "not served"})
		return
	}
	claim, ok := a.Claim(parts[4], parts[6])
	if !ok {
		tell(w, http.StatusNotFound, &metav1.Status{
			Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
			Message: fmt.Sprintf("resourceclaims.resource.k8s.io %q not found", parts[6]),
			Details: &metav1.StatusDetails{Group: resourceapi.GroupName, Kind: "resourceclaims", Name: parts[6]},
		})
		return
	}
	claim.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"}
	tell(w, http.StatusOK, claim)
}

func tell(w http.ResponseWriter, code int, body any) {
	if status, ok := body.(*metav1.Status); ok {
		status.TypeMeta, status.Code = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, int32(code)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// A client that went has no use for the rest.
	_ = json.NewEncoder(w).Encode(body)
}
