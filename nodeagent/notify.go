package nodeagent

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notify tells systemd that the agent is ready, that it lives, and that it
// stops. Without a NOTIFY_SOCKET it only waits.
func (a *Agent) notify(ctx context.Context) error {
	a.tell(daemon.SdNotifyReady)
	defer a.tell(daemon.SdNotifyStopping)
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil || interval <= 0 {
		<-ctx.Done()
		return nil
	}
	beat := time.NewTicker(interval / 2)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-beat.C:
			a.tell(daemon.SdNotifyWatchdog)
		}
	}
}

func (a *Agent) tell(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		a.log.Warn("systemd was not told", slog.String("state", state), slog.Any("error", err))
	}
}
