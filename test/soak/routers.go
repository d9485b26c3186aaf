package soak

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/units"
)

// DrainTimeout is how long the routers of a Fabric let streams end.
const DrainTimeout = 8 * time.Second

// routerProcess is one `hearth router`.
type routerProcess struct {
	*Front
	admin, usage, path string
	cfg                router.Config
	process            *rig.Process
	told               time.Time // to stop
	base, warm, end    vitals
}

// startRouter starts a router and waits until it can use every engine it may.
func (f *Fabric) startRouter(ctx context.Context, name string, secure bool) (*routerProcess, error) {
	dir := filepath.Join(f.rig.Dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	ingress, err := rig.FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	adminAddr, err := rig.FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	r := &routerProcess{admin: "http://" + adminAddr, usage: filepath.Join(dir, "usage.jsonl"), path: filepath.Join(f.rig.Dir, name+".yaml")}
	c := router.Default()
	c.Name = name
	c.Listen = router.Listen{Ingress: ingress, Admin: adminAddr, Socket: filepath.Join(dir, "r.sock")}
	c.Models, c.Pools = models(), pools()
	c.Metering.File, c.Metering.MaxFileBytes = r.usage, units.MiB
	c.Limits.BodyBytes = 8 * units.MiB
	c.Limits.HeaderTimeout, c.Limits.DrainTimeout = units.Duration(4*time.Second), units.Duration(DrainTimeout)
	for _, a := range f.agents {
		c.Nodes = append(c.Nodes, feed.Node{Name: a.name, Address: a.report})
	}
	r.Front = NewFront(name, "http://"+ingress, nil)
	if secure {
		c.IngressTLS = router.TLS{Cert: f.files.Cert, Key: f.files.Key, CA: f.files.CA}
		r.Front = NewFront(name, "https://"+ingress, f.roots)
	}
	r.cfg = c
	if err := writeConfig(r.path, router.Kind, c); err != nil {
		return nil, err
	}
	bin, err := f.rig.Hearth(ctx)
	if err != nil {
		return nil, err
	}
	if r.process, err = f.rig.Start(rig.Command{Name: name, Path: bin, Args: []string{"router", "--config", r.path}}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return r, rig.Until(ctx, name+" to be ready", func(ctx context.Context) (bool, error) {
		return rig.Answers(ctx, r.admin+"/readyz")
	}, r.process)
}

// stop tells a router to stop and waits until it has drained.
func (r *routerProcess) stop() error {
	r.told = time.Now()
	r.Retired.Store(true)
	r.process.Signal(syscall.SIGTERM)
	t := time.NewTimer(DrainTimeout + 30*time.Second)
	defer t.Stop()
	select {
	case <-r.process.Done():
	case <-t.C:
		r.process.Kill()
		return fmt.Errorf("stop %s: it had not ended 30 s after its drain time", r.Name)
	}
	r.CloseIdle()
	if err := r.process.Err(); err != nil {
		return fmt.Errorf("stop %s: %w: %s", r.Name, err, r.process.LogTail())
	}
	return nil
}

// Fronts are the routers that take requests now.
func (f *Fabric) Fronts() []*Front {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := []*Front{f.rolled.Front}
	for _, r := range f.lasting {
		list = append(list, r.Front)
	}
	return list
}

// roll starts the next router, sends the load there and lets the one before
// drain.
func (f *Fabric) roll(ctx context.Context, round int) error {
	next, err := f.startRouter(ctx, fmt.Sprint("rolled-", round), round%2 == 1)
	if err != nil {
		return err
	}
	f.mu.Lock()
	old := f.rolled
	f.rolled = next
	if old != nil {
		f.retired = append(f.retired, old)
	}
	f.mu.Unlock()
	if old == nil {
		return nil
	}
	return old.stop()
}

// routers are all that ever ran.
func (f *Fabric) routers() []*routerProcess {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := append([]*routerProcess{f.rolled}, f.lasting...)
	return append(list, f.retired...)
}
