package wear

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// ErrClosed says that the ledger has ended.
var ErrClosed = errors.New("wear ledger is closed")

// Bounds of a grant, in bytes: a hundredth of the burst within them. What is
// granted and not written is lost with a kill, and each grant is a sync.
const (
	minGrant = 16 << 20
	maxGrant = 1 << 30
)

// Options of a ledger.
type Options struct {
	FS   durable.FS // nil: durable.OS
	Path string     // of wear.json
	// Rate is in bytes per second, Burst in bytes.
	Rate, Burst int64
	// First is the credit where there is no file, in bytes.
	First int64
	// Now is monotonic time since any beginning, nil: since Open.
	Now func() time.Duration
}

// Ledger is a Bucket that survives its process. It writes down what the process
// may spend before it spends it, so that processes killed again and again never
// write more than one that lives on, and no time counts in which none ran. It
// is safe for concurrent use.
type Ledger struct {
	fs     durable.FS
	path   string
	now    func() time.Duration
	bucket *Bucket

	mu sync.Mutex
	// granted tells those who wait for a grant that it is written, or is not.
	granted  sync.Cond
	writing  bool  // somebody writes the record
	closed   bool  // nothing is spent any more
	written  int64 // bytes, by all processes
	left     int64 // of what the file grants
	promised int64 // taken from the bucket by those who wait
	grant    int64 // how much to grant at once
	lump     int64 // what must be there for a new grant
}

// Open reads the ledger, or begins one where there is no file; it writes
// nothing. Errors wrap ErrUnreadable where the caller should put the file into
// quarantine, and ErrNewer where it may not be touched.
func Open(opts Options) (*Ledger, error) {
	l := &Ledger{fs: opts.FS, path: opts.Path, now: opts.Now}
	if l.fs == nil {
		l.fs = durable.OS
	}
	if l.now == nil {
		began := time.Now()
		l.now = func() time.Duration { return time.Since(began) }
	}
	l.granted.L = &l.mu
	r := record{Credit: opts.First}
	data, err := durable.ReadRegular(l.fs, l.path, maxRecord)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, durable.ErrTooLong), errors.Is(err, durable.ErrIrregular):
		return nil, fmt.Errorf("open wear ledger: %w: %w", ErrUnreadable, err)
	case err != nil:
		return nil, fmt.Errorf("open wear ledger: %w", err)
	default:
		if r, err = decode(data); err != nil {
			return nil, fmt.Errorf("open wear ledger %s: %w", l.path, err)
		}
	}
	// Whether the process before spent its grant, nobody knows: it did.
	l.written = min(r.Written+r.Granted, maxBytes)
	l.bucket = NewBucket(l.now(), opts.Rate, opts.Burst, r.Credit)
	l.setGrant(opts.Burst)
	return l, nil
}

// setGrant sizes grants. Where tokens are spent as they come, they gather until
// there is a lump of them, so that not every write costs a sync.
func (l *Ledger) setGrant(burst int64) {
	l.grant = max(minGrant, min(burst/100, maxGrant))
	l.lump = min(l.grant/8, burst/2)
}

// SetRate changes rate (bytes per second) and burst (bytes) from now on.
func (l *Ledger) SetRate(rate, burst int64) {
	l.bucket.SetRate(l.now(), rate, burst)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setGrant(burst)
}

// SetShare says what part of the whole a tenant has; see Bucket.SetShare.
func (l *Ledger) SetShare(tenant Tenant, weight float64) { l.bucket.SetShare(l.now(), tenant, weight) }

// Fill is how full the bucket is, from 0 to 1.
func (l *Ledger) Fill() float64 { return l.bucket.Fill(l.now()) }

// FillFor is how full the bucket is for one tenant, from 0 to 1.
func (l *Ledger) FillFor(tenant Tenant) float64 { return l.bucket.FillFor(l.now(), tenant) }

// Written is how many bytes all processes wrote so far, at most.
func (l *Ledger) Written() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written
}

// Spend takes n bytes for a write of a tenant; without true nothing may be
// written. Once for every grant it waits until the file is written, and an error
// says why that failed.
func (l *Ledger) Spend(tenant Tenant, n int64) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false, fmt.Errorf("spend wear: %w", ErrClosed)
	}
	now := l.now()
	if l.left < n && l.bucket.Level(now)+l.promised < l.lump || !l.bucket.Spend(now, tenant, n) {
		return false, nil
	}
	l.promised += n
	err := l.coverLocked(n)
	l.promised -= n
	if l.closed {
		l.granted.Broadcast() // Close waits for what is promised
	}
	if err != nil {
		l.bucket.Refund(l.now(), tenant, n)
		return false, fmt.Errorf("spend wear: %w", err)
	}
	l.left -= n
	l.written = min(l.written+n, maxBytes)
	return true, nil
}

// Charge takes n bytes for a write of a tenant that may not be refused: they come
// out of what may be written later. An error says that a kill would forget them.
func (l *Ledger) Charge(tenant Tenant, n int64) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Charge(l.now(), tenant, n)
	l.promised += n
	for l.left < n && err == nil {
		switch {
		case l.closed:
			err = ErrClosed
		case l.writing:
			l.granted.Wait()
		default:
			err = l.recordLocked(l.lump, true)
		}
	}
	l.promised -= n
	if l.closed {
		l.granted.Broadcast() // Close waits for what is promised
	}
	l.left = max(0, l.left-n)
	l.written = min(l.written+n, maxBytes)
	if err != nil {
		return fmt.Errorf("charge wear: %w", err)
	}
	return nil
}

// coverLocked waits until what the file grants has n bytes left. It lets go of
// the lock while it waits and while it writes the file.
func (l *Ledger) coverLocked(n int64) error {
	for l.left < n {
		switch {
		case l.closed:
			return ErrClosed
		case l.writing:
			l.granted.Wait()
		default:
			if err := l.recordLocked(l.grant, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// recordLocked writes the file: what was written, a grant for all that is
// promised or still granted and for up to more bytes of what is there beyond (all
// of more where it must be), and the rest as credit. Nobody else may be writing it. While it has let go of the lock, the
// grant before covers what others spend, and the new one includes that.
func (l *Ledger) recordLocked(more int64, must bool) error {
	l.writing = true
	// What the bucket has is what nobody took. Where its burst was made smaller,
	// that can be less than what is left of the grant before.
	level := l.bucket.Level(l.now())
	fresh := min(max(0, level), more)
	if must {
		fresh = more
	}
	grant := max(l.promised+fresh, l.left)
	written := l.written
	r := record{Version: Version, Written: written, Granted: min(grant, maxBytes), Credit: level - fresh}
	l.mu.Unlock()
	data, err := r.encode()
	if err == nil {
		err = durable.WriteFile(l.fs, l.path, data, 0o600)
	}
	l.mu.Lock()
	l.writing = false
	l.granted.Broadcast()
	if err != nil {
		return err
	}
	l.left = grant - (l.written - written)
	return nil
}

// Save writes down what was written and what came since the last time, so that a
// kill loses less. The tier calls it from time to time.
func (l *Ledger) Save() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fmt.Errorf("save wear: %w", ErrClosed)
	}
	for l.writing {
		l.granted.Wait()
	}
	if err := l.recordLocked(l.left, false); err != nil {
		return fmt.Errorf("save wear: %w", err)
	}
	return nil
}

// Close writes down what was written and what may still be; nothing is spent
// after it. A second one is no error.
func (l *Ledger) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	for l.writing || l.promised > 0 {
		l.granted.Wait()
	}
	l.left = 0
	if err := l.recordLocked(0, false); err != nil {
		return fmt.Errorf("close wear ledger: %w", err)
	}
	return nil
}
