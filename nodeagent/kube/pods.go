package kube

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
)

const (
	// podsEvery is the least time between two lists of pods that are told, and
	// podsAgain the pause before one that was not taken is told again, doubled up
	// to podsLast.
	podsEvery = time.Second
	podsAgain = time.Second
	podsLast  = time.Minute
	// remembered is how long a pod that was deleted is told on: what it moved may
	// be asked about later.
	remembered = 10 * time.Minute
)

// Annotations of a mirror pod, which the kubelet makes for a static one. Its
// cgroup has the hash as its UID.
const (
	hashAnnotation   = "kubernetes.io/config.hash"
	mirrorAnnotation = corev1.MirrorPodAnnotationKey
)

// PodsOptions are what Pods are told.
type PodsOptions struct {
	Client kubernetes.Interface
	Node   string // this node's name, as its Node object has it
	Log    *slog.Logger
}

// Pods follows the pods of this node: one list and watch for all who ask.
type Pods struct {
	opts     PodsOptions
	informer cache.SharedIndexInformer
	changed  chan struct{} // capacity 1

	mu      sync.Mutex
	deleted map[string]departed // by UID
}

// departed is a pod that was deleted.
type departed struct {
	pod netattr.Pod
	at  time.Time
}

// NewPods makes Pods; Run follows them.
func NewPods(opts PodsOptions) *Pods {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	p := &Pods{opts: opts, changed: make(chan struct{}, 1), deleted: map[string]departed{}}
	here := fields.OneTermEqualSelector("spec.nodeName", opts.Node).String()
	p.informer = coreinformers.NewFilteredPodInformer(opts.Client, metav1.NamespaceAll, 0, nil, func(o *metav1.ListOptions) { o.FieldSelector = here })
	// These fail for an informer that runs already, and this one does not.
	_ = p.informer.SetTransform(strip)
	_ = p.informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		opts.Log.Warn("pods of this node cannot be read, those known before stand", slog.Any("error", err))
	})
	p.watch(p.changed, p.forget)
	return p
}

// watch has a channel hold a signal after each change; gone is told of pods that
// were deleted, nil of none.
func (p *Pods) watch(changed chan struct{}, gone func(*corev1.Pod)) {
	signal := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	_, _ = p.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{ // it does not fail before the informer runs
		AddFunc:    func(any) { signal() },
		UpdateFunc: func(_, _ any) { signal() },
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			if pod, ok := object.(*corev1.Pod); ok && gone != nil {
				gone(pod)
			}
			signal()
		},
	})
}

// forget notes a pod that was deleted, in place of the one that went first where
// there are many.
func (p *Pods) forget(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.deleted) >= local.MaxPods {
		first := departed{at: time.Now()}
		for _, d := range p.deleted {
			if d.at.Before(first.at) {
				first = d
			}
		}
		delete(p.deleted, first.pod.UID)
	}
	of := podOf(pod)
	p.deleted[of.UID] = departed{of, time.Now()}
}

// Run follows the pods until ctx is done, and returns nil then. While the API
// server is silent those known before stand.
func (p *Pods) Run(ctx context.Context) error {
	p.informer.RunWithContext(ctx)
	return nil
}

// synced gives a channel that is closed once the first list is whole, or ctx is
// done.
func (p *Pods) synced(ctx context.Context) <-chan struct{} {
	synced := make(chan struct{})
	go func() {
		defer close(synced)
		cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced)
	}()
	return synced
}

// Data is whom Tell tells.
type Data interface {
	Snapshot() (local.State, bool)
	Subscribe() (changed <-chan struct{}, cancel func())
	SetPods(ctx context.Context, pods []netattr.Pod) error
}

// Tell says which pods there are, after each change and whenever the data role
// has started anew, at most once a second. It returns nil when ctx is done.
func (p *Pods) Tell(ctx context.Context, data Data) error {
	answers, end := data.Subscribe()
	defer end()
	synced := p.synced(ctx)
	defer func() { <-synced }()
	first := synced
	again := time.NewTimer(0)
	defer again.Stop()
	var told []netattr.Pod
	var epoch int64 // of the data role that has them; 0 where none has
	var due time.Time
	var said string
	pause, pending := podsAgain, true // something may have changed
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-first:
			first, pending = nil, true
		case <-p.changed:
			pending = true
		case <-answers:
		case <-again.C:
		}
		state, ok := data.Snapshot()
		if !ok || !p.informer.HasSynced() || !pending && epoch == state.Epoch {
			continue // it signals when it answers
		}
		if wait := time.Until(due); wait > 0 {
			again.Reset(wait)
			continue
		}
		list := p.list(time.Now())
		if epoch == state.Epoch && slices.Equal(list, told) {
			pending = false
			continue
		}
		if err := data.SetPods(ctx, list); err != nil {
			if text := err.Error(); text != said && ctx.Err() == nil {
				said = text
				p.opts.Log.Warn("pods of this node not told to the data role, trying again", slog.Any("error", err))
			}
			epoch, due, pause = 0, time.Now().Add(pause), min(2*pause, podsLast)
			again.Reset(time.Until(due))
			continue
		}
		told, epoch, pending, said, pause, due = list, state.Epoch, false, "", podsAgain, time.Now().Add(podsEvery)
	}
}

// list gives the pods by UID, and those that were deleted lately. Of more than
// local.MaxPods, engines and what is there come first, then the
// latest that were deleted.
func (p *Pods) list(now time.Time) []netattr.Pod {
	var list []netattr.Pod
	here := map[string]bool{}
	for _, object := range p.informer.GetStore().List() {
		if pod, ok := object.(*corev1.Pod); ok {
			of := podOf(pod)
			list = append(list, of)
			here[of.UID] = true
		}
	}
	byUID := func(a, b netattr.Pod) int { return cmp.Compare(a.UID, b.UID) }
	slices.SortFunc(list, func(a, b netattr.Pod) int {
		if a.Engine != b.Engine {
			if a.Engine {
				return -1
			}
			return 1
		}
		return byUID(a, b)
	})
	p.mu.Lock()
	var gone []departed
	for uid, d := range p.deleted {
		if here[uid] || now.Sub(d.at) > remembered {
			delete(p.deleted, uid)
			continue
		}
		gone = append(gone, d)
	}
	p.mu.Unlock()
	slices.SortFunc(gone, func(a, b departed) int { return cmp.Or(b.at.Compare(a.at), byUID(a.pod, b.pod)) })
	for _, d := range gone {
		list = append(list, d.pod)
	}
	list = list[:min(len(list), local.MaxPods)]
	slices.SortFunc(list, byUID)
	return list
}

// podOf is a pod as the data role knows it: a static one by the UID that its
// cgroup has.
func podOf(pod *corev1.Pod) netattr.Pod {
	uid := string(pod.UID)
	if mirror, is := pod.Annotations[mirrorAnnotation]; is {
		uid = cmp.Or(pod.Annotations[hashAnnotation], mirror, uid)
	}
	_, engine := pod.Labels[EngineLabel]
	return netattr.Pod{UID: uid, Namespace: pod.Namespace, Name: pod.Name, Engine: engine}
}

// strip keeps of a pod what podOf reads and, of an engine, what enginesOf does.
func strip(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	kept := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, Annotations: map[string]string{},
	}}
	keep := func(keys ...string) {
		for _, key := range keys {
			if value := pod.Annotations[key]; value != "" {
				kept.Annotations[key] = value
			}
		}
	}
	keep(hashAnnotation, mirrorAnnotation)
	kind, engine := pod.Labels[EngineLabel]
	if !engine {
		return kept, nil
	}
	kept.Labels = map[string]string{EngineLabel: kind}
	kept.Status = corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP}
	keep(PortAnnotation, AcceleratorAnnotation)
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range list {
			if len(list[i].Ports) > 0 {
				kept.Spec.Containers = append(kept.Spec.Containers, corev1.Container{Name: list[i].Name, Ports: list[i].Ports})
			}
		}
	}
	return kept, nil
}
