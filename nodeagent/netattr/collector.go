package netattr

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// How often is sampled: while nothing is pulled, and while something is. What is
// off is tried again every retryEvery.
const (
	sampleEvery = time.Second
	sampleFast  = 250 * time.Millisecond
	retryEvery  = time.Minute
)

// Options configure a Collector.
type Options struct {
	// Off asks for nothing of the kernel: devices alone are read.
	Off bool
	// Sys is where the node's sysfs is, with the cgroup hierarchy and the network
	// devices in it; empty means /sys.
	Sys string
	// Cgroups is the directory of the cgroup2 hierarchy; empty finds it below Sys.
	Cgroups string
	// Pins is a folder on a BPF file system; empty pins nothing.
	Pins string
	// Mark makes SO_MARK of Mark+class set a class; 0 is off.
	Mark uint32
	// Datagrams counts what is not TCP, packet by packet.
	Datagrams bool
	// Devices are names of network devices, with wildcards; none finds the
	// physical ones.
	Devices []string
	// Ports and Ranges give connections a class by service port and by the other
	// end's address, Rules by cgroup.
	Ports  map[uint16]traffic.Class
	Ranges map[netip.Prefix]traffic.Class
	Rules  []Rule
	Log    *slog.Logger
	// Source makes what is sampled; nil means the kernel's programs. For tests.
	Source func() (Source, error)
}

// Source is where counts come from. bpf.Probe is one.
type Source interface {
	Walk(each func(bpf.Row)) error
	Counts() (map[bpf.Key]traffic.Counts, error)
	Fold(key, into bpf.Key) error
	Tag(fd uintptr, class traffic.Class, flight uint32) error
	SetPorts(classes map[uint16]traffic.Class) error
	SetRanges(classes map[netip.Prefix]traffic.Class) error
	Status() (bpf.Status, error)
	Sensors() []bpf.Sensor
	// Kept reports whether Counts go on from those of before.
	Kept() bool
	Close() error
}

// Collector samples and keeps totals. It is safe for concurrent use.
type Collector struct {
	opts    Options
	log     *slog.Logger
	devices nic.Reader
	wake    chan struct{} // capacity 1: the pace of samples changed

	tagFailed counter

	sampling sync.Mutex // held for a whole sample; guards what is here
	tree     *hierarchy
	books    *books
	retryAt  time.Time

	mu       sync.Mutex
	source   Source // nil while there is none
	failed   string // why
	fast     int    // who asked for samples at sampleFast
	engines  map[uint16]traffic.Class
	pods     map[string]Pod
	snapshot *Snapshot
	watchers map[chan struct{}]bool
}

// counter is a number under its own lock.
type counter struct {
	mu sync.Mutex
	n  uint64
}

func (c *counter) add() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
}

func (c *counter) value() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// New loads what the kernel allows and takes a first sample. It fails never:
// what is missing is in Snapshot. Run goes on from there; a Collector that is not
// run is ended by Close.
func New(opts Options) *Collector {
	if opts.Sys == "" {
		opts.Sys = "/sys"
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	c := &Collector{
		opts: opts, log: opts.Log, devices: nic.Reader{Sys: opts.Sys, Names: opts.Devices}, wake: make(chan struct{}, 1),
		books: newBooks(opts.Rules), pods: map[string]Pod{}, watchers: map[chan struct{}]bool{},
	}
	if opts.Source == nil {
		c.opts.Source = c.probe
	}
	c.sampling.Lock()
	defer c.sampling.Unlock()
	c.open()
	c.sample(time.Now(), true)
	return c
}

// Run samples until ctx is done, and closes. It returns nil.
func (c *Collector) Run(ctx context.Context) error {
	defer c.Close()
	tick := time.NewTimer(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.wake:
		case <-tick.C:
			c.sampleNow(false)
		}
		tick.Reset(c.pace())
	}
}

func (c *Collector) pace() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fast > 0 {
		return sampleFast
	}
	return sampleEvery
}

// Close detaches what is not pinned.
func (c *Collector) Close() {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	c.mu.Lock()
	source := c.source
	c.source, c.failed = nil, "the agent ends"
	c.retryAt = time.Now().Add(24 * time.Hour)
	c.mu.Unlock()
	if source != nil {
		if err := source.Close(); err != nil {
			c.log.Warn("network programs not closed", slog.Any("error", err))
		}
	}
}

// Fast asks for a sample every 250 ms until the func it gives is called.
func (c *Collector) Fast() (end func()) {
	c.paceBy(1)
	return sync.OnceFunc(func() { c.paceBy(-1) })
}

func (c *Collector) paceBy(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fast += n
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Tag says whose a socket of this process is, before it is connected or bound.
// A socket that cannot be marked is counted, and used all the same.
func (c *Collector) Tag(fd uintptr, class traffic.Class, flight uint32) {
	c.mu.Lock()
	source := c.source
	c.mu.Unlock()
	if source == nil {
		return
	}
	if err := source.Tag(fd, class, flight); err != nil {
		c.tagFailed.add()
		c.log.Debug("socket not marked", slog.Any("error", err))
	}
}

// Control marks what a net.Dialer or net.ListenConfig makes.
func (c *Collector) Control(class traffic.Class, flight uint32) func(network, address string, conn syscall.RawConn) error {
	return func(_, _ string, conn syscall.RawConn) error {
		return conn.Control(func(fd uintptr) { c.Tag(fd, class, flight) })
	}
}

// SetPods says which pods there are on this node: all of them, each time.
func (c *Collector) SetPods(pods []Pod) {
	byUID := make(map[string]Pod, len(pods))
	for _, p := range pods {
		byUID[p.UID] = p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods = byUID
}

// SetEngines says at which ports of this node engines serve that are no pods.
func (c *Collector) SetEngines(ports []uint16) {
	classes := make(map[uint16]traffic.Class, len(ports))
	for _, port := range ports {
		classes[port] = traffic.Serving
	}
	c.mu.Lock()
	c.engines = classes
	source := c.source
	c.mu.Unlock()
	if source == nil {
		return
	}
	if err := source.SetPorts(c.ports()); err != nil {
		c.log.Warn("ports of engines not told to the kernel", slog.Any("error", err))
	}
}

// EndFlight says that a pull has ended: what its connections moved may be counted
// without it from some time later on.
func (c *Collector) EndFlight(id uint32) {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	c.books.ended(id)
}

// BeginFlight says that a pull is on its way.
func (c *Collector) BeginFlight(id uint32) {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	c.books.began(id)
}

// Snapshot is the last sample.
func (c *Collector) Snapshot() *Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.snapshot
}

// Subscribe gives a channel that holds a signal after each sample, and the func
// that ends the subscription.
func (c *Collector) Subscribe() (changed <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchers[ch] = true
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.watchers, ch)
	}
}

// Sample takes a sample now and gives it. What passed before is in it, while that
// of a pod that is new may otherwise come up to two seconds late.
func (c *Collector) Sample() *Snapshot { return c.sampleNow(true) }

func (c *Collector) sampleNow(thorough bool) *Snapshot {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	now := time.Now()
	c.mu.Lock()
	retry := c.source == nil && !c.opts.Off && !now.Before(c.retryAt)
	if retry {
		c.retryAt = now.Add(retryEvery)
	}
	c.mu.Unlock()
	if retry {
		c.open()
	}
	return c.sample(now, thorough)
}

// sample reads everything once. The caller holds sampling.
func (c *Collector) sample(now time.Time, thorough bool) *Snapshot {
	c.mu.Lock()
	source, pods, failed := c.source, c.pods, c.failed
	c.mu.Unlock()
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
	var devicesErr error
	if reading.devices, devicesErr = c.devices.Read(); devicesErr != nil {
		c.log.Debug("network devices not read", slog.Any("error", devicesErr))
	}
	snapshot := c.books.close(reading, source)
	snapshot.TagFailed = c.tagFailed.value()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshot = snapshot
	for ch := range c.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
	return snapshot
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
