package dradriver

import (
	"context"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/device"
)

const (
	// healthEvery is how often the kubelet is told anew, healthFor how long it
	// believes what it was told.
	healthEvery = 10 * time.Second
	healthFor   = 30 * time.Second
	// maxHealthText is what the kubelet takes of a device's message, in bytes.
	maxHealthText = 1024
)

// WatchHealthStatus implements kubeletplugin.DRAPlugin: it tells the kubelet the
// health of the GPUs as the inventory has it, at once, after each change and
// every 10 s. A node that offers no GPUs has no health to tell; neither has one
// whose devices were not read yet, until they are.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	if !d.o.Pools.GPUs {
		return kubeletplugin.ErrHealthNotSupported
	}
	changed, end := d.o.Devices.Subscribe()
	defer end()
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		if state, ok := d.o.Devices.Devices(); ok {
			select {
			case <-ctx.Done():
				return nil
			case reports <- healthReport(d.o.Node, state, d.o.Now()):
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

// healthReport says of each GPU whether new work should use it.
func healthReport(node string, state device.Snapshot, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	for _, s := range state {
		health := kubeletplugin.HealthStatusHealthy
		if s.Health == device.Unhealthy {
			health = kubeletplugin.HealthStatusUnhealthy
		}
		report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
			PoolName: PoolGPUs(node), DeviceName: string(s.Device.ID), Health: health,
			LastUpdated: now, HealthCheckTimeout: healthFor, Message: healthText(s.Conditions),
		})
	}
	return report
}

// healthText names the conditions of a device for people.
func healthText(conditions []device.Condition) string {
	var texts []string
	for _, c := range conditions {
		text := c.Value
		if c.Detail != "" {
			text += ": " + c.Detail
		}
		texts = append(texts, text)
	}
	text := strings.Join(texts, "; ")
	if len(text) > maxHealthText {
		text = strings.ToValidUTF8(text[:maxHealthText-3], "") + "..."
	}
	return text
}
