package kubeapi

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes/scheme"
)

// maxBody bounds a request's body, in bytes, as the real one does.
const maxBody = 3 << 20

func (s *Server) get(w http.ResponseWriter, at place) {
	s.mu.Lock()
	u := s.objects[at]
	s.mu.Unlock()
	if u == nil {
		notFound(w, at)
		return
	}
	reply(w, http.StatusOK, u)
}

// chooser says which objects a list or watch is about.
type chooser struct {
	at     place
	labels labels.Selector
	fields fields.Selector
}

func newChooser(r *http.Request, at place) (chooser, error) {
	c := chooser{at: at}
	var err error
	if c.labels, err = labels.Parse(r.URL.Query().Get("labelSelector")); err != nil {
		return c, err
	}
	c.fields, err = fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	return c, err
}

func (c chooser) wants(at place, u *unstructured.Unstructured) bool {
	if at.prefix != c.at.prefix || at.resource != c.at.resource || c.at.namespace != "" && at.namespace != c.at.namespace {
		return false
	}
	if !c.labels.Matches(labels.Set(u.GetLabels())) {
		return false
	}
	for _, f := range c.fields.Requirements() {
		got, _, err := unstructured.NestedString(u.Object, strings.Split(f.Field, ".")...)
		if err != nil || (got == f.Value) != (f.Operator != "!=") {
			return false
		}
	}
	return true
}

// chooseLocked gives the objects by namespace and name.
func (s *Server) chooseLocked(c chooser) []*unstructured.Unstructured {
	found := []*unstructured.Unstructured{}
	for at, u := range s.objects {
		if c.wants(at, u) {
			found = append(found, u)
		}
	}
	slices.SortFunc(found, func(a, b *unstructured.Unstructured) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	return found
}

func (at place) apiVersion() string {
	return strings.TrimPrefix(strings.TrimPrefix(at.prefix, "/apis/"), "/api/")
}

func (s *Server) list(w http.ResponseWriter, r *http.Request, at place) {
	c, err := newChooser(r, at)
	if err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	s.mu.Lock()
	found, version := s.chooseLocked(c), s.version
	s.mu.Unlock()
	reply(w, http.StatusOK, map[string]any{
		"apiVersion": at.apiVersion(), "kind": kinds[at.resource] + "List",
		"metadata": map[string]string{"resourceVersion": strconv.FormatInt(version, 10)}, "items": found,
	})
}

// watch streams changes after a version, and before them all there is where the
// client asks for initial events or names no version.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, at place) {
	c, err := newChooser(r, at)
	query := r.URL.Query()
	from, versionErr := strconv.ParseInt(query.Get("resourceVersion"), 10, 64)
	if err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	initial := query.Get("sendInitialEvents") == "true"
	s.mu.Lock()
	all := initial || versionErr != nil || from == 0
	if !all && len(s.events) > 0 && from+1 < s.events[0].version {
		s.mu.Unlock()
		fail(w, http.StatusGone, metav1.StatusReasonExpired, "too old resource version")
		return
	}
	var first []*unstructured.Unstructured
	if all {
		first, from = s.chooseLocked(c), s.version
	}
	s.mu.Unlock()
	stream := &stream{w: w, encoder: json.NewEncoder(w)}
	w.Header().Set("Content-Type", "application/json")
	for _, u := range first {
		stream.send("ADDED", u)
	}
	if initial {
		end := &unstructured.Unstructured{Object: map[string]any{"apiVersion": at.apiVersion(), "kind": kinds[at.resource], "metadata": map[string]any{
			"resourceVersion": strconv.FormatInt(from, 10), "annotations": map[string]any{metav1.InitialEventsAnnotationKey: "true"},
		}}}
		stream.send("BOOKMARK", end)
	}
	stream.flush()
	for stream.err == nil {
		s.mu.Lock()
		start, _ := slices.BinarySearchFunc(s.events, from+1, func(e event, v int64) int { return int(e.version - v) })
		news, changed := slices.Clone(s.events[start:]), s.changed
		s.mu.Unlock()
		for _, e := range news {
			if from = e.version; c.wants(e.place, e.object) {
				stream.send(e.kind, e.object)
			}
		}
		stream.flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// stream is a watch's answer.
type stream struct {
	w       http.ResponseWriter
	encoder *json.Encoder
	err     error
}

func (s *stream) send(kind string, u *unstructured.Unstructured) {
	if s.err == nil {
		s.err = s.encoder.Encode(map[string]any{"type": kind, "object": u})
	}
}

func (s *stream) flush() {
	if s.err == nil {
		s.err = http.NewResponseController(s.w).Flush()
	}
}

// body reads an object that a client sent, as JSON or protobuf.
func body(w http.ResponseWriter, r *http.Request) *unstructured.Unstructured {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil && strings.HasPrefix(r.Header.Get("Content-Type"), "application/vnd.kubernetes.protobuf") {
		data, err = fromProtobuf(data)
	}
	u := &unstructured.Unstructured{}
	if err == nil {
		err = u.UnmarshalJSON(data)
	}
	if err != nil {
		fail(w, http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType, "want an object: "+err.Error())
		return nil
	}
	return u
}

// fromProtobuf turns an object into JSON.
func fromProtobuf(data []byte) ([]byte, error) {
	object, kind, err := scheme.Codecs.UniversalDeserializer().Decode(data, nil, nil)
	if err != nil {
		return nil, err
	}
	object.GetObjectKind().SetGroupVersionKind(*kind)
	return json.Marshal(object)
}

func (s *Server) create(w http.ResponseWriter, r *http.Request, at place) {
	u := body(w, r)
	if u == nil {
		return
	}
	if u.GetName() == "" && u.GetGenerateName() != "" {
		u.SetName(u.GetGenerateName() + utilrand.String(5))
	}
	if at.name = u.GetName(); at.name == "" {
		fail(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "metadata.name: required")
		return
	}
	if at.namespace != "" {
		u.SetNamespace(at.namespace)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects[at] != nil {
		fail(w, http.StatusConflict, metav1.StatusReasonAlreadyExists, at.resource+" "+at.name+" already exists")
		return
	}
	if r.URL.Query().Get("dryRun") == "" {
		s.storeLocked(at, u)
	}
	reply(w, http.StatusCreated, u)
}

// update replaces an object; a client that saw another version is refused.
func (s *Server) update(w http.ResponseWriter, r *http.Request, at place) {
	u := body(w, r)
	if u == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replaceLocked(w, r, at, u)
}

func (s *Server) replaceLocked(w http.ResponseWriter, r *http.Request, at place, u *unstructured.Unstructured) {
	old := s.objects[at]
	switch {
	case old == nil:
		notFound(w, at)
		return
	case u.GetResourceVersion() != "" && u.GetResourceVersion() != old.GetResourceVersion(),
		u.GetUID() != "" && u.GetUID() != old.GetUID():
		fail(w, http.StatusConflict, metav1.StatusReasonConflict, at.resource+" "+at.name+" has been modified")
		return
	}
	u.SetUID(old.GetUID())
	u.SetCreationTimestamp(old.GetCreationTimestamp())
	if r.URL.Query().Get("dryRun") == "" {
		s.storeLocked(at, u)
	}
	reply(w, http.StatusOK, u)
}

// patch merges; an apply is taken for a merge, and makes what is absent.
func (s *Server) patch(w http.ResponseWriter, r *http.Request, at place) {
	change, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.objects[at]
	apply := strings.HasPrefix(r.Header.Get("Content-Type"), "application/apply-patch")
	u := &unstructured.Unstructured{}
	if old == nil && apply {
		if err := u.UnmarshalJSON(change); err != nil {
			fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
			return
		}
		s.storeLocked(at, u)
		reply(w, http.StatusCreated, u)
		return
	}
	if old == nil {
		notFound(w, at)
		return
	}
	data, err := old.MarshalJSON()
	if err == nil {
		data, err = jsonpatch.MergePatch(data, change)
	}
	if err == nil {
		err = u.UnmarshalJSON(data)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	s.replaceLocked(w, r, at, u)
}

func (s *Server) remove(w http.ResponseWriter, at place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.deleteLocked(at)
	if u == nil {
		notFound(w, at)
		return
	}
	reply(w, http.StatusOK, u)
}

// removeAll removes what a list would show.
func (s *Server) removeAll(w http.ResponseWriter, r *http.Request, at place) {
	c, err := newChooser(r, at)
	if err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.chooseLocked(c) {
		s.deleteLocked(place{at.prefix, u.GetNamespace(), at.resource, u.GetName()})
	}
	reply(w, http.StatusOK, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess})
}
