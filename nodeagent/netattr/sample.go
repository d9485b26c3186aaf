package netattr

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
)

// How long is waited for a sample, which takes milliseconds but reads what may
// hang, as sysfs does with the driver of a device: by whoever asks, by New, which
// loads the programs, and by Close.
const (
	sampleWithin = 2 * time.Second
	firstWithin  = 10 * time.Second
	closeWithin  = 2 * time.Second
)

// Sample takes a sample now and gives it. What passed before is in it, while that
// of a pod that is new may otherwise come up to two seconds late. Where it takes
// longer than two seconds it gives the last one, which then says so; after Close
// the last one.
func (c *Collector) Sample() *Snapshot { return c.sampleWithin(sampleWithin, true) }

func (c *Collector) sampleWithin(limit time.Duration, thorough bool) *Snapshot {
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-c.turn:
	case <-late.C:
		return c.hangs(limit)
	}
	// It ends with the sample, which others wait for by turn. There is one at most.
	done := make(chan *Snapshot, 1)
	go func() { done <- c.sampleNow(thorough) }()
	select {
	case s := <-done:
		return s
	case <-late.C:
		return c.hangs(limit)
	}
}

// hangs gives the last sample, once it says that the next one does not end.
func (c *Collector) hangs(limit time.Duration) *Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Where samples end meanwhile many wait for one, and this is no news.
	if c.stuck || c.closed || time.Since(c.sampled) < limit {
		return c.snapshot
	}
	last := *c.snapshot
	last.Sight, last.Reason = SightNone, fmt.Sprintf("the sample after that of %s did not end within %v: the kernel does not answer", last.At.UTC().Format(time.TimeOnly), limit)
	c.stuck, c.snapshot = true, &last
	c.log.Warn("network accounting does not end a sample", slog.Duration("limit", limit))
	c.signalLocked()
	return c.snapshot
}

// sampleNow takes a sample. The caller has the turn, which this gives back.
func (c *Collector) sampleNow(thorough bool) *Snapshot {
	defer c.giveTurn()
	now := time.Now()
	c.mu.Lock()
	retry := c.source == nil && !c.closed && !now.Before(c.retryAt)
	if retry {
		c.retryAt = now.Add(retryEvery)
	}
	closed, last := c.closed, c.snapshot
	c.mu.Unlock()
	if closed {
		return last
	}
	if retry {
		c.open()
	}
	return c.sample(now, thorough)
}

// giveTurn ends a sample. A source that Close did not wait for is closed here.
func (c *Collector) giveTurn() {
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		c.closeSource()
	}
	c.turn <- struct{}{}
}

// Close detaches what is not pinned. Where a sample hangs that is left to it. The
// last sample stands.
func (c *Collector) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	late := time.NewTimer(closeWithin)
	defer late.Stop()
	select {
	case <-c.turn:
		c.giveTurn()
	case <-late.C:
		c.log.Warn("network programs not closed: a sample does not end")
	}
}

// closeSource closes the source, once. The caller has the turn.
func (c *Collector) closeSource() {
	c.mu.Lock()
	source := c.source
	c.source, c.failed = nil, "the agent ends"
	c.mu.Unlock()
	if source == nil {
		return
	}
	if err := source.Close(); err != nil {
		c.log.Warn("network programs not closed", slog.Any("error", err))
	}
}

// sample reads everything once. The caller has the turn.
func (c *Collector) sample(now time.Time, thorough bool) *Snapshot {
	c.mu.Lock()
	source, pods, failed, changes := c.source, c.pods, c.failed, c.flights
	c.flights = nil
	c.mu.Unlock()
	for _, one := range changes {
		if one.ended {
			c.books.ended(one.flight)
		} else {
			c.books.began(one.flight)
		}
	}
	reading := reading{at: now, pods: pods, thorough: thorough}
	if source != nil {
		sensors, err := c.read(source, &reading)
		reading.sensors = sensors
		if err != nil {
			c.lose(source, err)
		}
	} else {
		reading.sensors = []bpf.Sensor{{Name: bpf.SensorSockets, Wanted: !c.opts.Off, Reason: failed}}
	}
	reading.devices = c.readDevices()
	snapshot := c.books.close(reading, source)
	snapshot.TagFailed = c.tagFailed.value()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshot, c.sampled, c.stuck = snapshot, time.Now(), false
	c.signalLocked()
	return snapshot
}

// readDevices reads the devices. What cannot be read is as it was: taken for gone
// it would begin anew, and what passed meanwhile would be in no total.
func (c *Collector) readDevices() nic.Devices {
	devices, err := c.devices.Read()
	if err != nil {
		c.log.Debug("network devices not read", slog.Any("error", err))
		if len(devices.Net) == 0 {
			devices.Net, devices.Fallback = c.lastDevices.Net, c.lastDevices.Fallback
		}
		devices.Ports = c.lastDevices.Ports
	}
	c.lastDevices = devices
	return devices
}

// signalLocked tells subscribers that there is another snapshot.
func (c *Collector) signalLocked() {
	for ch := range c.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// read walks the sockets and reads the counts.
func (c *Collector) read(source Source, r *reading) ([]bpf.Sensor, error) {
	sensors := source.Sensors()
	began := time.Now()
	if on(sensors, bpf.SensorWalk) {
		if err := source.Walk(r.row); err != nil {
			return sensors, err
		}
	}
	r.walked = time.Since(began)
	counts, err := source.Counts()
	if err != nil {
		return sensors, err
	}
	r.counts = counts
	r.status, err = source.Status()
	return sensors, err
}

func on(sensors []bpf.Sensor, name string) bool {
	for _, p := range sensors {
		if p.Name == name {
			return p.On
		}
	}
	return false
}
