package local_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/local/localtest"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

func TestTheRolesInOneProcessPassTheSuite(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	model := filepath.Join(root, "models", "tiny")
	if err := hub.WriteModel(model, hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: 1}); err != nil {
		t.Fatal(err)
	}
	origin, err := source.NewDir(source.DirOptions{Name: "folder", Root: filepath.Join(root, "models")})
	if err != nil {
		t.Fatal(err)
	}
	store, err := weightcache.Open(weightcache.Options{Dir: filepath.Join(root, "weights")})
	if err != nil {
		t.Fatal(err)
	}
	puller, err := weightcache.NewPuller(weightcache.PullerOptions{
		Store: store, Sources: []weightcache.Rule{{Source: origin, Refs: []string{filepath.Join(root, "models") + "/*"}}}, ScrubEvery: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- puller.Run(ctx) }()
	good := artifact.Ref{Scheme: artifact.SchemeDir, Name: model}
	refused := artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/other", Revision: "main"}
	localtest.Weights(t, local.NewInProcess(store, puller), good, refused)
	cancel()
	if err := errors.Join(<-done, store.Close()); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
