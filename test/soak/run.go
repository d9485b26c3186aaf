package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Schema is the format of a soak's last line.
const Schema = "hearth.dev/check/v1"

// Summary is the last line of a soak.
type Summary struct {
	Schema  string   `json:"schema"`
	OK      bool     `json:"ok"`
	Seed    uint64   `json:"seed"`
	Seconds float64  `json:"seconds"`
	Steps   []Result `json:"steps"`
}

// Result is one thing that a soak checked.
type Result struct {
	Name    string         `json:"name"`
	OK      bool           `json:"ok"`
	Error   string         `json:"error,omitempty"`
	Figures map[string]any `json:"figures"`
}

func (s *Summary) step(name string, err error, figures map[string]any) {
	r := Result{Name: name, OK: err == nil, Figures: figures}
	if err != nil {
		r.Error = err.Error()
	}
	s.OK = s.OK && r.OK
	s.Steps = append(s.Steps, r)
}

// Soak runs the load with faults for as long as d, checks what must hold at
// the end and writes a line every 10 s and the summary to out. The error is
// for what kept it from running; a check that fails is in the summary.
func Soak(ctx context.Context, dir string, seed uint64, d time.Duration, out io.Writer) (Summary, error) {
	began := time.Now()
	s := Summary{Schema: Schema, OK: true, Seed: seed}
	f, err := NewFabric(ctx, dir)
	if err != nil {
		return s, err
	}
	defer f.Close()
	engines, stopEngines := context.WithCancel(ctx)
	var keepers sync.WaitGroup
	defer func() { stopEngines(); keepers.Wait() }()
	for i, e := range f.engines {
		keepers.Go(func() {
			if err := e.keep(engines, f.rig, rand.New(rand.NewPCG(seed, uint64(2000+i)))); err != nil {
				fmt.Fprintln(out, err)
			}
		})
	}
	if err := f.start(ctx); err != nil {
		return s, err
	}
	load := &Load{Fronts: f.Fronts, Clients: 16, Seed: seed, Name: "soak"}
	faults := &Faults{Fabric: f, Seed: seed}
	if err := drive(ctx, f, load, faults, d, out); err != nil {
		return s, err
	}
	s.step("rest", f.atRest(ctx), f.figures())
	var stopped []error
	for _, r := range append([]*routerProcess{f.rolled}, f.lasting...) {
		stopped = append(stopped, r.stop())
	}
	s.step("stop", errors.Join(stopped...), nil)
	stopEngines()
	keepers.Wait()
	s.step("faults", errors.Join(append(faults.failed, lacking(faults.Count(), faultsDue))...), counts(faults.Count()))
	s.step("answers", lacking(load.Book.Count(), sightsDue), counts(load.Book.Count()))
	s.step("books", f.books(&load.Book), nil)
	s.Seconds = time.Since(began).Seconds()
	line, err := json.Marshal(s)
	if err != nil {
		return s, fmt.Errorf("encode summary: %w", err)
	}
	fmt.Fprintln(out, string(line))
	return s, nil
}

// start starts agents and routers and waits until every engine can be used.
func (f *Fabric) start(ctx context.Context) error {
	for _, a := range f.agents {
		if err := a.start(ctx, f.rig); err != nil {
			return err
		}
	}
	for i, name := range []string{"plain", "secure"} {
		r, err := f.startRouter(ctx, name, i == 1)
		if err != nil {
			return err
		}
		if r.base, err = r.read(ctx, true); err != nil {
			return fmt.Errorf("read vitals of %s: %w", name, err)
		}
		f.lasting = append(f.lasting, r)
	}
	return f.roll(ctx, 0)
}

// drive loads the fabric, with a calm point after the warm-up.
func drive(ctx context.Context, f *Fabric, load *Load, faults *Faults, d time.Duration, out io.Writer) error {
	loading, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { load.Run(loading) })
	group.Go(func() { faults.Run(loading) })
	began := time.Now()
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	warm := time.NewTimer(min(d/4, 2*time.Minute))
	defer warm.Stop()
	end := time.NewTimer(d)
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			f.progress(ctx, load, faults, time.Since(began), out)
		case <-warm.C:
			var err error
			load.Calm(func() {
				for _, r := range f.lasting {
					var failed error
					r.warm, failed = r.settle(ctx, r.base)
					err = errors.Join(err, failed)
				}
			})
			if err != nil {
				return fmt.Errorf("find the warm-up's end: %w", err)
			}
		case <-end.C:
			return nil
		}
	}
}

func (f *Fabric) progress(ctx context.Context, load *Load, faults *Faults, at time.Duration, out io.Writer) {
	made := 0
	for _, n := range faults.Count() {
		made += n
	}
	count := load.Book.Count()
	fmt.Fprintf(out, "soak %s asked %d right %d error %d broken %d left %d expired %d wrong %d, %d faults", at.Round(time.Second),
		count["all"], count[sawRight], count[sawError], count[sawBroken], count[sawLeft], count[sawExpired], count[sawWrong], made)
	for _, r := range f.lasting {
		if v, err := r.read(ctx, false); err == nil {
			fmt.Fprintf(out, "; %s %d MiB, %d goroutines, %d files", r.Name, v.RSS>>20, v.Goroutines, v.Files)
		}
	}
	fmt.Fprintln(out)
}

// atRest checks that routers without load hold nothing, and no more than they
// held after the warm-up.
func (f *Fabric) atRest(ctx context.Context) error {
	for _, front := range f.Fronts() {
		front.CloseIdle()
	}
	bad := []error{f.rolled.released(ctx)}
	for _, r := range f.lasting {
		bad = append(bad, r.released(ctx))
		end, err := r.settle(ctx, r.base)
		bad = append(bad, err, flat(r.Name, r.warm, end))
		r.end = end
	}
	return errors.Join(bad...)
}

func (f *Fabric) figures() map[string]any {
	list := map[string]any{}
	for _, r := range f.lasting {
		list[r.Name] = map[string]vitals{"base": r.base, "warm": r.warm, "end": r.end}
	}
	return list
}

// books reads every book and compares them.
func (f *Fabric) books(book *Book) error {
	var records []Record
	works := Works{}
	drains := map[string]time.Time{}
	for _, r := range f.routers() {
		list, err := ReadRecords(r.usage)
		if err != nil {
			return err
		}
		records = append(records, list...)
		drains[r.Name] = r.told.Add(DrainTimeout)
	}
	for _, e := range f.engines {
		if err := works.ReadWorks(e.endpoint, e.log); err != nil {
			return err
		}
	}
	book.Drains = drains
	c := book.Compare(records, works)
	if c.Count == 0 && len(records) > 0 {
		return nil
	}
	return fmt.Errorf("%d disagreements over %d records, the first of them:\n%s", c.Count, len(records), strings.Join(c.First, "\n"))
}

// What a run must have seen, or it has shown nothing.
var (
	faultsDue = []string{
		"reset", "rst", "trickle", "garbage", "status", "early", "end", "hints",
		"kill engine", "device fault", "configuration", "router restart",
	}
	sightsDue = []string{
		sawRight + " " + kindChat, sawRight + " " + kindCompletion, sawRight + " " + kindEmbedding, sawRight + " " + kindResponse,
		sawError, sawBroken, sawLeft, sawBad,
	}
)

func lacking(count map[string]int, due []string) error {
	for _, name := range due {
		if count[name] == 0 {
			return fmt.Errorf("there was no %q in the whole run: %v", name, count)
		}
	}
	return nil
}

func counts(count map[string]int) map[string]any {
	list := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(count)) {
		list[name] = count[name]
	}
	return list
}
