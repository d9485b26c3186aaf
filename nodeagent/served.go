package nodeagent

import (
	"context"
	"log/slog"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// served is the lease that an endpoint holds on the artifact its engine reads.
type served struct {
	digest  artifact.Digest
	release func()
}

// leaseServed holds a lease for every configured endpoint that names a ref, so
// that nothing removes or evicts what an engine reads. It compares and acts on
// each change of the store; where a ref moved to another artifact the lease
// follows it once that one is Ready.
func (a *Agent) leaseServed(ctx context.Context) error {
	refs := map[string]artifact.Ref{} // by endpoint
	for _, e := range a.config.Endpoints {
		if ref, err := artifact.ParseRef(e.Ref); e.Ref != "" && err == nil {
			refs[e.Name] = ref
		}
	}
	if len(refs) == 0 {
		return nil
	}
	changed, unsubscribe := a.weights.Subscribe()
	defer unsubscribe()
	held := map[string]served{}
	defer func() {
		for _, s := range held {
			s.release()
		}
	}()
	for {
		known := map[artifact.Ref]weightcache.Status{}
		for _, s := range a.weights.Snapshot() {
			known[s.Ref] = s
		}
		for name, ref := range refs {
			digest, before := known[ref].Digest, held[name].digest
			if digest.IsZero() || digest == before || !before.IsZero() && known[ref].State != weightcache.Ready {
				continue
			}
			release, err := a.weights.Acquire(ctx, digest, "endpoint "+name)
			if err != nil {
				// Not known to the store yet; it signals again when it is.
				a.log.Debug("artifact of endpoint not leased yet", slog.String("endpoint", name), slog.Any("error", err))
				continue
			}
			if old := held[name].release; old != nil {
				old()
			}
			held[name] = served{digest: digest, release: release}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}
