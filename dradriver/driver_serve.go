package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/runtime/schema"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// checkSockets is how often the sockets are looked at, besides after a
	// change in their folders that the kernel tells of.
	checkSockets = 10 * time.Second
	// serveAgain is how often a driver that does not serve tries to.
	serveAgain = time.Second
	// settle is how long it leaves a folder alone in which something happens: who
	// removes it is not to find new sockets meanwhile.
	settle = 250 * time.Millisecond

	pluginSocket    = "dra.sock"
	registrarSocket = Name + "-reg.sock"
)

// ErrServed says that another agent serves the kubelet in this driver's name: a
// node has one.
var ErrServed = errors.New("another agent serves the kubelet on this node")

// ErrUnmounted says that a folder of the kubelet was removed from the node while
// it is mounted here: a container that is started anew gets the new one.
var ErrUnmounted = errors.New("was removed from the node, and what is mounted here is never seen again")

// presence is what people may know of how the kubelet reaches the driver.
type presence struct {
	mu         sync.Mutex
	registered bool   // a kubelet has said so, of the sockets that are served now; guarded by mu
	problem    string // guarded by mu
}

func (p *presence) set(registered bool, problem string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.registered, p.problem = registered, problem
}

// awaits says why no kubelet has registered the driver, where none has.
func (p *presence) awaits(problem string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.registered {
		p.problem = problem
	}
}

// Claimed is closed once this process is the one that serves this node's kubelet.
func (d *Driver) Claimed() <-chan struct{} { return d.claimed }

// Registered reports whether a kubelet has registered the driver on the sockets
// that it serves now; where it has not, problem says why if anything is known.
func (d *Driver) Registered() (ok bool, problem string) {
	d.presence.mu.Lock()
	defer d.presence.mu.Unlock()
	return d.presence.registered, d.presence.problem
}

// service is the driver's two sockets: that on which the kubelet calls, and that
// by which it finds it. It is of the goroutine of Run.
type service struct {
	d       *Driver
	claim   *os.File // the driver's own folder, locked; nil: not served
	plugin  *kubeletplugin.Helper
	sockets []*socket
}

// take makes the driver's own folder this process's, so that no other agent
// serves the kubelet or has touched what is prepared; one that does is left alone.
func (s *service) take(ctx context.Context) error {
	o := &s.d.o
	for _, dir := range []string{o.PluginDir, o.RegistrarDir} {
		if err := mounted(dir); err != nil {
			return fmt.Errorf("serve kubelet: %w", err)
		}
	}
	if err := os.MkdirAll(o.PluginDir, 0o750); err != nil {
		return fmt.Errorf("serve kubelet: %w", err)
	}
	claim, err := lockFolder(o.PluginDir)
	if err != nil {
		return fmt.Errorf("serve kubelet: %w", err)
	}
	// An agent with a folder of its own elsewhere would be found by this one.
	if err := unanswered(ctx, filepath.Join(o.RegistrarDir, registrarSocket)); err != nil {
		unlockFolder(claim)
		return fmt.Errorf("serve kubelet: %w", err)
	}
	s.claim = claim
	s.d.claimedOnce.Do(func() { close(s.d.claimed) })
	return nil
}

// start serves both sockets in the folder that take took.
func (s *service) start(ctx context.Context) error {
	o := &s.d.o
	// The library leaves its first server running where the second cannot listen.
	for _, path := range []string{filepath.Join(o.PluginDir, pluginSocket), filepath.Join(o.RegistrarDir, registrarSocket)} {
		l, err := listenAlone(ctx, path)
		if err != nil {
			s.stop()
			return fmt.Errorf("serve kubelet: %w", err)
		}
		s.sockets = append(s.sockets, l)
	}
	opened := func(at int) func(context.Context, string) (net.Listener, error) {
		return func(context.Context, string) (net.Listener, error) { return s.sockets[at], nil }
	}
	var err error
	s.plugin, err = kubeletplugin.Start(ctx, s.d,
		kubeletplugin.DriverName(Name),
		kubeletplugin.KubeClient(o.Kube),
		kubeletplugin.NodeName(o.Node),
		kubeletplugin.PluginDataDirectoryPath(o.PluginDir),
		kubeletplugin.RegistrarDirectoryPath(o.RegistrarDir),
		kubeletplugin.PluginSocket(pluginSocket),
		kubeletplugin.PluginListener(opened(0)),
		kubeletplugin.RegistrarSocketFilename(registrarSocket),
		kubeletplugin.RegistrarListener(opened(1)),
		kubeletplugin.CDIDirectory(o.CDIDir),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.MetadataFileOps(metadataFiles()),
		// The library's own order is one lock for all claims, in which a call
		// waits past its deadline. Calls are ordered by claim here instead, around
		// all that the library does for one (driver_calls.go).
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(s.d.intercept),
		kubeletplugin.NodeV1(true),
		kubeletplugin.NodeV1beta1(true),
	)
	if err != nil {
		s.stop()
		return fmt.Errorf("serve kubelet: %w", err)
	}
	return nil
}

// stop ends what is served; calls that run are cut, and the kubelet asks again.
func (s *service) stop() {
	if s.plugin != nil {
		s.plugin.Stop()
	}
	for _, socket := range s.sockets {
		_ = socket.Close() // of a start that failed half way
	}
	if s.claim != nil {
		unlockFolder(s.claim)
	}
	s.plugin, s.sockets, s.claim = nil, nil, nil
}

// whole gives nil while the kubelet finds both sockets where they are served.
func (s *service) whole() error {
	if s.claim == nil {
		return errors.New("nothing is served")
	}
	if same, err := isAt(s.claim, s.d.o.PluginDir); err != nil || !same {
		return fmt.Errorf("folder %s is gone", s.d.o.PluginDir)
	}
	for _, socket := range s.sockets {
		if !socket.there() {
			return fmt.Errorf("socket %s is gone", socket.path)
		}
	}
	return nil
}

// keep serves the sockets anew whenever they or their folders go, until ctx is
// done. What can be cured by a new process alone is an error.
func (s *service) keep(ctx context.Context) error {
	folders := watchFolders(s.d.o.PluginDir, s.d.o.RegistrarDir)
	defer folders.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	settling, lost := false, ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-folders.errors(): // of events that are lost; the slow check finds what they told of
			s.d.o.Log.Debug("the kubelet's folders are not all watched", slog.Any("error", err))
		case <-folders.changed():
			if !settling {
				settling = true
				timer.Reset(settle)
			}
		case <-timer.C:
			settling = false
			folders.add() // those that were made again are others
			var err error
			if lost, err = s.check(ctx, lost); err != nil {
				return err
			}
			if lost == "" {
				timer.Reset(checkSockets)
			} else {
				timer.Reset(serveAgain)
			}
		}
	}
}

// check serves the sockets anew where they are not whole. It is told, and gives,
// why nothing is served, "" where all is well.
func (s *service) check(ctx context.Context, before string) (lost string, err error) {
	if err := s.whole(); err == nil {
		return "", nil
	} else if lost = before; before == "" {
		lost = err.Error()
		s.d.o.Log.Warn("the kubelet's way to the driver is gone, serving it anew", slog.String("reason", lost))
	}
	s.d.presence.set(false, "the kubelet cannot reach the driver: "+lost)
	s.stop()
	if err = s.take(ctx); err == nil {
		err = s.start(ctx)
	}
	switch {
	case err == nil:
		s.d.o.Log.Info("the kubelet's way to the driver is there again")
		s.d.presence.awaits("no kubelet has registered the driver since its sockets were made again: does it run?")
		return "", nil
	case errors.Is(err, ErrUnmounted), errors.Is(err, ErrServed) && err.Error() == before:
		// Another agent took the node and stays: what this process publishes must
		// not stand beside what that one does.
		return "", err
	case err.Error() != lost:
		lost = err.Error()
		s.d.o.Log.Warn("the kubelet cannot be served yet, trying again", slog.String("reason", lost))
		s.d.presence.set(false, "the kubelet cannot reach the driver: "+lost)
	}
	return lost, nil
}

// folders tells of changes in folders and of their coming and going. Without
// the kernel's help it tells of nothing, and the slow check stands alone.
type folders struct {
	watcher *fsnotify.Watcher // nil: none
	names   []string
}

func watchFolders(names ...string) *folders {
	f := &folders{names: names}
	for _, name := range names {
		f.names = append(f.names, filepath.Dir(name))
	}
	// A node may have no inotify instance left.
	f.watcher, _ = fsnotify.NewWatcher()
	return f
}

// add watches those that are there; one that is watched stays so.
func (f *folders) add() {
	if f.watcher == nil {
		return
	}
	for _, name := range f.names {
		_ = f.watcher.Add(name)
	}
}

func (f *folders) changed() <-chan fsnotify.Event {
	if f.watcher == nil {
		return nil
	}
	return f.watcher.Events
}

// errors is read because the watcher waits for that.
func (f *folders) errors() <-chan error {
	if f.watcher == nil {
		return nil
	}
	return f.watcher.Errors
}

func (f *folders) close() {
	if f.watcher != nil {
		_ = f.watcher.Close()
	}
}
