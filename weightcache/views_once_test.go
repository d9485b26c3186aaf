package weightcache

import (
	"io/fs"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/hearth-dev/hearth/durable"
)

// privateDirs counts the directories in which views are made, and keeps each
// maker waiting before its directory until open closes.
type privateDirs struct {
	durable.FS
	open chan struct{}
	made atomic.Int64
}

func (p *privateDirs) Mkdir(path string, perm fs.FileMode) error {
	if strings.HasPrefix(filepath.Base(path), ".tmp-") {
		p.made.Add(1)
		<-p.open
	}
	return p.FS.Mkdir(path, perm)
}

func TestTwoThatPublishTheSameViewMakeItOnce(t *testing.T) {
	t.Parallel()
	for kind, publish := range map[string]func(*rig) error{
		"flat": func(s *rig) error { _, err := s.store.FlatView(s.store.Manifests()[0].Digest); return err },
		"hub":  func(s *rig) error { _, err := s.store.HubView(s.store.Manifests()[0]); return err },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				counted := &privateDirs{FS: durable.OS, open: make(chan struct{})}
				s := newRig(t, newMemSource(model(1, testSegment)), func(o *Options, _ *PullerOptions) { o.FS = counted })
				s.ensure(t)
				ended := make(chan error, 2)
				for range 2 {
					go func() { ended <- publish(s) }()
				}
				synctest.Wait()
				if n := counted.made.Load(); n != 1 {
					t.Errorf("%d callers make the view at once, want 1", n)
				}
				close(counted.open)
				for range 2 {
					if err := <-ended; err != nil {
						t.Error(err)
					}
				}
				want := map[string]int64{"flat": 1, "hub": 2}[kind] // a hub view has a cache and a repository
				if n := counted.made.Load(); n != want {
					t.Errorf("%d private directories for one view, want %d", n, want)
				}
			})
		})
	}
}
