package weightcache

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Rule allows one source for the refs that match a pattern.
type Rule struct {
	Source source.Source
	// Refs are patterns as path.Match reads them, on "org/name" for hub refs
	// and on the absolute path for dir refs; a trailing "/**" matches any depth.
	Refs []string
}

// PullerOptions configure a Puller.
type PullerOptions struct {
	Store   *Store
	Sources []Rule
	// Limiter bounds the byte rate of all pulls; nil means unlimited.
	Limiter *Limiter
	// SegmentSize is the length of one ranged GET in bytes, 8 to 16 MiB; 0 means 16 MiB.
	SegmentSize units.Bytes
	// Streams bounds the parallel GETs of all pulls; 0 means 8.
	Streams int
	// StallTimeout ends a GET that yields no byte for so long; 0 means 30 s.
	StallTimeout time.Duration
	// ScrubEvery is how often each file is read again; 0 means 7 days, < 0 never.
	ScrubEvery time.Duration
	// ScrubRate bounds the scrub in bytes per second; 0 means 64 MiB/s.
	ScrubRate units.Rate
	Log       *slog.Logger
	Now       func() time.Time
}

// Puller fills a Store.
type Puller struct{}

// EnsureOptions modify one Ensure.
type EnsureOptions struct {
	// Refresh asks the source again what the ref means and moves it.
	Refresh bool
}

// NewPuller checks the options; it starts nothing.
func NewPuller(opts PullerOptions) (*Puller, error) { return nil, ErrUnknown }

// Run owns background pulls and the scrub until ctx ends.
func (p *Puller) Run(ctx context.Context) error { return ErrUnknown }

// Ensure blocks until the artifact is Ready.
func (p *Puller) Ensure(ctx context.Context, ref artifact.Ref, opts EnsureOptions) (*artifact.Manifest, error) {
	return nil, ErrUnknown
}

// Manifest gives the pinned answer at once, else resolves now.
func (p *Puller) Manifest(ctx context.Context, ref artifact.Ref) (*artifact.Manifest, error) {
	return nil, ErrUnknown
}

// Open opens a file of a manifest, starting the pull if it is needed.
func (p *Puller) Open(ctx context.Context, m *artifact.Manifest, path string) (*Reader, error) {
	return nil, ErrUnknown
}

// List gives the status of every ref, sorted by ref.
func (p *Puller) List() []Status { return nil }

// Status gives the status of one ref.
func (p *Puller) Status(ref artifact.Ref) (Status, bool) { return Status{}, false }

// Subscribe gives a signal of capacity 1 that something in List changed, and
// the function that ends it.
func (p *Puller) Subscribe() (changed <-chan struct{}, cancel func()) { return nil, func() {} }

// Remove drops a ref and the bytes no other artifact uses.
func (p *Puller) Remove(ctx context.Context, ref artifact.Ref) error { return ErrUnknown }

// Verify reads every file of an artifact again.
func (p *Puller) Verify(ctx context.Context, ref artifact.Ref) (VerifyResult, error) {
	return VerifyResult{}, ErrUnknown
}

// Reader reads one file, also while it is still landing.
type Reader struct{}

// Size is the file's length in bytes.
func (r *Reader) Size() int64 { return 0 }

// File is the committed file, or nil while it is landing.
func (r *Reader) File() *os.File { return nil }

// ReadAt reads and waits at the frontier.
func (r *Reader) ReadAt(ctx context.Context, p []byte, off int64) (int, error) { return 0, ErrUnknown }

// Close ends the reader.
func (r *Reader) Close() error { return nil }
