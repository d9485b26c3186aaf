package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/router/admin"
)

// vitals are what a router process holds.
type vitals struct {
	RSS        int64 `json:"rssBytes"`
	Heap       int64 `json:"heapBytes"` // live after a collection
	Goroutines int   `json:"goroutines"`
	Files      int   `json:"files"` // open descriptors
}

// Bounds of what a router may hold at the end, against the calm point after
// the warm-up: the collector's pace and the kernel's give both some play.
const (
	rssFactor, rssPlay           = 1.3, 48 << 20
	heapFactor, heapPlay         = 1.3, 8 << 20
	goroutinesPlay, filesPlay    = 8, 8
	calmLimit, reservationsLimit = 90 * time.Second, 30 * time.Second
)

// read takes the vitals of a router; collect has its garbage collected first.
func (r *routerProcess) read(ctx context.Context, collect bool) (v vitals, err error) {
	if collect {
		for range 2 {
			if _, err := fetch(ctx, r.admin+"/debug/pprof/heap?gc=1"); err != nil {
				return v, err
			}
		}
	}
	page, err := fetch(ctx, r.admin+"/metrics")
	if err != nil {
		return v, err
	}
	lines := bufio.NewScanner(strings.NewReader(string(page)))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		n, _ := strconv.ParseFloat(value, 64) // comments: the name decides
		switch name {
		case "go_goroutines":
			v.Goroutines = int(n)
		case "go_memstats_heap_alloc_bytes":
			v.Heap = int64(n)
		case "process_resident_memory_bytes":
			v.RSS = int64(n)
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.process.PID()))
	v.Files = len(files)
	if err == nil && (v.Goroutines == 0 || v.Heap == 0 || v.RSS == 0) {
		err = errors.New("the metrics page lacks the process's own series")
	}
	return v, err
}

func fetch(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return text, err
}

// released waits until a router holds no reservation and no request.
func (r *routerProcess) released(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reservationsLimit)
	defer cancel()
	var last error
	err := until(ctx, 100*time.Millisecond, func() bool {
		last = r.holdsNothing(ctx)
		return last == nil
	})
	return errors.Join(err, last)
}

func (r *routerProcess) holdsNothing(ctx context.Context) error {
	text, err := fetch(ctx, r.admin+"/debug/pools")
	if err != nil {
		return err
	}
	var pools struct{ Endpoints []admin.Endpoint }
	if err := json.Unmarshal(text, &pools); err != nil {
		return fmt.Errorf("read pools: %w", err)
	}
	if len(pools.Endpoints) == 0 {
		return fmt.Errorf("%s has no endpoints", r.Name)
	}
	for _, e := range pools.Endpoints {
		if e.InFlight != 0 || e.InFlightPromptTokens != 0 || e.InFlightDecodeTokens != 0 {
			return fmt.Errorf("%s still holds %d requests, %d prompt and %d decode tokens at %s",
				r.Name, e.InFlight, e.InFlightPromptTokens, e.InFlightDecodeTokens, e.ID)
		}
	}
	text, err = fetch(ctx, r.admin+"/v1/status")
	if err != nil {
		return err
	}
	var status admin.Status
	if err := json.Unmarshal(text, &status); err != nil {
		return fmt.Errorf("read status: %w", err)
	}
	if status.InFlight != 0 || status.Metering.Dropped != 0 {
		return fmt.Errorf("%s has %d requests in flight and %d records dropped", r.Name, status.InFlight, status.Metering.Dropped)
	}
	return nil
}

// settle waits until goroutines and descriptors are what they were at base,
// with a little play, and gives the vitals then.
func (r *routerProcess) settle(ctx context.Context, base vitals) (v vitals, err error) {
	ctx, cancel := context.WithTimeout(ctx, calmLimit)
	defer cancel()
	var failed error
	waited := until(ctx, 200*time.Millisecond, func() bool {
		v, failed = r.read(ctx, false)
		return failed == nil && v.Goroutines <= base.Goroutines+goroutinesPlay && v.Files <= base.Files+filesPlay
	})
	if waited != nil {
		return v, fmt.Errorf("%s did not come to rest: %+v, it began with %+v: %w", r.Name, v, base, errors.Join(waited, failed))
	}
	return r.read(ctx, true)
}

// flat compares the vitals at the end with those after the warm-up.
func flat(name string, warm, end vitals) error {
	var bad []error
	if most := int64(float64(warm.RSS)*rssFactor) + rssPlay; end.RSS > most {
		bad = append(bad, fmt.Errorf("%s holds %d MiB, %d after the warm-up", name, end.RSS>>20, warm.RSS>>20))
	}
	if most := int64(float64(warm.Heap)*heapFactor) + heapPlay; end.Heap > most {
		bad = append(bad, fmt.Errorf("%s has %d KiB of live heap, %d after the warm-up", name, end.Heap>>10, warm.Heap>>10))
	}
	return errors.Join(bad...)
}

// until polls for a state that nothing signals.
func until(ctx context.Context, every time.Duration, ok func() bool) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
