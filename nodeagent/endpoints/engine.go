package endpoints

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// recentReads is how many reads the period looks back on.
const recentReads = 20

// engine is one endpoint with what its goroutine remembers between reads.
type engine struct {
	config Endpoint
	http   *http.Client
	now    func() time.Time
	page   bytes.Buffer

	state    State
	last     reading
	refused  bool // the engine was seen not to listen since the last read
	failures int  // in a row
	recent   []time.Duration
	static   facts
}

// facts are what is asked once per incarnation.
type facts struct {
	known      bool
	models     []string
	maxRunning uint32
	capacity   uint64
}

func newEngine(config Endpoint, client *http.Client, now func() time.Time) *engine {
	config.URL = strings.TrimSuffix(config.URL, "/")
	return &engine{
		config: config, http: client, now: now,
		state: State{Endpoint: config, ServedModels: config.Models, Detail: "not read yet"},
	}
}

// statusError is an answer that is not 200.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("status %d", int(s)) }

// get reads one answer into the engine's page. The bytes are good until the next get.
func (e *engine) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, e.config.URL+path, nil)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	response, err := e.http.Do(request)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("read %s: %w", path, statusError(response.StatusCode))
	}
	e.page.Reset()
	if _, err := e.page.ReadFrom(io.LimitReader(response.Body, maxPage+1)); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if e.page.Len() > maxPage {
		return nil, fmt.Errorf("read %s: answer is past %d bytes", path, maxPage)
	}
	return e.page.Bytes(), nil
}

// read asks the engine once and gives the new state and the pause until the next read.
func (e *engine) read(ctx context.Context) (State, time.Duration) {
	began := time.Now()
	page, err := e.get(ctx, "/metrics")
	took := time.Since(began)
	var status statusError
	if errors.As(err, &status) && (status < http.StatusInternalServerError || status == http.StatusNotImplemented) {
		// It answers and has no metrics: reachable, load unknown.
		page, err = nil, nil
	}
	if err != nil {
		state := e.failed(err)
		return state, backoff(e.failures, errors.Is(err, syscall.ECONNREFUSED))
	}
	e.recent = append(e.recent, took)
	if len(e.recent) > recentReads {
		e.recent = e.recent[1:]
	}
	r := parse(page, namesOf[e.config.Engine])
	now := e.now()
	if id := incarnation(e.state.Incarnation, e.last, r, e.refused, now); id != e.state.Incarnation {
		e.state.Incarnation = id
		e.static = facts{}
	}
	e.last, e.refused, e.failures = r, false, 0
	if !e.static.known {
		e.static = e.ask(ctx)
	}
	load := Load{
		Running: r.running, Waiting: r.waiting, KVUsage: r.usage,
		KVCapacityTokens: r.capacity, BlockTokens: r.block,
		PromptTokens: r.prompt, CachedTokens: r.cached, GeneratedTokens: r.generated, MaxRunning: r.maxRunning,
	}
	if r.found {
		load.At = now
	}
	if load.MaxRunning == 0 {
		load.MaxRunning = e.static.maxRunning
	}
	if load.KVCapacityTokens == 0 {
		load.KVCapacityTokens = e.static.capacity
	}
	e.state.Load, e.state.ServedModels = load, e.static.models
	e.state.Reachable, e.state.Detail = true, ""
	return e.state, period(e.recent)
}

// failed notes a read that brought nothing. An engine that does not listen is
// unreachable at once, a slow one after some patience; its last load stays.
func (e *engine) failed(err error) State {
	e.failures++
	refused := errors.Is(err, syscall.ECONNREFUSED)
	e.refused = e.refused || refused
	if refused || e.failures >= patience {
		e.state.Reachable = false
	}
	e.state.Detail = err.Error()
	return e.state
}

// incarnation says which run of the engine a reading is of: present for the
// one of before, another number for a new one. Engines that tell their start
// are believed; for the others a counter that fell, or a time in which nobody
// listened, means a new run.
func incarnation(present uint64, last, r reading, refused bool, now time.Time) uint64 {
	if r.started > 0 && r.started < math.MaxInt32*10 {
		if last.started > 0 && present != 0 && math.Abs(r.started-last.started) < 0.5 {
			return present
		}
		return uint64(r.started * 1000)
	}
	fresh := max(uint64(now.UnixMilli()), present+1)
	switch {
	case present == 0 && !refused:
		return report.RunFound
	case present == 0, refused,
		r.prompt < last.prompt, r.generated < last.generated, r.cached < last.cached:
		return fresh
	}
	return present
}

// ask reads what stays the same while an engine runs. What it cannot read is
// asked again with the next read, save what the engine does not offer.
func (e *engine) ask(ctx context.Context) facts {
	f := facts{known: true, models: e.config.Models}
	if len(f.models) == 0 {
		models, err := e.served(ctx)
		f.models, f.known = models, err == nil
	}
	if e.config.Engine == EngineLlamaServer {
		slots, capacity, err := e.slots(ctx)
		f.maxRunning, f.capacity = slots, capacity
		var status statusError
		if err != nil && !errors.As(err, &status) {
			f.known = false
		}
	}
	return f
}

// served lists the model names of /v1/models.
func (e *engine) served(ctx context.Context) ([]string, error) {
	page, err := e.get(ctx, "/v1/models")
	if err != nil {
		return nil, err
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(page, &list); err != nil {
		return nil, fmt.Errorf("read /v1/models: %w", err)
	}
	var names []string
	for _, m := range list.Data {
		if m.ID != "" && len(m.ID) <= 1024 && len(names) < maxServed {
			names = append(names, m.ID)
		}
	}
	return names, nil
}

// slots reads llama-server's /slots: how many there are and the tokens of
// context they hold together.
func (e *engine) slots(ctx context.Context) (count uint32, tokens uint64, err error) {
	page, err := e.get(ctx, "/slots")
	if err != nil {
		return 0, 0, err
	}
	var slots []struct {
		Context uint32 `json:"n_ctx"`
	}
	if err := json.Unmarshal(page, &slots); err != nil {
		return 0, 0, fmt.Errorf("read /slots: %w", err)
	}
	for _, s := range slots {
		tokens += uint64(s.Context)
	}
	return uint32(min(len(slots), math.MaxUint16)), tokens, nil
}
