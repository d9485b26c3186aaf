// Package source reads artifacts from where they originate: a hub or mirror
// of one (Hub) or a folder (Dir). The Puller calls it; it never writes to the
// store, never verifies content against a manifest and keeps no cache. Every
// type passes the same suite in sourcetest.
package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Source lists artifacts and opens ranges of their files. Implementations are
// safe for concurrent use.
type Source interface {
	// Name is the configured name, used in errors, logs and metrics.
	Name() string
	// Resolve turns a ref into the listing of one immutable commit. An origin
	// that falls silent ends it with ErrUnavailable, whatever ctx allows.
	Resolve(ctx context.Context, ref artifact.Ref) (*artifact.Listing, error)
	// Open reads bytes [off, off+n) of a listed file. The reader yields exactly
	// n bytes or an error. Bytes that no longer belong to the listed file
	// (changed validator, other size) give ErrChanged before any byte.
	Open(ctx context.Context, l *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error)
}

// Errors that the Puller branches on. Implementations wrap them in *Error.
var (
	ErrNotFound     = errors.New("not found")        // repo, revision or file is absent: final
	ErrUnauthorized = errors.New("not authorised")   // 401: no or wrong credential: final
	ErrForbidden    = errors.New("forbidden")        // 403: gated, expired or disabled
	ErrThrottled    = errors.New("throttled")        // 429: retried after RetryAfter
	ErrUnavailable  = errors.New("unavailable")      // 5xx, dial, reset, stall: retried
	ErrChanged      = errors.New("changed in place") // validator or size differs: resolve anew
	ErrNoRange      = errors.New("range ignored")    // 200 for a Range not at 0: one edge of many may do so; asking again may help
	ErrProtocol     = errors.New("bad answer")       // malformed or hostile answer: final
)

// ErrNoRevision is the ErrNotFound of a repository that exists without the
// revision asked for.
var ErrNoRevision = fmt.Errorf("revision %w", ErrNotFound)

// Error is a failed call to a source. It never holds a credential.
type Error struct {
	Source     string        // configured name
	Op         string        // "resolve" or "open"
	What       string        // ref, or ref and file
	Status     int           // HTTP status, 0 where there was none
	RetryAfter time.Duration // > 0 where the source asked for a pause
	Err        error         // wraps one of the sentinels above
}

// Error names source, operation, object and cause.
func (e *Error) Error() string {
	if e.Status != 0 {
		return fmt.Sprintf("%s %s from source %q: status %d: %v", e.Op, e.What, e.Source, e.Status, e.Err)
	}
	return fmt.Sprintf("%s %s from source %q: %v", e.Op, e.What, e.Source, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }
