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
	// Decided are the classes by cgroup that Decide keeps with the counts.
	Decided() (map[uint64]traffic.Class, error)
	Decide(cgroup uint64, class traffic.Class) error
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

	// turn holds a token while nobody samples; who has it has what is here. A lock
	// would not do: what is read may hang, and nobody else shall.
	turn        chan struct{}
	tree        *hierarchy
	books       *books
	lastDevices nic.Devices

	mu       sync.Mutex
	source   Source // nil while there is none
	failed   string // why
	retryAt  time.Time
	fast     int // who asked for samples at sampleFast
	pods     map[string]Pod
	flights  []change // that the next sample takes in
	snapshot *Snapshot
	sampled  time.Time // when the last sample ended
	stuck    bool      // snapshot says that a sample does not end
	closed   bool
	watchers map[chan struct{}]bool
}

// change is a flight that began or ended.
type change struct {
	flight uint32
	ended  bool
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
		turn: make(chan struct{}, 1), books: newBooks(opts.Rules), pods: map[string]Pod{}, watchers: map[chan struct{}]bool{},
	}
	if opts.Source == nil {
		c.opts.Source = c.probe
	}
	now := time.Now()
	c.snapshot = &Snapshot{At: now, Started: now}
	c.turn <- struct{}{}
	c.sampleWithin(firstWithin, true)
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
			c.sampleWithin(sampleWithin, false)
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

// EndFlight says that a pull has ended: what its connections moved may be counted
// without it from some time later on.
func (c *Collector) EndFlight(id uint32) {
	c.change(change{flight: id, ended: true})
}

// BeginFlight says that a pull is on its way.
func (c *Collector) BeginFlight(id uint32) {
	c.change(change{flight: id})
}

func (c *Collector) change(one change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flights = append(c.flights, one)
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
