package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
)

// accountantCommand is the hidden child that does the network accounting of an
// agent and nothing else, turned on and off over its socket.
func accountantCommand() *cobra.Command {
	var addr string
	cmd := &cobra.Command{Use: "child-accountant", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		a := &accounting{ctx: cmd.Context()}
		defer a.stop()
		return serveSocket(cmd.Context(), addr, a)
	}}
	cmd.Flags().StringVar(&addr, "addr", "", "socket on which it is told what to do")
	return cmd
}

// Paths of the child.
const (
	accountingOn   = "/on"   // samples once a second
	accountingFast = "/fast" // samples four times a second
	accountingOff  = "/off"
	accountingTell = "/tell"
)

// accounted is what the child tells of its last sample.
type accounted struct {
	Sensors []bpf.Sensor  `json:"sensors"`
	Walked  time.Duration `json:"walked"`
}

// accounting is a Collector that comes and goes.
type accounting struct {
	ctx       context.Context
	mu        sync.Mutex
	collector *netattr.Collector
	end       context.CancelFunc
	group     *errgroup.Group
}

// ServeHTTP does what a path says.
func (a *accounting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch r.URL.Path {
	case accountingOn, accountingFast:
		a.stop()
		a.start(r.URL.Path == accountingFast)
	case accountingOff:
		a.stop()
		debug.FreeOSMemory()
	}
	var told accounted
	if a.collector != nil {
		snapshot := a.collector.Snapshot()
		told = accounted{Sensors: snapshot.Sensors, Walked: snapshot.Walked}
	}
	_ = json.NewEncoder(w).Encode(told)
}

func (a *accounting) start(fast bool) {
	collector := netattr.New(netattr.Options{})
	ctx, end := context.WithCancel(a.ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return collector.Run(ctx) })
	if fast {
		collector.Fast()
	}
	a.collector, a.end, a.group = collector, end, group
}

func (a *accounting) stop() {
	if a.collector == nil {
		return
	}
	a.end()
	_ = a.group.Wait() // Run gives no error
	a.collector = nil
}

// accountant is that child, as the bench sees it.
type accountant struct {
	*process
	client http.Client
}

func startAccountant(ctx context.Context, dir string) (*accountant, error) {
	at := filepath.Join(dir, "accountant.sock")
	child, err := start(ctx, -1, at, "bench", "child-accountant", "--addr", at)
	if err != nil {
		return nil, err
	}
	return &accountant{process: child, client: http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dialAt(ctx, at) },
	}}}, nil
}

func (a *accountant) do(ctx context.Context, path string) (accounted, error) {
	var told accounted
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://accountant"+path, nil)
	if err != nil {
		return told, fmt.Errorf("tell the accountant: %w", err)
	}
	response, err := a.client.Do(request)
	if err != nil {
		return told, fmt.Errorf("tell the accountant: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if err := json.NewDecoder(response.Body).Decode(&told); err != nil {
		return told, fmt.Errorf("tell the accountant: %w", err)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return told, err
}

// on begins accounting, which has to see connections.
func (a *accountant) on(ctx context.Context, path string) error {
	told, err := a.do(ctx, path)
	if err != nil {
		return err
	}
	for _, name := range []string{bpf.SensorSockets, bpf.SensorWalk} {
		at := slices.IndexFunc(told.Sensors, func(sensor bpf.Sensor) bool { return sensor.Name == name })
		if at < 0 {
			return cannot{fmt.Errorf("there is no sensor %s", name)}
		}
		if !told.Sensors[at].On {
			return cannot{fmt.Errorf("sensor %s: %s", name, told.Sensors[at].Reason)}
		}
	}
	return nil
}

// agentRows are CPU time and memory of the accounting with many sockets, one in
// ten of them busy each second.
func (b *netBench) agentRows(ctx context.Context) (rows []Row, err error) {
	r, err := newRoom()
	if err != nil {
		return nil, err
	}
	defer r.end()
	s, err := r.listen()
	if err != nil {
		return nil, err
	}
	defer s.end()
	if err := s.hold(b.sizes.many / 2); err != nil {
		return nil, err
	}
	if err := b.needEvent(ctx); err != nil {
		return nil, err
	}
	child, err := startAccountant(ctx, b.dir)
	if err != nil {
		return nil, err
	}
	defer child.stop()
	memory, err := b.memoryBefore(ctx, r, child)
	if err != nil {
		return nil, err
	}
	slow, fast := &paced{path: accountingOn}, &paced{path: accountingFast}
	for range b.sizes.spans {
		for _, p := range []*paced{slow, fast} {
			if err := b.pace(ctx, child, s, p); err != nil {
				return nil, err
			}
		}
	}
	sockets, rss, err := memory.after(ctx, r, child)
	if err != nil {
		return nil, err
	}
	once := slow.row("agent_cpu_1hz_8k", b, s, "once a second")
	cost := netRow("cost_8k_1hz")
	more := b.event.percent(netEventRate)
	cost.Value, cost.Pairs, cost.Spread = once.Value+more, once.Pairs, [2]float64{once.Spread[0] + more, once.Spread[1] + more}
	cost.Met = cost.Value < cost.Aim
	cost.Note = fmt.Sprintf("agent_cpu_1hz_8k and %.2f %% for %d connections a second made and ended with both ends here, at set_state_ns; must be less than %.1f, goal %d",
		more, netEventRate, float64(netCostAim), netCostGoal)
	return []Row{once, fast.row("agent_cpu_4hz_8k", b, s, "four times a second, as while something is pulled"), cost, sockets, rss}, nil
}

// needEvent measures what an event costs where that was not done before.
func (b *netBench) needEvent(ctx context.Context) (err error) {
	if b.event != nil {
		return nil
	}
	_, err = b.programRows(ctx)
	return err
}

// paced are the CPU times at one pace.
type paced struct {
	path    string
	percent []float64 // of a core
	walked  []float64 // ms
}

// pace measures one span.
func (b *netBench) pace(ctx context.Context, child *accountant, s *server, p *paced) (err error) {
	if err := child.on(ctx, p.path); err != nil {
		return err
	}
	busy, end := context.WithCancel(ctx)
	var toucher errgroup.Group
	toucher.Go(func() error {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			if err := s.touch(busyOneIn); err != nil {
				return err
			}
			select {
			case <-tick.C:
			case <-busy.Done():
				return nil
			}
		}
	})
	defer func() {
		end()
		err = errors.Join(err, toucher.Wait())
	}()
	before, err := child.cpu()
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := pass(ctx, b.sizes.span); err != nil {
		return err
	}
	after, err := child.cpu()
	if err != nil {
		return err
	}
	p.percent = append(p.percent, 100*float64(after-before)/float64(time.Since(begin)))
	told, err := child.do(ctx, accountingTell)
	p.walked = append(p.walked, ms(told.Walked))
	return err
}

func (p *paced) row(name string, b *netBench, s *server, often string) Row {
	row := netRow(name)
	for _, percent := range p.percent {
		row.Value += percent / float64(len(p.percent)) // as much time each
	}
	row.Pairs, row.Spread, row.Met = len(p.percent), [2]float64{slices.Min(p.percent), slices.Max(p.percent)}, true
	row.Note = fmt.Sprintf("CPU time, user and system, of a process that samples %s and does nothing else, over %s with %d sockets, one in %d busy each second; a walk in it took %.1f ms",
		often, time.Duration(len(p.percent))*b.sizes.span, 2*len(s.pairs), busyOneIn, median(p.walked))
	return row
}

// netMemory is what there was before any accounting.
type netMemory struct{ rss, options float64 }

func (b *netBench) memoryBefore(ctx context.Context, r *room, child *accountant) (m netMemory, err error) {
	if _, err := child.do(ctx, accountingOff); err != nil {
		return m, err
	}
	rss, err := child.rss("VmRSS")
	if err != nil {
		return m, err
	}
	m.rss = float64(rss) / (1 << 20)
	m.options, err = r.optionBytes()
	return m, err
}

// after reads the same while accounting is on.
func (m netMemory) after(ctx context.Context, r *room, child *accountant) (sockets, rss Row, err error) {
	sockets, rss = netRow("socket_bytes"), netRow("collector_rss")
	options, err := r.optionBytes()
	if err != nil {
		return sockets, rss, err
	}
	now, err := child.rss("VmRSS")
	if err != nil {
		return sockets, rss, err
	}
	sockets.Value, sockets.Pairs, sockets.Met = options-m.options, 1, true
	sockets.Spread = [2]float64{sockets.Value, sockets.Value}
	sockets.Note = "memory that lies with each socket (option memory, by sock_diag), beyond what it was before"
	rss.Value, rss.Pairs, rss.Met = float64(now)/(1<<20), 1, true
	rss.Spread = [2]float64{rss.Value, rss.Value}
	rss.References = []Reference{{Name: "the same process before it accounts", Value: m.rss, Ratio: oriented(lower, rss.Value, m.rss)}}
	rss.Note = "resident memory of the process that samples; most of it is the program's own code and start"
	_, err = child.do(ctx, accountingOff)
	return sockets, rss, err
}

// optionBytes is the mean of what is kept with each open connection.
func (r *room) optionBytes() (float64, error) {
	d, err := r.diag()
	if err != nil {
		return 0, err
	}
	defer d.end()
	sockets, bytes := 0, 0
	err = d.dump(inetDiagMemory, func(one diagnosed) { sockets++; bytes += int(one.options) })
	return float64(bytes) / float64(max(1, sockets)), err
}
