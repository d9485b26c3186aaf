package kvtier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// DropBlocks ends blocks in all of the tenant's namespaces, durably, and their
// pins. dropped is how many were there.
func (t *Tenant) DropBlocks(ctx context.Context, keys ...block.Key) (dropped int, err error) {
	if _, err := t.UnpinBlocks(ctx, keys...); err != nil {
		return 0, fmt.Errorf("drop blocks: %w", err)
	}
	t.mu.Lock()
	spaces := make([]*Namespace, 0, len(t.spaces))
	for id, place := range t.spaces {
		spaces = append(spaces, &Namespace{tenant: t, id: id, place: place})
	}
	t.mu.Unlock()
	for _, n := range spaces {
		removed, err := n.Delete(ctx, keys...)
		dropped += removed
		if err != nil {
			return dropped, fmt.Errorf("drop blocks: %w", err)
		}
	}
	return dropped, nil
}

// Clear ends all of the tenant's blocks and pins; the tenant stays. On the drives
// they are gone for good when it returns without an error. Of what is stored
// meanwhile some may be lost.
func (t *Tenant) Clear(ctx context.Context) (dropped int64, err error) {
	if err := t.enter(ctx); err != nil {
		return 0, fmt.Errorf("clear tenant %s: %w", t.name, err)
	}
	defer t.leave()
	t.mu.Lock()
	if t.gone {
		t.mu.Unlock()
		return 0, fmt.Errorf("clear tenant %s: %w", t.name, ErrRemoved)
	}
	dropped = int64(t.index.Present())
	drive, spec := t.drive, t.spec
	t.drive = nil
	t.wipeLocked()
	t.mu.Unlock()
	t.stats.deletes.Add(dropped)
	if spec.NVMe == 0 {
		return dropped, nil
	}
	// From here on it ends, whoever asked: the blocks are found no more.
	ctx = context.WithoutCancel(ctx)
	t.settleWrites(ctx)
	if drive != nil { // else it could not be cleared before
		if err := drive.Close(); err != nil {
			t.log.Warn("files of a tenant that is cleared were not closed well", slog.Any("error", err))
		}
	}
	if err := t.reopen(spec); err != nil {
		return dropped, fmt.Errorf("clear tenant %s: %w", t.name, err)
	}
	return dropped, nil
}

// wipeLocked takes every block out of the index and ends all pins. What is being
// read keeps its memory until it is released.
func (t *Tenant) wipeLocked() {
	for _, q := range t.queue {
		t.releaseLocked(q.hold)
	}
	t.queue, t.waiting, t.twice = nil, 0, nil
	t.checkpointed.Store(0) // another log counts from the beginning
	t.checkpointBytes.Store(0)
	t.dropPinsLocked(t.pinsLocked())
	for print, e := range t.ending {
		if e.trying == nil { // who tries finds that the drive is another, or none
			delete(t.ending, print)
		}
	}
	for id := range t.index.All {
		if _, here := t.index.Resident(id); here {
			t.leaveLocked(id)
		}
		t.index.SetLoc(id, 0)
	}
	for id := t.index.Limit() - 1; id > 0; id-- {
		if t.index.Stands(id) {
			t.index.Drop(id)
		}
	}
}

// settleWrites waits until the batch that the writer has is written, or not.
func (t *Tenant) settleWrites(ctx context.Context) {
	for {
		t.mu.Lock()
		var one chan struct{}
		for _, done := range t.writing {
			one = done
			break
		}
		t.mu.Unlock()
		if one == nil {
			return
		}
		select {
		case <-one:
		case <-ctx.Done():
			return
		}
	}
}

// discardBlocks takes the tenant's blocks from the drives and what tells of them;
// its record stays. The checkpoint goes first: of segments that begin anew it
// would tell what is not there.
func (t *Tenant) discardBlocks() error {
	c := t.cache
	t.saving <- struct{}{} // whoever writes a checkpoint that began before
	defer func() { <-t.saving }()
	for _, path := range []string{t.checkpointPath(), t.pinsPath()} {
		if err := c.fs.Remove(path); err != nil && !notExist(err) {
			return err
		}
	}
	err := c.fs.SyncDir(t.dir())
	if notExist(err) {
		err = nil // there was no room for it
	}
	for _, drive := range c.drives() {
		err = errors.Join(err, c.trash(drive, filepath.Join(blocksDir, t.folder())))
	}
	return err
}

// sweepSoon has the trash looked at.
func (c *Cache) sweepSoon() {
	select {
	case c.swept <- struct{}{}:
	default:
	}
}

// DetachTenant ends the serving of a tenant whose blocks stay on the drives, with
// what RAM has that is worth it, for at most 4 seconds. One that is not there is
// fine.
func (c *Cache) DetachTenant(ctx context.Context, kind, name string) error {
	key := tenantKey{kind, name}
	c.mu.Lock()
	t := c.tenants[key]
	c.mu.Unlock()
	if t == nil {
		return nil
	}
	if err := t.enter(ctx); err != nil {
		return fmt.Errorf("detach KV tenant %s: %w", name, err)
	}
	defer t.leave()
	c.mu.Lock()
	halt, mine := t.halt, t.takeWriter()
	c.mu.Unlock()
	switch {
	case mine: // the cache does not run
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
		defer cancel()
		t.flush(last)
	case halt != nil:
		halt()
	}
	err := t.stop()
	c.mu.Lock()
	if c.tenants[key] == t {
		delete(c.tenants, key)
	}
	c.mu.Unlock()
	if err != nil {
		return fmt.Errorf("detach KV tenant %s: %w", name, err)
	}
	return nil
}

// Left is a tenant on the drives that nobody serves.
type Left struct {
	Kind, Name string // empty where its record cannot be read
	Folder     string
	Bytes      int64 // of its segments
}

// Left lists the tenants that the drives have and that were not added.
func (c *Cache) Left() ([]Left, error) {
	served := map[string]bool{}
	for _, t := range c.Tenants() {
		served[t.folder()] = true
	}
	found, err := listTenants(c.fs, c.opts.Dir, c.drives(), served)
	if err != nil {
		return nil, fmt.Errorf("list KV tenants: %w", err)
	}
	list := make([]Left, 0, len(found))
	for _, f := range found {
		list = append(list, Left{Kind: f.record.Kind, Name: f.record.Name, Folder: f.folder, Bytes: f.bytes})
	}
	return list, nil
}
