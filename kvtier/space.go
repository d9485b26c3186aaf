// Package kvtier keeps the KV space of one node: how many bytes of memory and
// of NVMe claims may take together and each namespace of them, what each claim
// has, and a directory for each. The data role's side of nodeagent/local calls
// it. It does not bound what a container writes into its directory, moves no
// block and knows no Kubernetes. The format on the drive is in FORMAT.md.
package kvtier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
)

// Errors that callers branch on.
var (
	// ErrNoSpace says that the bytes asked for exceed what is left.
	ErrNoSpace = errors.New("no KV space left")
	// ErrDiffers says that the claim has other sizes or another namespace.
	ErrDiffers = errors.New("the claim has another reservation")
	// ErrInvalid is wrapped by errors about what a caller asked for.
	ErrInvalid = errors.New("invalid reservation")
	// ErrNewer says that a newer version wrote the store; it is untouched.
	ErrNewer = errors.New("store was written by a newer version")
)

// Budget is the space that claims may take, in bytes.
type Budget struct {
	Memory, NVMe units.Bytes
	// NamespaceMemory and NamespaceNVMe bound the claims of one namespace
	// together; 0 is no bound.
	NamespaceMemory, NamespaceNVMe units.Bytes
}

// Options configure a Space.
type Options struct {
	// Dir is the root, made 0700; one process owns it at a time. It is not made
	// while the budget is 0 and nothing was ever reserved.
	Dir    string
	Budget Budget
	// Make makes it in any case: blocks are kept in it that are no claim's.
	Make bool
	// FS is the file system; nil means durable.OS.
	FS  durable.FS
	Log *slog.Logger
}

// Reservation is the space of one claim.
type Reservation struct {
	Claim     string      // UID: 1 to 128 letters, digits, "-", "_" and "."
	Namespace string      // of the claim, at most 253 bytes
	Memory    units.Bytes // 0 and more
	NVMe      units.Bytes
}

// maxReservations bounds the claims with space on one node.
const maxReservations = 4096

// Space is the KV space of a node. It is safe for concurrent use.
type Space struct {
	fs     durable.FS
	dir    string
	budget Budget
	made   bool // whatever the budget
	log    *slog.Logger
	lock   io.Closer     // nil while nothing is on the drive
	bad    []string      // records that were quarantined
	swept  chan struct{} // capacity 1: something is in the trash
	// changing is taken to change what is on the drive; capacity 1.
	changing chan struct{}
	// Guarded by changing:
	trash int             // counts names in the trash
	doubt map[string]bool // claims whose record may not be on the drive

	mu   sync.Mutex
	held map[string]Reservation
}

// Open takes the space at opts.Dir with what was reserved before. Errors wrap
// durable.ErrLocked where another process owns it, and ErrNewer.
func Open(opts Options) (*Space, error) {
	if opts.Dir == "" {
		return nil, errors.New("open KV space: no directory is given")
	}
	b := opts.Budget
	if b.Memory < 0 || b.NVMe < 0 || b.NamespaceMemory < 0 || b.NamespaceNVMe < 0 {
		return nil, errors.New("open KV space: a budget is negative")
	}
	s := &Space{
		fs: opts.FS, dir: filepath.Clean(opts.Dir), budget: b, made: opts.Make, log: opts.Log, held: map[string]Reservation{},
		swept: make(chan struct{}, 1), changing: make(chan struct{}, 1), doubt: map[string]bool{},
	}
	if s.fs == nil {
		s.fs = durable.OS
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("open KV space %s: %w", s.dir, errors.Join(err, s.Close()))
	}
	return s, nil
}

// Close gives the directory back.
func (s *Space) Close() error {
	if s.lock == nil {
		return nil
	}
	return s.lock.Close()
}

// Budget is what claims may take together.
func (s *Space) Budget() Budget {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.budget
}

// Bad are the records that Open could not understand and quarantined. The
// directories of their claims stand, and are listed without sizes.
func (s *Space) Bad() []string { return slices.Clone(s.bad) }

// check says what is wrong with a reservation as such.
func (r Reservation) check() error {
	if err := checkClaim(r.Claim); err != nil {
		return err
	}
	if r.Memory < 0 || r.NVMe < 0 {
		return fmt.Errorf("%w: claim %s asks for a negative size", ErrInvalid, r.Claim)
	}
	if r.Namespace == "" || len(r.Namespace) > 253 {
		return fmt.Errorf("%w: claim %s has no namespace of 1 to 253 bytes", ErrInvalid, r.Claim)
	}
	return nil
}

func checkClaim(name string) error {
	odd := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	}
	if name == "" || len(name) > 128 || strings.ContainsRune("-_.", rune(name[0])) || strings.ContainsFunc(name, odd) {
		return fmt.Errorf("%w: claim %.140q is no UID", ErrInvalid, name)
	}
	return nil
}

// fits says what r lacks beside the others.
func fits(b Budget, others []Reservation, r Reservation) error {
	var memory, nvme, ofMemory, ofNVMe units.Bytes
	for _, o := range others {
		memory, nvme = memory+o.Memory, nvme+o.NVMe
		if o.Namespace == r.Namespace {
			ofMemory, ofNVMe = ofMemory+o.Memory, ofNVMe+o.NVMe
		}
	}
	for _, c := range []struct {
		what              string
		want, taken, have units.Bytes
		bounded           bool
	}{
		{"memory", r.Memory, memory, b.Memory, true},
		{"NVMe", r.NVMe, nvme, b.NVMe, true},
		{fmt.Sprintf("memory for namespace %q", r.Namespace), r.Memory, ofMemory, b.NamespaceMemory, b.NamespaceMemory > 0},
		{fmt.Sprintf("NVMe for namespace %q", r.Namespace), r.NVMe, ofNVMe, b.NamespaceNVMe, b.NamespaceNVMe > 0},
	} {
		if left := max(0, c.have-c.taken); c.bounded && c.want > 0 && c.want > left {
			return fmt.Errorf("%w: want %s of %s, %s of %s is left", ErrNoSpace, c.want.Human(), c.what, left.Human(), c.have.Human())
		}
	}
	return nil
}

// Reserve gives a claim space and the path of the directory that is its own.
// It is durable when Reserve returns; the same call again gives the same
// answer. Errors wrap ErrNoSpace, ErrDiffers or ErrInvalid.
func (s *Space) Reserve(ctx context.Context, r Reservation) (dir string, err error) {
	if err := r.check(); err != nil {
		return "", fmt.Errorf("reserve KV space: %w", err)
	}
	if err := s.enter(ctx); err != nil {
		return "", fmt.Errorf("reserve KV space for claim %s: %w", r.Claim, err)
	}
	defer s.leave()
	s.mu.Lock()
	old, found := s.held[r.Claim]
	budget := s.budget
	var others []Reservation
	for claim, o := range s.held {
		if claim != r.Claim {
			others = append(others, o)
		}
	}
	s.mu.Unlock()
	switch nameless := found && old.Namespace == ""; {
	case found && old == r && !s.doubt[r.Claim]:
		if err := s.makeDir(r.Claim); err != nil {
			return "", fmt.Errorf("reserve KV space for claim %s: %w", r.Claim, err)
		}
		return s.claimDir(r.Claim), nil
	case found && old != r && !nameless:
		return "", fmt.Errorf("reserve KV space for claim %s: %w: %s memory and %s NVMe in namespace %s",
			r.Claim, ErrDiffers, old.Memory.Human(), old.NVMe.Human(), old.Namespace)
	case len(others) >= maxReservations:
		return "", fmt.Errorf("reserve KV space for claim %s: %w: %d claims have some", r.Claim, ErrNoSpace, maxReservations)
	}
	if err := fits(budget, others, r); err != nil {
		return "", fmt.Errorf("reserve KV space for claim %s: %w", r.Claim, err)
	}
	if s.lock == nil {
		return "", fmt.Errorf("reserve KV space for claim %s: %w: this node has none", r.Claim, ErrNoSpace)
	}
	s.hold(r)
	s.doubt[r.Claim] = true
	if err := s.record(r); err != nil {
		// On the drive it may stand: it counts until it is released.
		return "", fmt.Errorf("reserve KV space for claim %s: %w", r.Claim, err)
	}
	delete(s.doubt, r.Claim)
	return s.claimDir(r.Claim), nil
}

func (s *Space) hold(r Reservation) {
	s.mu.Lock()
	s.held[r.Claim] = r
	s.mu.Unlock()
}

// Release ends a claim's reservation and takes its directory away; what is in
// it is removed by Run. A claim that has none is fine.
func (s *Space) Release(ctx context.Context, claim string) error {
	if err := checkClaim(claim); err != nil {
		return fmt.Errorf("release KV space: %w", err)
	}
	if err := s.enter(ctx); err != nil {
		return fmt.Errorf("release KV space of claim %s: %w", claim, err)
	}
	defer s.leave()
	s.mu.Lock()
	_, found := s.held[claim]
	s.mu.Unlock()
	if !found {
		return nil
	}
	if err := s.discard(claim); err != nil {
		return fmt.Errorf("release KV space of claim %s: %w", claim, err)
	}
	delete(s.doubt, claim)
	s.mu.Lock()
	delete(s.held, claim)
	s.mu.Unlock()
	select {
	case s.swept <- struct{}{}:
	default:
	}
	return nil
}

// Reservations lists what is reserved, by claim. A directory whose record was
// lost is listed with no namespace and no sizes.
func (s *Space) Reservations() []Reservation {
	s.mu.Lock()
	list := slices.Collect(maps.Values(s.held))
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Reservation) int { return cmp.Compare(a.Claim, b.Claim) })
	return list
}

func (s *Space) enter(ctx context.Context) error {
	select {
	case s.changing <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if ctx.Err() != nil {
		s.leave()
		return context.Cause(ctx)
	}
	return nil
}

func (s *Space) leave() { <-s.changing }

// sweepAgain is the pause before what could not be removed is tried again.
const sweepAgain = time.Minute

// Run removes what released claims left, until ctx ends.
func (s *Space) Run(ctx context.Context) error {
	again := time.NewTicker(sweepAgain)
	defer again.Stop()
	for {
		if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("what a claim left is not removed yet, trying again later", slog.Any("error", err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.swept:
		case <-again.C:
		}
	}
}
