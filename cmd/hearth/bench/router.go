package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

// routerBench measures the router process, with request scan, prefix keys, Pick,
// usage scan and metering on, against httputil.ReverseProxy in a process of its
// own, both in front of the same engine of prepared answers.
type routerBench struct {
	engine, router, reverse *process
	peers                   []peer
	dir                     string
	core                    int // of the proxies, -1 any
	pairs                   int
	scale                   int // multiplies request counts
	progress                func(string)
}

func startRouterBench(ctx context.Context, dir string, o options) (*routerBench, error) {
	b := &routerBench{pairs: o.pairs, scale: 1, progress: o.progress}
	if o.full {
		b.scale = 4
	}
	// The proxy under test has a core to itself where there are two; engine and
	// load share the others.
	proxyCore, otherCore := -1, -1
	if runtime.NumCPU() >= 2 {
		proxyCore, otherCore = 1, 0
	}
	b.dir, b.core = dir, proxyCore
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	if b.engine, err = start(ctx, otherCore, addr, "bench", "child-engine", "--addr", addr); err != nil {
		return nil, err
	}
	if b.reverse, err = b.startReverse(ctx); err != nil {
		return nil, err
	}
	if b.router, err = b.startRouter(ctx); err != nil {
		return nil, err
	}
	if o.peers {
		if err := b.startPeers(ctx); err != nil {
			b.stop()
			return nil, err
		}
	}
	return b, nil
}

// startReverse starts a ReverseProxy in front of the engine.
func (b *routerBench) startReverse(ctx context.Context) (*process, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	return start(ctx, b.core, addr, "bench", "child-reverseproxy", "--addr", addr, "--to", b.engine.addr)
}

// startRouter starts a router in front of the engine, with files of its own.
func (b *routerBench) startRouter(ctx context.Context) (*process, error) {
	ingress, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	admin, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(b.dir, "router-")
	if err != nil {
		return nil, fmt.Errorf("make router directory: %w", err)
	}
	config := filepath.Join(dir, "router.yaml")
	if err := os.WriteFile(config, routerConfig(dir, ingress, admin, b.engine.addr), 0o600); err != nil {
		return nil, fmt.Errorf("write router configuration: %w", err)
	}
	return start(ctx, b.core, ingress, "router", "--config", config)
}

func (b *routerBench) stop() {
	all := []*process{b.router, b.reverse}
	for _, p := range b.peers {
		all = append(all, p.process)
	}
	for _, p := range append(all, b.engine) {
		if p != nil {
			p.stop()
		}
	}
}

// referenceLost is how many answers of one loop a reference may break off:
// net/http's transport at times closes a connection it still reads from. The
// router may lose none.
const referenceLost = 3

// idleLost is how many of the idle streams the reference may break off at their
// beginning, for the same reason.
const idleLost = 200

// cpuPerRequest is microseconds of the proxy's CPU time per request of a closed loop.
func (b *routerBench) cpuPerRequest(ctx context.Context, p *process, conns, total int, mode string, stream bool, size int) func() (float64, error) {
	return func() (float64, error) {
		request := func(conn int) []byte { return requestBytes(mode, stream, size, fmt.Sprint("conversation ", conn)) }
		lost := referenceLost
		if p == b.router {
			lost = 0
		}
		if err := closedLoop(ctx, p.addr, conns, total/10+conns, lost, request); err != nil { // warm connections and caches
			return 0, err
		}
		before, err := p.cpu()
		if err != nil {
			return 0, err
		}
		if err := closedLoop(ctx, p.addr, conns, total, lost, request); err != nil {
			return 0, err
		}
		after, err := p.cpu()
		if err != nil {
			return 0, err
		}
		return float64((after - before).Nanoseconds()) / 1e3 / float64(total), nil
	}
}

// loneChunk is microseconds of CPU per chunk that comes alone: the slope between
// streams of 64 and of 1 paced chunks.
func (b *routerBench) loneChunk(ctx context.Context, p *process) func() (float64, error) {
	const conns = 64 // more fill the core, and chunks that wait together are no longer alone
	return func() (float64, error) {
		many, err := b.cpuPerRequest(ctx, p, conns, conns*6*b.scale, modePaced64, true, 800)()
		if err != nil {
			return 0, err
		}
		one, err := b.cpuPerRequest(ctx, p, conns, conns*16*b.scale, modePaced1, true, 800)()
		if err != nil {
			return 0, err
		}
		return (many - one) / 63, nil
	}
}

// addedMedian is milliseconds that the proxy adds to the median answer at 200 requests/s.
func (b *routerBench) addedMedian(ctx context.Context, p *process) func() (float64, error) {
	return func() (float64, error) {
		request := requestBytes(modeJSON, false, 800, "open loop")
		direct, err := openLoop(ctx, b.engine.addr, 200, 600*b.scale, request)
		if err != nil {
			return 0, err
		}
		through, err := openLoop(ctx, p.addr, 200, 600*b.scale, request)
		if err != nil {
			return 0, err
		}
		return float64((through - direct).Microseconds()) / 1e3, nil
	}
}

// perIdleStream is KiB of resident memory per stream that waits for its next
// chunk, in a process that has served nothing before: memory freed by earlier
// requests would hide the cost.
func (b *routerBench) perIdleStream(ctx context.Context, lost int, begin func(context.Context) (*process, error)) func() (float64, error) {
	const streams = 2000
	return func() (float64, error) {
		p, err := begin(ctx)
		if err != nil {
			return 0, err
		}
		defer p.stop()
		before, err := p.rss("VmRSS")
		if err != nil {
			return 0, err
		}
		var after int64
		err = holdStreams(ctx, p.addr, streams, lost, requestBytes(modeIdle, true, 800, "idle"), func() error {
			after, err = p.rss("VmRSS")
			return err
		})
		return float64(after-before) / 1024 / streams, err
	}
}

type cpuRow struct {
	name, note   string
	aim          float64 // own <= aim x R
	mode         string
	stream       bool
	size, number int
}

func (b *routerBench) rows(ctx context.Context) ([]Row, error) {
	var rows []Row
	add := func(row Row, err error) error {
		if err != nil {
			return err
		}
		b.progress(describe(row))
		rows = append(rows, row)
		return nil
	}
	// Idle first: nothing has been asked of the process yet.
	if err := add(alone(Row{Name: "idle_rss", Unit: "MiB", Better: lower, Aim: 40, Note: "before the first request"}, 1, func() (float64, error) {
		v, err := b.router.rss("VmRSS")
		return float64(v) / (1 << 20), err
	})); err != nil {
		return nil, err
	}
	if err := add(alone(Row{Name: "idle_cpu", Unit: "% of a core", Better: lower, Aim: 0.5, Note: "over 5 s without requests"}, 1, func() (float64, error) {
		return idleCPU(ctx, b.router, 5*time.Second)
	})); err != nil {
		return nil, err
	}
	idle, err := rounds(Row{Name: "idle_stream_memory", Unit: "KiB/stream", Better: lower, Note: "resident memory per open idle stream of 2,000, fresh processes; must: <= 48 KiB"},
		b.pairs, b.perIdleStream(ctx, 0, b.startRouter), contender{ref, b.perIdleStream(ctx, idleLost, b.startReverse)})
	if err := add(onValue(idle, 48), err); err != nil {
		return nil, err
	}
	for _, c := range []cpuRow{
		{"small_json_cpu", "800 B request, 330 B answer; must: <= 0.8 R", 1 / 0.8, modeJSON, false, 800, 12000},
		{"stream_one_chunk_cpu", "one content chunk; must: <= 0.7 R", 1 / 0.7, modeStream1, true, 800, 12000},
		{"stream_burst64_cpu", "64 chunks in one write, 14 KB; must: <= 0.8 R", 1 / 0.8, modeBurst64, true, 800, 8000},
	} {
		n := c.number * b.scale
		measure := func(p *process) func() (float64, error) {
			return b.cpuPerRequest(ctx, p, 16, n, c.mode, c.stream, c.size)
		}
		if err := add(b.beside(Row{Name: c.name, Unit: "us/request", Better: lower, Aim: c.aim, Note: c.note}, measure)); err != nil {
			return nil, err
		}
	}
	lone := func(p *process) func() (float64, error) { return b.loneChunk(ctx, p) }
	if err := add(b.beside(Row{Name: "lone_chunk_cpu", Unit: "us/chunk", Better: lower, Aim: 1 / 1.1, Note: "chunks 5 ms apart on 64 streams; must: <= 1.1 R"}, lone)); err != nil {
		return nil, err
	}
	big, err := b.beside(Row{Name: "body_400KB_cpu", Unit: "us/request", Better: lower, Note: "400 KB request; must: <= 1,000 us"}, func(p *process) func() (float64, error) {
		return b.cpuPerRequest(ctx, p, 4, 1000*b.scale, modeJSON, false, 400_000)
	})
	if err := add(onValue(big, 1000), err); err != nil {
		return nil, err
	}
	if len(b.peers) == 0 {
		b.pairs = max(b.pairs, 9) // medians of waits scatter more than processor time does
	}
	added, err := b.beside(Row{Name: "added_p50", Unit: "ms", Better: lower, Note: "added to the median answer at 200 requests/s; must: <= R + 0.05 ms"}, func(p *process) func() (float64, error) {
		return b.addedMedian(ctx, p)
	})
	if err != nil {
		return nil, err
	}
	if err := add(onValue(added, added.References[0].Value+0.05), nil); err != nil {
		return nil, err
	}
	if err := add(pickRow()); err != nil {
		return nil, err
	}
	return rows, add(indexRow())
}

// ref is the first reference of every row of the router.
const ref = "httputil.ReverseProxy"

// beside measures the router, the reference and the peers by the same measure.
func (b *routerBench) beside(row Row, measure func(*process) func() (float64, error)) (Row, error) {
	refs := []contender{{ref, measure(b.reverse)}}
	for _, p := range b.peers {
		refs = append(refs, contender{p.name, measure(p.process)})
	}
	return rounds(row, b.pairs, measure(b.router), refs...)
}

// idleCPU is the share of a core that a process uses while nothing is asked of it.
func idleCPU(ctx context.Context, p *process, span time.Duration) (float64, error) {
	before, err := p.cpu()
	if err != nil {
		return 0, err
	}
	select {
	case <-time.After(span):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	after, err := p.cpu()
	return 100 * float64(after-before) / float64(span), err
}

// nanoseconds runs a testing benchmark and returns its time per operation.
func nanoseconds(f func(*testing.B)) float64 {
	r := testing.Benchmark(f)
	return float64(r.T.Nanoseconds()) / float64(max(r.N, 1))
}
