package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin, from the ledger
// alone. What the data role cannot release now is owed, and no error.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	uids := make([]string, 0, len(claims))
	for _, claim := range claims {
		uids = append(uids, string(claim.UID))
	}
	ended := d.calls.begin(CallUnprepare)
	_, leave, err := d.arrive(ctx, uids, rankUnprepare)
	if err != nil {
		ended(len(claims), len(claims), 0)
		return nil, fmt.Errorf("unprepare claims: %w", err)
	}
	defer leave()
	errs := d.undoAll(ctx, uids)
	results := make(map[types.UID]error, len(claims))
	failed := 0
	for i, claim := range claims {
		if errs[i] != nil {
			failed++
			errs[i] = fmt.Errorf("unprepare claim %s/%s: %w", claim.Namespace, claim.Name, errs[i])
		}
		results[claim.UID] = errs[i]
	}
	ended(len(claims), failed, 0)
	return results, nil
}

// undo ends one claim whose turn the caller has.
func (d *Driver) undo(ctx context.Context, uid string) error {
	return d.undoAll(ctx, []string{uid})[0]
}

// undoAll ends claims whose turns the caller has: tombstone, CDI file, releases.
// Each step may be done already; what fails is done by the next call, or by
// recovery.
func (d *Driver) undoAll(ctx context.Context, uids []string) []error {
	for _, uid := range uids {
		if had, known := d.o.Ledger.Get(uid); known && (len(had.Weights) > 0 || had.KV != nil) || !known {
			d.owed.add(uid)
		}
	}
	errs := d.o.Ledger.Tombstone(ctx, uids...)
	for i, uid := range uids {
		if errs[i] != nil {
			continue
		}
		d.pulls.close(uid)
		d.answers.forget(uid)
		if err := d.o.CDI.Remove(uid); err != nil {
			errs[i] = err
		}
	}
	d.pulls.taken()
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	for i, uid := range uids {
		if errs[i] != nil {
			continue
		}
		if err := d.releaseOwed(ctx, uid); err != nil {
			d.o.Log.Info("what a claim held is released later", slog.String("claim", uid), slog.Any("reason", err))
		}
	}
	return errs
}

// releaseOwed releases what a claim that is gone may hold, if it may hold any.
func (d *Driver) releaseOwed(ctx context.Context, uid string) error {
	if !d.owed.has(uid) {
		return nil
	}
	var errs []error
	var released []ledger.Held
	// A node without the one or the other has nothing of it to release.
	if err := d.releaseWeights(ctx, uid); err != nil {
		errs = append(errs, err)
	} else {
		released = append(released, ledger.HeldWeights)
	}
	if err := d.releaseKV(ctx, uid); err != nil {
		errs = append(errs, err)
	} else {
		released = append(released, ledger.HeldKV)
	}
	d.o.Ledger.Released(ctx, uid, released...)
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	d.owed.remove(uid)
	return nil
}

func (d *Driver) releaseWeights(ctx context.Context, uid string) error {
	if d.o.Cache == nil {
		return nil
	}
	return d.o.Cache.Release(ctx, uid)
}

func (d *Driver) releaseKV(ctx context.Context, uid string) error {
	if d.o.KV == nil {
		return nil
	}
	return d.o.KV.Release(ctx, uid)
}

// maxOwing bounds the claims that are remembered to owe a release; recovery
// finds the others by what they hold.
const maxOwing = 4096

// owing are the claims that are gone and may hold something yet.
type owing struct {
	mu     sync.Mutex
	claims map[string]bool
}

func newOwing(gone []ledger.Entry) *owing {
	o := &owing{claims: map[string]bool{}}
	for i := range gone {
		if len(gone[i].Owed) > 0 {
			o.add(gone[i].UID)
		}
	}
	return o
}

func (o *owing) add(uid string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.claims) < maxOwing {
		o.claims[uid] = true
	}
}

func (o *owing) remove(uid string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.claims, uid)
}

func (o *owing) has(uid string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.claims[uid]
}

func (o *owing) all() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(maps.Keys(o.claims))
}
