// Package kubeapi is a Kubernetes API server for tests and benches: objects in
// memory behind the real HTTP protocol, so that real clients, informers and the
// libraries built on them run against it. It keeps what it is sent, has no
// schema, no admission and no defaults, and starts no controller. Where those
// matter, the lab of test/kubelab runs the real one.
package kubeapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// Version is what the server says of itself.
const Version = "v1.37.2"

// kinds are the resources it has; a resource is named as in paths.
var kinds = map[string]string{
	"nodes": "Node", "pods": "Pod", "events": "Event", "services": "Service", "endpointslices": "EndpointSlice",
	"resourceclaims": "ResourceClaim", "resourceslices": "ResourceSlice", "deviceclasses": "DeviceClass", "leases": "Lease",
}

// maxEvents bounds the changes that watches can start from; one that asks for
// an older one is told to list again.
const maxEvents = 1 << 14

// event is one change.
type event struct {
	version int64
	kind    string // ADDED, MODIFIED, DELETED
	place   place
	object  *unstructured.Unstructured // never changed once it is here
}

// place is where an object is, or a list where name is empty.
type place struct {
	prefix    string // "/api/v1" or "/apis/GROUP/VERSION"
	namespace string
	resource  string
	name      string
}

// Server is an http.Handler. Its methods may be called while it serves.
type Server struct {
	mu       sync.Mutex
	version  int64
	objects  map[place]*unstructured.Unstructured
	events   []event
	changed  chan struct{} // closed at the next change
	requests map[string]int
}

// New makes a server without objects.
func New() *Server {
	return &Server{objects: map[place]*unstructured.Unstructured{}, changed: make(chan struct{}), requests: map[string]int{}}
}

// Requests gives the requests so far by method and resource: "GET resourceclaims".
func (s *Server) Requests() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.requests)
}

// Put stores an object as it is, beside all clients; version and UID are given
// where they lack. The object names its apiVersion and kind.
func (s *Server) Put(object any) error {
	data, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("put object: %w", err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(data); err != nil {
		return fmt.Errorf("put object: %w", err)
	}
	at := place{prefix: "/apis/" + u.GetAPIVersion(), namespace: u.GetNamespace(), name: u.GetName()}
	if u.GetAPIVersion() == "v1" {
		at.prefix = "/api/v1"
	}
	for resource, kind := range kinds {
		if kind == u.GetKind() {
			at.resource = resource
		}
	}
	if at.resource == "" {
		return fmt.Errorf("put object: kind %s is none of this server's", u.GetKind())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.storeLocked(at, u)
	return nil
}

// Delete removes an object of apiVersion and resource, if it is there.
func (s *Server) Delete(apiVersion, resource, namespace, name string) {
	prefix := "/apis/" + apiVersion
	if apiVersion == "v1" {
		prefix = "/api/v1"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleteLocked(place{prefix, namespace, resource, name})
}

// storeLocked keeps an object and tells the watches.
func (s *Server) storeLocked(at place, u *unstructured.Unstructured) {
	kind := "MODIFIED"
	if s.objects[at] == nil {
		kind = "ADDED"
		if u.GetUID() == "" {
			u.SetUID(uuid.NewUUID())
		}
		if made := u.GetCreationTimestamp(); made.IsZero() {
			u.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
		}
	}
	s.version++
	u.SetResourceVersion(strconv.FormatInt(s.version, 10))
	s.objects[at] = u
	s.tellLocked(event{s.version, kind, at, u})
}

func (s *Server) deleteLocked(at place) *unstructured.Unstructured {
	u := s.objects[at]
	if u == nil {
		return nil
	}
	delete(s.objects, at)
	s.version++
	last := u.DeepCopy()
	last.SetResourceVersion(strconv.FormatInt(s.version, 10))
	s.tellLocked(event{s.version, "DELETED", at, last})
	return last
}

func (s *Server) tellLocked(e event) {
	if len(s.events) >= maxEvents {
		s.events = slices.Delete(s.events, 0, maxEvents/2)
	}
	s.events = append(s.events, e)
	close(s.changed)
	s.changed = make(chan struct{})
}

// parse reads a path. sub is what follows the object's name, such as "status".
func parse(path string) (at place, sub string, ok bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case len(parts) > 2 && parts[0] == "api":
		at.prefix, parts = "/"+strings.Join(parts[:2], "/"), parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		at.prefix, parts = "/"+strings.Join(parts[:3], "/"), parts[3:]
	default:
		return at, "", false
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		at.namespace, parts = parts[1], parts[2:]
	}
	at.resource = parts[0]
	if len(parts) > 1 {
		at.name = parts[1]
	}
	return at, strings.Join(parts[min(2, len(parts)):], "/"), kinds[at.resource] != ""
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		reply(w, http.StatusOK, map[string]string{"major": "1", "minor": "37", "gitVersion": Version, "platform": "linux/amd64"})
		return
	}
	at, sub, ok := parse(r.URL.Path)
	if !ok || sub != "" && sub != "status" {
		fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, "no such resource: "+r.URL.Path)
		return
	}
	s.mu.Lock()
	s.requests[r.Method+" "+at.resource]++
	s.mu.Unlock()
	switch {
	case r.Method == http.MethodGet && at.name == "" && r.URL.Query().Get("watch") != "":
		s.watch(w, r, at)
	case r.Method == http.MethodGet && at.name == "":
		s.list(w, r, at)
	case r.Method == http.MethodGet:
		s.get(w, at)
	case r.Method == http.MethodPost && at.name == "":
		s.create(w, r, at)
	case r.Method == http.MethodPut && at.name != "":
		s.update(w, r, at)
	case r.Method == http.MethodPatch && at.name != "":
		s.patch(w, r, at)
	case r.Method == http.MethodDelete && at.name != "":
		s.remove(w, at)
	case r.Method == http.MethodDelete:
		s.removeAll(w, r, at)
	default:
		fail(w, http.StatusMethodNotAllowed, metav1.StatusReasonMethodNotAllowed, r.Method+" "+r.URL.Path)
	}
}

// reply writes JSON.
func reply(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

// fail answers as the real one does, so that clients know the kind of error.
func fail(w http.ResponseWriter, code int, reason metav1.StatusReason, text string) {
	reply(w, code, metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: text,
	})
}

func notFound(w http.ResponseWriter, at place) {
	fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, fmt.Sprintf("%s %q not found", at.resource, at.name))
}
