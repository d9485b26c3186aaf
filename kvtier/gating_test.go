package kvtier

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/units"
)

func TestDrivesAreMeasuredWhereTheirFirstTenantComesLater(t *testing.T) {
	t.Parallel()
	measured := make(chan struct{}, 1)
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) {
		o.Log = slog.New(saying{slog.DiscardHandler, "drive measured", measured})
	})
	defer closeCache(t, c)
	stop := start(t, c)
	defer stop()
	addTenant(t, c, TenantSpec{Name: "in RAM", Memory: units.MiB})
	addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB})
	select {
	case <-measured:
	case <-time.After(time.Minute):
		t.Error("the drives are not measured")
	}
}

// saying is a handler that tells of one message.
type saying struct {
	slog.Handler
	what string
	said chan<- struct{}
}

func (s saying) Enabled(context.Context, slog.Level) bool { return true }
func (s saying) WithAttrs([]slog.Attr) slog.Handler       { return s }
func (s saying) Handle(_ context.Context, r slog.Record) error {
	if r.Message == s.what {
		s.said <- struct{}{}
	}
	return nil
}
