package kvtier

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier/wear"
	"github.com/hearth-dev/hearth/units"
)

// WearOptions bound what is written to the drives.
type WearOptions struct {
	// WritesPerDay is how often the drives may be written over in a day; 0 is
	// without a bound.
	WritesPerDay float64
	// Capacity is what one such write is; 0 is the size of the drives' file
	// systems. Endurance is what the drives are rated for, in bytes; 0 is unknown.
	Capacity, Endurance units.Bytes
	// Now is monotonic time since any beginning; nil is the process's.
	Now func() time.Duration
}

// wearFile is the ledger's.
const wearFile = "wear.json"

// A day's budget comes as a steady rate and a burst of an hour's worth, together
// no more than the day's in any day.
const (
	burstOfDay = 1.0 / 24
	rateOfDay  = 1 - burstOfDay
)

// wearKeeper asks the ledger of wear, where there is one.
type wearKeeper struct {
	ledger    *wear.Ledger // nil: no bound
	log       *slog.Logger
	rate      atomic.Int64 // bytes per second, of a whole day
	capacity  int64        // bytes that a write of the whole is
	endurance int64
	failing   atomic.Bool
	refused   atomic.Int64 // writes
}

// openWear opens the ledger; an unreadable one is put into quarantine, and a new
// one begins with nothing to spend.
func openWear(opts CacheOptions) (*wearKeeper, error) {
	w := &wearKeeper{log: opts.Log, endurance: int64(opts.Wear.Endurance)}
	if opts.Wear.WritesPerDay == 0 {
		return w, nil
	}
	capacity := int64(opts.Wear.Capacity)
	if capacity == 0 {
		for _, dir := range append([]string{opts.Dir}, opts.Drives...) {
			_, total, err := opts.FS.Free(existing(opts, dir))
			if err != nil {
				return nil, fmt.Errorf("size of drive %s: %w", dir, err)
			}
			capacity += total
		}
	}
	w.capacity = capacity
	w.rate.Store(wear.Rate(opts.Wear.WritesPerDay, capacity))
	options := wear.Options{
		FS: opts.FS, Path: filepath.Join(opts.Dir, wearFile), Now: opts.Wear.Now,
	}
	options.Rate, options.Burst = rates(w.rate.Load())
	options.First = options.Burst
	var err error
	w.ledger, err = wear.Open(options)
	if errors.Is(err, wear.ErrUnreadable) {
		opts.Log.Error("what was written to the drives cannot be read, it is counted anew", slog.String("path", options.Path), slog.Any("error", err))
		to := filepath.Join(opts.Dir, quarantineDir, strconv.FormatInt(time.Now().UnixNano(), 10)+"-"+wearFile)
		if err := opts.FS.Rename(options.Path, to); err != nil {
			return nil, err
		}
		options.First = 0
		w.ledger, err = wear.Open(options)
	}
	if errors.Is(err, wear.ErrNewer) {
		err = fmt.Errorf("%w: %w", ErrNewer, err)
	}
	return w, err
}

// existing is the nearest directory above a path that is there.
func existing(opts CacheOptions, dir string) string {
	for dir != filepath.Dir(dir) {
		if _, err := opts.FS.Stat(dir); !notExist(err) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return dir
}

// nobody is the tenant of what is written for none: it has no share, only what is
// lent, and what is refused to it counts as no refused write.
var nobody wear.Tenant

// spend asks for n bytes of a tenant's. What cannot be written down is not
// spent.
func (w *wearKeeper) spend(tenant [16]byte, n int64) bool {
	if w.ledger == nil {
		return true
	}
	ok, err := w.ledger.Spend(tenant, n)
	if err != nil && !w.failing.Swap(true) {
		w.log.Error("what is written to the drives cannot be noted, so nothing is written", slog.Any("error", err))
	}
	if err == nil {
		w.failing.Store(false)
	}
	if !ok && tenant != nobody {
		w.refused.Add(1)
	}
	return ok && err == nil
}

// charge takes n bytes of a tenant's that are written whatever is left.
func (w *wearKeeper) charge(tenant [16]byte, n int64) {
	if w.ledger == nil {
		return
	}
	if err := w.ledger.Charge(tenant, n); err != nil && !w.failing.Swap(true) {
		w.log.Error("what is written to the drives cannot be noted, so no block is written", slog.Any("error", err))
	}
}

// share says what part of the whole a tenant has; 0 takes it out.
func (w *wearKeeper) share(tenant [16]byte, nvme units.Bytes) {
	if w.ledger != nil {
		w.ledger.SetShare(tenant, float64(nvme))
	}
}

// level is how full the bucket is for a tenant, from 0 to 1.
func (w *wearKeeper) level(tenant [16]byte) float64 {
	if w.ledger == nil {
		return 1
	}
	return w.ledger.FillFor(tenant)
}

// save writes down what was written, so that a kill loses less of what may be.
func (w *wearKeeper) save() {
	if w.ledger == nil {
		return
	}
	if err := w.ledger.Save(); err != nil {
		w.log.Warn("what was written to the drives is not noted yet", slog.Any("error", err))
	}
}

func (w *wearKeeper) close() error {
	if w.ledger == nil {
		return nil
	}
	return w.ledger.Close()
}

// WearStats tells of the drives' wear.
type WearStats struct {
	Bounded bool
	Written int64   // bytes ever, by all processes, at most
	Rate    int64   // bytes per second that may be written on average
	Level   float64 // of what may be written now, from 0 to 1
	Refused int64   // writes since the process began
	// DaysLeft is for how long the drives last at that rate; Known where their
	// endurance is.
	DaysLeft float64
	Known    bool
}

// Wear tells of the drives' wear.
func (c *Cache) Wear() WearStats {
	w := c.wear
	if w.ledger == nil {
		return WearStats{}
	}
	s := WearStats{Bounded: true, Written: w.ledger.Written(), Rate: w.rate.Load(), Level: w.ledger.Fill(), Refused: w.refused.Load()}
	s.DaysLeft, s.Known = wear.DaysLeft(w.endurance, s.Written, s.Rate)
	return s
}
