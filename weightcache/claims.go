package weightcache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of what claims hold.
const (
	maxClaims       = 4096
	maxClaimLeases  = 64 // of one claim
	maxClaimName    = 128
	maxClaimBytes   = 512 << 10 // of one file
	claimVersion    = 1
	claimsDir       = "claims"
	claimHolder     = "claim " // before the name, as a lease's holder
	claimFileSuffix = ".json"
)

// ErrTooMany says that a limit on claims or on what one of them holds is reached.
var ErrTooMany = errors.New("too many claims or leases of one")

// ClaimLease is one thing that is held for a claim: an artifact by its digest,
// or a ref that is being made Ready and whose digest may not be known yet.
type ClaimLease struct {
	// Digest is leased; zero while the ref is not resolved.
	Digest artifact.Digest `json:"digest,omitzero"`
	// Ref is set where a pull makes it Ready for the claim; no other lease of
	// the claim has it.
	Ref artifact.Ref `json:"ref,omitzero"`
	// Ready says that the claim was told that it may use the artifact.
	Ready bool `json:"ready,omitempty"`
}

// same reports whether two leases of a claim are one at two times.
func (l ClaimLease) same(o ClaimLease) bool {
	return l.Ref == o.Ref && (!l.Ref.IsZero() || l.Digest == o.Digest)
}

// claimRecord is a claim's file.
type claimRecord struct {
	Version int          `json:"version"`
	Claim   string       `json:"claim"`
	Leases  []ClaimLease `json:"leases"`
}

// claimed is what one claim holds.
type claimed struct {
	slot  chan struct{} // capacity 1, taken to change the file
	users int           // of the slot; guarded by ClaimLeases.mu
	// Guarded by ClaimLeases.mu, changed by the owner of the slot alone:
	leases []ClaimLease
	taken  map[artifact.Digest]*Lease
	doubt  bool // the file may hold something else than leases
}

// ClaimLeases are leases that outlive the process: one file for each claim,
// written before a lease counts and removed before it ends. It is safe for
// concurrent use.
type ClaimLeases struct {
	s   *Store
	bad []string

	mu     sync.Mutex
	claims map[string]*claimed
	untold int // leases of artifacts that the store does not know
}

// OpenClaimLeases takes again what was held when the store was last used. It
// is called after Open and before a Puller of the store runs, so that nothing
// held is evicted. A file that cannot be understood is quarantined; one of a
// newer version gives ErrNewer, and then nothing was touched.
func OpenClaimLeases(s *Store) (*ClaimLeases, error) {
	c := &ClaimLeases{s: s, claims: map[string]*claimed{}}
	if err := c.open(); err != nil {
		return nil, fmt.Errorf("open claims of weight store %s: %w", s.dir, err)
	}
	return c, nil
}

func (c *ClaimLeases) open() error {
	entries, err := c.s.fs.ReadDir(c.s.path(claimsDir))
	if err != nil && !notExist(err) {
		return err
	}
	records := map[string]claimRecord{}
	var bad []string
	for _, e := range entries {
		path := c.s.path(claimsDir, e.Name())
		record, err := c.read(path, e.Name())
		switch {
		case err == nil:
			records[record.Claim] = record
		case errors.Is(err, ErrNewer):
			return err
		case errors.Is(err, artifact.ErrInvalid), errors.Is(err, durable.ErrTooLong), errors.Is(err, syscall.EIO), errors.Is(err, syscall.EISDIR):
			bad = append(bad, path)
			if !durable.IsTemp(e.Name()) {
				c.bad = append(c.bad, e.Name())
				c.s.log.Error("claim is unreadable, moving it to quarantine", slog.String("path", path), slog.Any("error", err))
			}
		default:
			return err
		}
	}
	if err := durable.MkdirAllSynced(c.s.fs, c.s.path(claimsDir), 0o700); err != nil {
		return err
	}
	for _, path := range bad {
		if err := c.s.quarantine(path); err != nil {
			return err
		}
	}
	// A process that was killed may have synced none of the names it left.
	if err := c.s.fs.SyncDir(c.s.path(claimsDir)); err != nil {
		return err
	}
	for name, record := range records {
		c.claims[name] = &claimed{slot: make(chan struct{}, 1), leases: record.Leases, taken: map[artifact.Digest]*Lease{}}
	}
	c.untold = 1
	c.Retake()
	return nil
}

// read reads and checks one file.
func (c *ClaimLeases) read(path, name string) (claimRecord, error) {
	var r claimRecord
	if durable.IsTemp(name) {
		return r, artifact.ErrInvalid
	}
	data, err := durable.ReadFile(c.s.fs, path, maxClaimBytes)
	if err != nil {
		return r, err
	}
	return decodeClaim(data, name)
}

// decodeClaim reads and checks the bytes of a file of that name. Errors wrap
// artifact.ErrInvalid or ErrNewer.
func decodeClaim(data []byte, name string) (r claimRecord, err error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return r, fmt.Errorf("%w: %w", artifact.ErrInvalid, err)
	}
	if version.Version > claimVersion {
		return r, fmt.Errorf("%w: claim %s is of version %d, this code knows %d", ErrNewer, name, version.Version, claimVersion)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		return r, fmt.Errorf("%w: %w", artifact.ErrInvalid, err)
	}
	if r.Version != claimVersion || CheckClaim(r.Claim) != nil || r.Claim+claimFileSuffix != name || len(r.Leases) > maxClaimLeases {
		return r, fmt.Errorf("%w: file %s is of claim %.140q", artifact.ErrInvalid, name, r.Claim)
	}
	return r, nil
}

// CheckClaim says what is wrong with a claim's name: it is 1 to 128 letters,
// digits, "-", "_" and ".", and begins with a letter or digit.
func CheckClaim(name string) error {
	odd := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	}
	if name == "" || len(name) > maxClaimName || strings.ContainsRune("-_.", rune(name[0])) || strings.ContainsFunc(name, odd) {
		return fmt.Errorf("claim %.140q: %w: want the UID of a claim", name, artifact.ErrInvalid)
	}
	return nil
}

// Bad are the names of files that were quarantined by OpenClaimLeases: what
// they held is not held any more.
func (c *ClaimLeases) Bad() []string { return slices.Clone(c.bad) }

// Retake leases the artifacts that claims hold and that the store did not know
// when it was last looked; it is called after the store changed.
func (c *ClaimLeases) Retake() {
	type want struct {
		claim  string
		held   *claimed
		digest artifact.Digest
	}
	var wanted []want
	c.mu.Lock()
	if c.untold == 0 {
		c.mu.Unlock()
		return
	}
	for name, held := range c.claims {
		for _, l := range held.leases {
			if !l.Digest.IsZero() && held.taken[l.Digest] == nil {
				wanted = append(wanted, want{name, held, l.Digest})
			}
		}
	}
	c.untold = 0
	c.mu.Unlock()
	for _, w := range wanted {
		lease, err := c.s.AcquireFor(w.digest, claimHolder+w.claim)
		c.mu.Lock()
		switch {
		case err != nil:
			c.untold++
		case w.held.taken[w.digest] == nil && w.held.meansLocked(w.digest):
			w.held.taken[w.digest], lease = lease, nil
		}
		c.mu.Unlock()
		if lease != nil {
			lease.Release() // the claim has it, or ended, meanwhile
		}
	}
}

// enter takes a claim's slot; leave gives it back.
func (c *ClaimLeases) enter(ctx context.Context, claim string) (*claimed, error) {
	if err := CheckClaim(claim); err != nil {
		return nil, err
	}
	c.mu.Lock()
	held := c.claims[claim]
	if held == nil {
		if len(c.claims) >= maxClaims {
			c.mu.Unlock()
			return nil, fmt.Errorf("%w: %d claims hold artifacts", ErrTooMany, maxClaims)
		}
		held = &claimed{slot: make(chan struct{}, 1), taken: map[artifact.Digest]*Lease{}}
		c.claims[claim] = held
	}
	held.users++
	c.mu.Unlock()
	select {
	case held.slot <- struct{}{}:
	case <-ctx.Done():
		c.forget(claim, held)
		return nil, context.Cause(ctx)
	}
	if ctx.Err() != nil {
		c.leave(claim, held)
		return nil, context.Cause(ctx)
	}
	return held, nil
}

func (c *ClaimLeases) leave(claim string, held *claimed) {
	<-held.slot
	c.forget(claim, held)
}

func (c *ClaimLeases) forget(claim string, held *claimed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	held.users--
	if held.users == 0 && len(held.leases) == 0 && !held.doubt {
		delete(c.claims, claim)
	}
}

// Set makes a lease of a claim durable, in place of the one of the same ref,
// or of the same digest where it has no ref. The artifact, where it names one,
// is leased when Set returns. The same call again does nothing. Errors wrap
// ErrUnknown where the store does not know the artifact, ErrTooMany,
// ErrNoSpace, and artifact.ErrInvalid for a claim's name.
func (c *ClaimLeases) Set(ctx context.Context, claim string, l ClaimLease) error {
	held, err := c.enter(ctx, claim)
	if err != nil {
		return fmt.Errorf("hold artifact for claim: %w", err)
	}
	defer c.leave(claim, held)
	next := slices.Clone(held.leases)
	c.mu.Lock()
	leased, doubt := l.Digest.IsZero() || held.taken[l.Digest] != nil, held.doubt
	c.mu.Unlock()
	i := slices.IndexFunc(next, l.same)
	switch {
	case i < 0:
		next = append(next, l)
	case next[i] == l && leased && !doubt:
		return nil
	default:
		next[i] = l
	}
	if len(next) > maxClaimLeases {
		return fmt.Errorf("hold artifact for claim %s: %w: it holds %d", claim, ErrTooMany, maxClaimLeases)
	}
	var lease *Lease
	if !leased {
		if lease, err = c.s.AcquireFor(l.Digest, claimHolder+claim); err != nil {
			return fmt.Errorf("hold artifact for claim %s: %w", claim, err)
		}
	}
	if err := c.write(claim, next); err != nil {
		if lease != nil {
			lease.Release()
		}
		c.mu.Lock()
		held.doubt = true
		c.mu.Unlock()
		return fmt.Errorf("hold artifact for claim %s: %w", claim, classified(err))
	}
	c.mu.Lock()
	held.leases, held.doubt = next, false
	ended := held.untakeLocked()
	if lease != nil && held.taken[l.Digest] == nil {
		held.taken[l.Digest], lease = lease, nil
	}
	if lease != nil {
		ended = append(ended, lease)
	}
	c.mu.Unlock()
	release(ended)
	return nil
}

func (h *claimed) meansLocked(digest artifact.Digest) bool {
	return slices.ContainsFunc(h.leases, func(l ClaimLease) bool { return l.Digest == digest })
}

// untakeLocked gives the leases in memory that no lease of the claim means.
func (h *claimed) untakeLocked() (ended []*Lease) {
	for digest, lease := range h.taken {
		if !h.meansLocked(digest) {
			delete(h.taken, digest)
			ended = append(ended, lease)
		}
	}
	return ended
}

func release(leases []*Lease) {
	for _, l := range leases {
		l.Release()
	}
}

func (c *ClaimLeases) claimPath(claim string) string {
	return c.s.path(claimsDir, claim+claimFileSuffix)
}

func (c *ClaimLeases) write(claim string, leases []ClaimLease) error {
	data, err := encodeClaim(claim, leases)
	if err != nil {
		return err
	}
	return durable.WriteFile(c.s.fs, c.claimPath(claim), data, 0o600)
}

func encodeClaim(claim string, leases []ClaimLease) ([]byte, error) {
	data, err := json.Marshal(claimRecord{Version: claimVersion, Claim: claim, Leases: leases})
	return append(data, '\n'), err
}

// Release ends all leases of a claim, durably; one that has none is fine, also
// where there are as many claims as there may be.
func (c *ClaimLeases) Release(ctx context.Context, claim string) error {
	if CheckClaim(claim) == nil && ctx.Err() == nil && !c.knows(claim) {
		return nil
	}
	held, err := c.enter(ctx, claim)
	if err != nil {
		return fmt.Errorf("release claim: %w", err)
	}
	defer c.leave(claim, held)
	c.mu.Lock()
	none := len(held.leases) == 0 && !held.doubt
	c.mu.Unlock()
	if none {
		return nil
	}
	if err := c.s.removeSynced(c.claimPath(claim)); err != nil {
		c.mu.Lock()
		held.doubt = true
		c.mu.Unlock()
		return fmt.Errorf("release claim %s: %w", claim, err)
	}
	c.mu.Lock()
	held.leases, held.doubt = nil, false
	ended := held.untakeLocked()
	c.mu.Unlock()
	release(ended)
	return nil
}

func (c *ClaimLeases) knows(claim string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.claims[claim] != nil
}

// Of gives what a claim holds.
func (c *ClaimLeases) Of(claim string) []ClaimLease {
	c.mu.Lock()
	defer c.mu.Unlock()
	if held := c.claims[claim]; held != nil {
		return slices.Clone(held.leases)
	}
	return nil
}

// Claims lists the claims that hold anything, sorted.
func (c *ClaimLeases) Claims() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for name, held := range c.claims {
		if len(held.leases) > 0 || held.doubt {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// ManifestOf gives a manifest of an artifact that the store knows, of the ref
// that is first by name where several mean it, or else of one that meant it.
func (s *Store) ManifestOf(digest artifact.Digest) (*artifact.Manifest, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.artifacts[digest]
	if r == nil || r.evicting {
		return nil, false
	}
	names := map[string]*artifact.Manifest{}
	for ref, m := range s.refs {
		if m.Digest == digest {
			names[ref.String()] = m
		}
	}
	if len(names) == 0 {
		return r.m, true
	}
	return names[slices.Min(slices.Collect(maps.Keys(names)))], true
}
