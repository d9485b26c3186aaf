// Package check is the headless scenario of `hearth up --check`: it runs a
// fabric of real processes through the main job and the faults it must bear,
// and takes every figure from the counters of the origin and the engines.
// `hearth up` calls it. It holds no bound on speed except the one that a step
// names.
package check

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/up/fabric"
	"github.com/hearth-dev/hearth/units"
)

// Schema names the format of Result.
const Schema = "hearth.dev/check/v1"

// Result is the one JSON line with which a check ends.
type Result struct {
	Schema string `json:"schema"`
	OK     bool   `json:"ok"`
	Steps  []Step `json:"steps"`
}

// Step is one thing that was shown, or not.
type Step struct {
	Name    string         `json:"name"`
	OK      bool           `json:"ok"`
	Error   string         `json:"error,omitempty"`
	Figures map[string]any `json:"figures"`
}

// Options configures a check.
type Options struct {
	Program string // this program, to be run again
	Dir     string // work directory; it must exist
	Size    units.Bytes
	Seed    uint64
	Out     io.Writer // what happens, for people
}

// The fabric of the check.
const (
	nodes, engines = 2, 4
	served         = "demo"
	repo           = "demo/model"
	ref            = "hub://demo/model@main"
	secondRepo     = "demo/second"
	secondRef      = "hub://demo/second@main"
	secondSize     = 96 * units.MiB
	segmentSize    = 8 * units.MiB
	streams        = 4
	blockTokens    = 16
	maxRunning     = 2
	// A decode step takes decodeMS / speedup of real time.
	speedup  = 20
	decodeMS = 20
)

// scenario is a check on its way. Its steps run in order and build on each
// other; the first that fails ends it.
type scenario struct {
	opts   Options
	f      *fabric.Fabric
	client *client
}

// Run runs the whole scenario. The result says which steps held; the error is
// of setting up and of ctx only.
func Run(ctx context.Context, opts Options) (Result, error) {
	result := Result{Schema: Schema}
	model, err := fabric.GeneratedModel(ctx, opts.Size, opts.Seed)
	if err != nil {
		return result, err
	}
	second, err := fabric.GeneratedModel(ctx, secondSize, opts.Seed+1)
	if err != nil {
		return result, err
	}
	f, err := fabric.New(ctx, fabric.Options{
		Program: opts.Program, Dir: opts.Dir, Nodes: nodes, Engines: engines,
		Repos: map[string]string{repo: model, secondRepo: second}, Ref: ref, Served: served, EngineKind: "sim",
		EngineArgs: []string{
			"--speedup", fmt.Sprint(speedup), "--decode-ms", fmt.Sprint(decodeMS), "--block-tokens", fmt.Sprint(blockTokens),
			"--max-running", fmt.Sprint(maxRunning), "--seed", fmt.Sprint(opts.Seed),
		},
		SegmentSize: segmentSize, Streams: streams,
	})
	if err != nil {
		return result, err
	}
	s := &scenario{opts: opts, f: f, client: newClient(f.Router.URL)}
	defer s.client.close()
	result.OK, result.Steps = s.steps(ctx)
	if !result.OK {
		f.WriteTails(opts.Out, 8)
	}
	return result, errors.Join(ctx.Err(), f.Close())
}

type stepFunc struct {
	name string
	run  func(ctx context.Context, figures map[string]any) error
}

func (s *scenario) steps(ctx context.Context) (bool, []Step) {
	list := []stepFunc{
		{"cold-pull", s.coldPull},
		{"warm-start", s.warmStart},
		{"prefix-routing", s.prefixRouting},
		{"xid-79", s.xid},
		{"agent-killed-mid-pull", s.agentKilled},
		{"engine-killed", s.engineKilled},
		{"flipped-byte", s.flippedByte},
	}
	var done []Step
	for _, step := range list {
		began := time.Now()
		figures := map[string]any{}
		err := step.run(ctx, figures)
		figures["seconds"] = round(time.Since(began).Seconds())
		out := Step{Name: step.name, OK: err == nil, Figures: figures}
		verdict := "ok"
		if err != nil {
			out.Error, verdict = err.Error(), "NOT OK: "+err.Error()
		}
		fmt.Fprintf(s.opts.Out, "%-22s %s %s\n", step.name, verdict, line(figures))
		done = append(done, out)
		if err != nil {
			return false, done
		}
	}
	return true, done
}

// line writes figures for a person, by name. A name says its unit; byte counts
// get theirs.
func line(figures map[string]any) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(figures)) {
		value := fmt.Sprint(figures[name])
		if count, ok := figures[name].(int64); ok && (strings.HasSuffix(name, "Bytes") || strings.HasPrefix(name, "bytes") || strings.HasSuffix(name, "etchedAgain") || name == "allowed") {
			value = strings.ReplaceAll(units.Bytes(count).Human(), " ", "")
		}
		if strings.Contains(value, " ") {
			value = strconv.Quote(value)
		}
		parts = append(parts, name+"="+value)
	}
	return strings.Join(parts, " ")
}

// round keeps three decimals of a figure.
func round(v float64) float64 { return float64(int64(v*1000+0.5)) / 1000 }

// poll waits until ready returns true, for at most limit.
func poll(ctx context.Context, limit time.Duration, what string, ready func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ready(ctx)
		if err == nil && ok {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, errors.Join(ctx.Err(), err))
		}
	}
}

// sum adds up the counters of all engines that run.
func (s *scenario) sum(ctx context.Context) (fabric.Counters, error) {
	var all fabric.Counters
	for _, e := range s.f.Engines {
		if e.PID() == 0 {
			continue
		}
		c, err := e.Counters(ctx)
		if err != nil {
			return all, err
		}
		all.Running += c.Running
		all.Waiting += c.Waiting
		all.PrefixHits += c.PrefixHits
		all.PrefixQueries += c.PrefixQueries
	}
	return all, nil
}
