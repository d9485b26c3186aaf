// Package endpoints owns what a node knows of its local engines: where they
// are, whether they answer, what they serve and how loaded they are. The agent
// runs one Poller, tells it which engines come and go, and puts its snapshots
// into the report. The package never
// sends a request that computes anything, never decides where requests go,
// and costs an engine at most 0.5 % of one core.
package endpoints

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"
)

// Kinds of engines.
const (
	EngineVLLM        = "vllm"
	EngineSGLang      = "sglang"
	EngineLlamaServer = "llama-server"
	EngineSim         = "sim"
)

// Engines lists the kinds of engines.
var Engines = []string{EngineVLLM, EngineSGLang, EngineLlamaServer, EngineSim}

// Limits.
const (
	MaxEndpoints = 256     // of a node
	maxPage      = 1 << 20 // bytes of one answer of an engine
	maxServed    = 64      // models one engine serves
	readTimeout  = 5 * time.Second
	// patience is how many reads in a row may time out before the engine
	// counts as unreachable: a busy one answers late.
	patience = 3
)

// Endpoint is one engine as configured.
type Endpoint struct {
	Name        string // unique in the node
	URL         string // http://host:port without a path
	Engine      string // one of Engines
	Pool        string
	Accelerator string   // accelerator class for metering, such as "H200"
	Devices     []string // device ids it runs on
	Ref         string   // artifact it serves, if that came from the cache
	Models      []string // served model names; empty asks the engine
	Pod         string   // UID of the pod that the engine runs in, if any
}

// sameEngine reports whether two entries are one engine, of which what is known
// stays known: all that it is asked by is the same.
func sameEngine(a, b *Endpoint) bool {
	return a.Name == b.Name && a.URL == b.URL && a.Engine == b.Engine && a.Pod == b.Pod && slices.Equal(a.Models, b.Models)
}

// Load is what an engine said of its work. Figures are 0 where it does not say.
type Load struct {
	At               time.Time // when it was read, zero for never
	Running, Waiting uint32    // requests
	KVUsage          float64   // 0..1
	KVCapacityTokens uint64
	BlockTokens      uint32
	PromptTokens     uint64 // since the engine's start, cached ones included
	CachedTokens     uint64
	GeneratedTokens  uint64
	MaxRunning       uint32 // requests computed at once
}

// State is an endpoint with what is known of it. Values are not changed after
// they were given out.
type State struct {
	Endpoint

	ServedModels []string
	Reachable    bool
	// Incarnation changes when the engine restarts; 0 before it answered,
	// report.RunFound where it ran already and does not tell its start.
	Incarnation uint64
	Load        Load
	// Detail says why the engine is not reachable.
	Detail string
}

// check tells what is wrong with a list of endpoints.
func check(list []Endpoint) error {
	if len(list) > MaxEndpoints {
		return fmt.Errorf("%d endpoints, at most %d are allowed", len(list), MaxEndpoints)
	}
	seen := map[string]bool{}
	for _, e := range list {
		if e.Name == "" || seen[e.Name] {
			return fmt.Errorf("endpoint name %q is empty or used twice", e.Name)
		}
		seen[e.Name] = true
		if err := CheckURL(e.URL); err != nil {
			return fmt.Errorf("endpoint %q: %w", e.Name, err)
		}
		if !slices.Contains(Engines, e.Engine) {
			return fmt.Errorf("endpoint %q: engine is %q, want one of %v", e.Name, e.Engine, Engines)
		}
	}
	return nil
}

// CheckURL tells whether a URL can be an engine's: http or https with a host
// and nothing else.
func CheckURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil ||
		u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("url is not of the form http://host:port")
	}
	return nil
}

// period is the pause between two reads of an engine: at least a second, at
// most ten, and long enough that the shortest of the recent reads is 0.5 % of
// it. The shortest is the nearest to what the engine spends; the rest is waiting.
func period(recent []time.Duration) time.Duration {
	if len(recent) == 0 {
		return time.Second
	}
	return min(max(200*slices.Min(recent), time.Second), 10*time.Second)
}

// backoff is the pause before the next try after so many failures in a row. A
// refused connection costs an engine nothing, so one that does not listen yet
// is found within a second of its start.
func backoff(failures int, refused bool) time.Duration {
	if refused {
		return time.Second
	}
	return min(time.Second<<min(max(failures-1, 0), 4), 10*time.Second)
}
