package stock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// KV is a stock.KV whose node is a directory.
type KV struct {
	dir   string
	space stock.Space

	mu    sync.Mutex
	taken map[string]stock.Reservation
	down  bool
}

// OpenKV opens the node that a directory is, with the space given.
func OpenKV(dir string, space stock.Space) (*KV, error) {
	k := &KV{dir: dir, space: space, taken: map[string]stock.Reservation{}}
	for _, sub := range []string{"reserved", "claims"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("open KV: %w", err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "reserved/*.json"))
	if err != nil {
		return nil, fmt.Errorf("open KV: %w", err)
	}
	for _, file := range files {
		var r stock.Reservation
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &r)
		}
		if err != nil {
			return nil, fmt.Errorf("open KV: %w", err)
		}
		k.taken[r.Claim] = r
	}
	return k, nil
}

// SetDown makes every call fail as it does while the data role is away.
func (k *KV) SetDown(down bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.down = down
}

// Space implements stock.KV.
func (k *KV) Space() (stock.Space, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.space, !k.down
}

// Subscribe implements stock.KV; the space never changes.
func (k *KV) Subscribe() (<-chan struct{}, func()) {
	return make(chan struct{}, 1), func() {}
}

// Reserve implements stock.KV.
func (k *KV) Reserve(ctx context.Context, r stock.Reservation) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.readyLocked(ctx); err != nil {
		return "", fmt.Errorf("reserve KV: %w", err)
	}
	if r.Claim == "" || strings.ContainsAny(r.Claim, "/\x00") || r.Claim == "." || r.Claim == ".." {
		return "", fmt.Errorf("reserve KV: %q is no claim", r.Claim)
	}
	dir := filepath.Join(k.dir, "claims", r.Claim)
	if had, ok := k.taken[r.Claim]; ok {
		if had != r {
			return "", fmt.Errorf("reserve KV: claim %s has %+v already", r.Claim, had)
		}
		return dir, os.MkdirAll(dir, 0o755)
	}
	if err := k.fitsLocked(r); err != nil {
		return "", err
	}
	data, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("reserve KV: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("reserve KV: %w", err)
	}
	if err := os.WriteFile(k.file(r.Claim), data, 0o600); err != nil {
		return "", fmt.Errorf("reserve KV: %w", err)
	}
	k.taken[r.Claim] = r
	return dir, nil
}

func (k *KV) fitsLocked(r stock.Reservation) error {
	left, own := k.space, stock.Space{Memory: k.space.NamespaceMemory, NVMe: k.space.NamespaceNVMe}
	for _, other := range k.taken {
		left.Memory, left.NVMe = left.Memory-other.Memory, left.NVMe-other.NVMe
		if other.Namespace == r.Namespace {
			own.Memory, own.NVMe = own.Memory-other.Memory, own.NVMe-other.NVMe
		}
	}
	for _, c := range []struct {
		name       string
		asked      units.Bytes
		left, own  units.Bytes
		ownBounded bool
	}{
		{"memory", r.Memory, left.Memory, own.Memory, k.space.NamespaceMemory > 0},
		{"nvme", r.NVMe, left.NVMe, own.NVMe, k.space.NamespaceNVMe > 0},
	} {
		switch {
		case c.asked > c.left:
			return fmt.Errorf("reserve KV: %w: %s of %s asked for, %s left on the node", stock.ErrNoSpace, c.asked, c.name, c.left)
		case c.ownBounded && c.asked > c.own:
			return fmt.Errorf("reserve KV: %w: %s of %s asked for, %s left for namespace %q", stock.ErrNoSpace, c.asked, c.name, c.own, r.Namespace)
		}
	}
	return nil
}

// Release implements stock.KV.
func (k *KV) Release(ctx context.Context, claim string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.readyLocked(ctx); err != nil {
		return fmt.Errorf("release KV: %w", err)
	}
	if _, ok := k.taken[claim]; !ok {
		return nil
	}
	if err := os.RemoveAll(filepath.Join(k.dir, "claims", claim)); err != nil {
		return fmt.Errorf("release KV: %w", err)
	}
	if err := os.Remove(k.file(claim)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("release KV: %w", err)
	}
	delete(k.taken, claim)
	return nil
}

// Reservations implements stock.KV.
func (k *KV) Reservations(ctx context.Context) ([]stock.Reservation, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.readyLocked(ctx); err != nil {
		return nil, fmt.Errorf("list KV: %w", err)
	}
	list := make([]stock.Reservation, 0, len(k.taken))
	for _, r := range k.taken {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b stock.Reservation) int { return strings.Compare(a.Claim, b.Claim) })
	return list, nil
}

func (k *KV) readyLocked(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if k.down {
		return stock.ErrUnavailable
	}
	return nil
}

func (k *KV) file(claim string) string { return filepath.Join(k.dir, "reserved", claim+".json") }
