package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
)

// What a pod says of the engine in it.
const (
	// EngineLabel marks a pod as an engine; its value is one of endpoints.Engines.
	EngineLabel = identity.Domain + "/engine"
	// PortAnnotation is the engine's port, by the name or number of a
	// container's port. Without it that is the port named http, else the first.
	PortAnnotation = identity.Domain + "/port"
	// AcceleratorAnnotation is the class for usage records.
	AcceleratorAnnotation = identity.Domain + "/accelerator"
)

// EnginesOptions are what Engines are told.
type EnginesOptions struct {
	// Pods are those of this node. They do not run yet.
	Pods *Pods
	// Devices gives the ids of the devices that a pod, by its UID, has by claims.
	Devices func(podUID string) []string
	// DevicesChanged holds a signal after Devices gives others; nil never does.
	DevicesChanged <-chan struct{}
	// Set takes the engines of this node's pods, each time all of them.
	Set func([]endpoints.Endpoint) error
	// Room is how many engines Set takes.
	Room int
	Log  *slog.Logger // nil discards
}

// Engines watches for the pods of this node that are engines, and tells where they
// answer. What they do there is read by others.
type Engines struct {
	opts    EnginesOptions
	changed chan struct{} // capacity 1
	told    []endpoints.Endpoint
	leftOut int
	odd     map[string]string // by pod, why it is no engine
}

// NewEngines makes Engines; Run tells of them.
func NewEngines(opts EnginesOptions) *Engines {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	e := &Engines{opts: opts, changed: make(chan struct{}, 1)}
	opts.Pods.watch(e.changed, nil)
	return e
}

// Run tells of engines until ctx is done, and returns nil then; the pods are to
// run beside it.
func (e *Engines) Run(ctx context.Context) error {
	// The last pod of the first list may be heard of before the list counts as whole.
	synced := e.opts.Pods.synced(ctx)
	defer func() { <-synced }()
	first := synced
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-first:
			first = nil
		case <-e.changed:
		case <-e.opts.DevicesChanged:
		}
		if e.opts.Pods.informer.HasSynced() {
			e.tell()
		}
	}
}

// tell hands on the engines where they differ from what was told.
func (e *Engines) tell() {
	list, odd := enginesOf(e.opts.Pods.informer.GetStore().List(), e.opts.Devices)
	for name, reason := range odd {
		if e.odd[name] != reason {
			e.opts.Log.Warn("pod is labelled as an engine and is none", slog.String("pod", name), slog.String("reason", reason))
		}
	}
	e.odd = odd
	leftOut := max(len(list)-e.opts.Room, 0)
	list = list[:len(list)-leftOut]
	if leftOut > 0 && leftOut != e.leftOut {
		e.opts.Log.Warn("more engines than a node may have, the last by name are left out", slog.Int("left_out", leftOut), slog.Int("limit", e.opts.Room))
	}
	e.leftOut = leftOut
	if slices.EqualFunc(list, e.told, sameEndpoint) {
		return
	}
	if err := e.opts.Set(list); err != nil {
		e.opts.Log.Error("engines of pods not taken, those before stand", slog.Any("error", err))
		return
	}
	e.told = list
}

func sameEndpoint(a, b endpoints.Endpoint) bool {
	return a.Name == b.Name && a.URL == b.URL && a.Engine == b.Engine && a.Pod == b.Pod && a.Accelerator == b.Accelerator && slices.Equal(a.Devices, b.Devices)
}

// enginesOf gives the engines of pods by name, and by pod why one is none.
func enginesOf(objects []any, devices func(string) []string) (list []endpoints.Endpoint, odd map[string]string) {
	odd = map[string]string{}
	for _, object := range objects {
		pod, ok := object.(*corev1.Pod)
		if !ok {
			continue
		}
		if _, engine := pod.Labels[EngineLabel]; !engine || pod.Status.PodIP == "" || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		name, kind := pod.Namespace+"/"+pod.Name, pod.Labels[EngineLabel]
		if !slices.Contains(endpoints.Engines, kind) {
			odd[name] = fmt.Sprintf("label %s is %q, want one of %v", EngineLabel, kind, endpoints.Engines)
			continue
		}
		port := enginePort(pod)
		if port == 0 {
			odd[name] = "it has no such port; annotation " + PortAnnotation + " names one"
			continue
		}
		e := endpoints.Endpoint{
			// A namespace has no dot, so that no two pods share a name.
			Name: "pod." + pod.Namespace + "." + pod.Name, Pod: string(pod.UID), Engine: kind,
			URL: "http://" + net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port)), Accelerator: pod.Annotations[AcceleratorAnnotation],
		}
		if devices != nil {
			e.Devices = devices(e.Pod)
		}
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b endpoints.Endpoint) int { return cmp.Compare(a.Name, b.Name) })
	return list, odd
}

// enginePort finds the engine's port, 0 where there is none.
func enginePort(pod *corev1.Pod) int {
	asked := pod.Annotations[PortAnnotation]
	if number, err := strconv.Atoi(asked); err == nil {
		if number < 1 || number > 65535 {
			return 0
		}
		return number
	}
	first := 0
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Protocol != corev1.ProtocolTCP && p.Protocol != "" {
				continue
			}
			if p.Name == cmp.Or(asked, "http") {
				return int(p.ContainerPort)
			}
			if first == 0 {
				first = int(p.ContainerPort)
			}
		}
	}
	if asked != "" {
		return 0
	}
	return first
}
