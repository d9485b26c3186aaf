package nodeagent

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// lendAgain is the pause before leases that could not be had are asked for again.
const lendAgain = time.Second

// lendServed has every configured endpoint that names a ref hold a lease, so
// that nothing removes or evicts what an engine reads. It compares and acts on
// each change of the store, and anew where the data role has started again;
// where a ref moved to another artifact the lease follows it once that one is
// Ready.
func (a *Agent) lendServed(ctx context.Context) error {
	refs := map[string]artifact.Ref{} // by holder
	for _, e := range a.config.Endpoints {
		if ref, err := artifact.ParseRef(e.Ref); e.Ref != "" && err == nil {
			refs["endpoint "+e.Name] = ref
		}
	}
	if len(refs) == 0 && a.remote == nil {
		return nil
	}
	changed, unsubscribe := a.data.Subscribe()
	defer unsubscribe()
	again := time.NewTimer(0)
	defer again.Stop()
	held := map[string]artifact.Digest{} // by holder
	settled, epoch := false, int64(0)    // held is what the data role of that epoch has
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again.C:
		}
		state, ok := a.data.Snapshot()
		if !ok {
			continue // it signals when it answers
		}
		want := wanted(refs, held, state.Models)
		if settled && epoch == state.Epoch && maps.Equal(want, held) {
			continue
		}
		missing, err := a.data.Lend(ctx, want)
		if err != nil {
			a.log.Warn("artifacts of endpoints not leased, trying again", slog.Any("error", err))
			settled = false
			again.Reset(lendAgain)
			continue
		}
		settled, epoch = true, state.Epoch
		for holder, digest := range want {
			if !slices.Contains(missing, holder) {
				held[holder] = digest
				continue
			}
			if held[holder] == digest {
				delete(held, holder) // it was lost with the store that had it
			}
			// Not known to the store yet; it signals again when it is.
			a.log.Debug("artifact of endpoint not leased yet", slog.String("endpoint", holder))
		}
	}
}

// wanted gives what each holder is to hold: what its ref means, once that is
// Ready or it holds nothing yet.
func wanted(refs map[string]artifact.Ref, held map[string]artifact.Digest, models []weightcache.Status) map[string]artifact.Digest {
	known := map[artifact.Ref]weightcache.Status{}
	for _, s := range models {
		known[s.Ref] = s
	}
	want := maps.Clone(held)
	for holder, ref := range refs {
		s := known[ref]
		if !s.Digest.IsZero() && (held[holder].IsZero() || s.State == weightcache.Ready) {
			want[holder] = s.Digest
		}
	}
	return want
}
