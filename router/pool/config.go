package pool

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of a configuration.
const (
	MaxModels  = 4096
	MaxTargets = 16 // of one model
	// MaxPools bounds the pools that a configuration and its models name. While
	// so many exist, an endpoint whose node names another is left out and counted.
	MaxPools     = 1024
	MaxEndpoints = 4096 // of all pools together; a further one is left out and counted
	MaxPodPools  = 256  // pools whose endpoints are pods: each is a watch at the API server
	MaxWeight    = 1_000_000
)

// Policies of Config.Policy.
const (
	PolicyHearth     = "hearth"
	PolicyRoundRobin = "round-robin"
)

// ModelConfig is a logical model: the name that clients use and the targets
// that may answer, in the order in which they stand in for each other.
type ModelConfig struct {
	Name    string         `json:"name" yaml:"name"`
	Targets []TargetConfig `json:"targets" yaml:"targets"`
}

// TargetConfig is one way to answer a logical model.
type TargetConfig struct {
	// Pool names the endpoints.
	Pool string `json:"pool" yaml:"pool"`
	// ServedModel is the name under which the engines serve it; empty means the
	// logical model's name. An endpoint that lists its models and lacks this one
	// is no endpoint of the target.
	ServedModel string `json:"servedModel,omitempty" yaml:"servedModel"`
	// Weight is the target's share of the conversations, and of the requests
	// that are of none. Targets of weight 0 get one
	// only when no target with a weight can take it, in their order.
	Weight int `json:"weight,omitempty" yaml:"weight"`
	// Capabilities are what requests may need of it: "tools", "vision", "json".
	// An empty list declares nothing and refuses nothing.
	Capabilities []string `json:"capabilities,omitempty" yaml:"capabilities"`
	// ContextTokens is the longest prompt plus answer, 0 = unknown, refuses nothing.
	ContextTokens int `json:"contextTokens,omitempty" yaml:"contextTokens"`
	// Ref is the artifact it needs. While no node of the pool has it Ready the
	// target gets no request at all. Empty: always ready.
	Ref string `json:"ref,omitempty" yaml:"ref"`
}

// PoolConfig says what the router cannot learn of a pool. A pool that is not
// configured exists as soon as a model or a node names it.
type PoolConfig struct {
	Name string `json:"name" yaml:"name"`
	// Endpoints that no node reports.
	Endpoints []EndpointConfig `json:"endpoints,omitempty" yaml:"endpoints"`
	// Pods selects the pods that are endpoints of the pool. Nodes then add load
	// and health to these and no endpoint of their own.
	Pods PodsConfig `json:"pods,omitzero" yaml:"pods"`
	// ForwardAuthorization passes the client's Authorization header on.
	ForwardAuthorization bool `json:"forwardAuthorization,omitempty" yaml:"forwardAuthorization"`
	// ContinuousUsage says that its engines take continuous_usage_stats.
	ContinuousUsage bool `json:"continuousUsage,omitempty" yaml:"continuousUsage"`
	// PrefillRate is where learning the prompt tokens per second starts, 0 = the
	// policy's default.
	PrefillRate float64 `json:"prefillRate,omitempty" yaml:"prefillRate"`
	// KVCapacityTokens bounds the prefix memory of an endpoint whose engine does
	// not report its KV capacity, 0 = DefaultKVTokens.
	KVCapacityTokens int `json:"kvCapacityTokens,omitempty" yaml:"kvCapacityTokens"`
}

// EndpointConfig is an endpoint that no node reports. Its id is its URL.
type EndpointConfig struct {
	URL              string   `json:"url" yaml:"url"` // http://host:port, no path
	Engine           string   `json:"engine,omitempty" yaml:"engine"`
	Accelerator      string   `json:"accelerator,omitempty" yaml:"accelerator"`
	ServedModels     []string `json:"servedModels,omitempty" yaml:"servedModels"`
	MaxRunning       int      `json:"maxRunning,omitempty" yaml:"maxRunning"`
	KVCapacityTokens int      `json:"kvCapacityTokens,omitempty" yaml:"kvCapacityTokens"`
}

// PodsConfig says which pods of a cluster are a pool's endpoints, and what of
// them only people know; the rest is told by the pods' nodes. Without a
// selector there are none.
type PodsConfig struct {
	Namespace string `json:"namespace,omitempty" yaml:"namespace"` // empty: the router's own
	Selector  string `json:"selector,omitempty" yaml:"selector"`   // of labels, such as "app=vllm,tier in (a,b)"
	Port      string `json:"port,omitempty" yaml:"port"`           // a container's port, by name or number

	Engine           string   `json:"engine,omitempty" yaml:"engine"`
	Accelerator      string   `json:"accelerator,omitempty" yaml:"accelerator"`
	ServedModels     []string `json:"servedModels,omitempty" yaml:"servedModels"`
	MaxRunning       int      `json:"maxRunning,omitempty" yaml:"maxRunning"`
	KVCapacityTokens int      `json:"kvCapacityTokens,omitempty" yaml:"kvCapacityTokens"`
}

// Set reports whether the pool's endpoints are pods.
func (c *PodsConfig) Set() bool { return c.Selector != "" }

// Config is the reloadable part: what SetModels swaps.
type Config struct {
	// Policy is PolicyHearth (or empty) or PolicyRoundRobin.
	Policy string        `json:"policy,omitempty" yaml:"policy"`
	Models []ModelConfig `json:"models" yaml:"models"`
	Pools  []PoolConfig  `json:"pools,omitempty" yaml:"pools"`
}

// Validate reports every field that is wrong and what would be right.
func (c *Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Policy != "" && c.Policy != PolicyHearth && c.Policy != PolicyRoundRobin {
		bad("policy: %q is unknown, want %s or %s", c.Policy, PolicyHearth, PolicyRoundRobin)
	}
	if len(c.Models) > MaxModels {
		bad("models: %d, want at most %d", len(c.Models), MaxModels)
	}
	names := map[string]bool{}
	for i := range c.Models {
		m := &c.Models[i]
		at := fmt.Sprintf("models[%d]", i)
		switch {
		case m.Name == "" || len(m.Name) > maxNameBytes:
			bad("%s.name: want 1 to %d bytes", at, maxNameBytes)
		case names[m.Name]:
			bad("%s.name: %q stands twice, want one entry with several targets", at, m.Name)
		}
		names[m.Name] = true
		if len(m.Targets) == 0 || len(m.Targets) > MaxTargets {
			bad("%s.targets: %d, want 1 to %d", at, len(m.Targets), MaxTargets)
		}
		for j := range m.Targets {
			if err := m.Targets[j].validate(); err != nil {
				bad("%s.targets[%d].%w", at, j, err)
			}
		}
	}
	return errors.Join(append(problems, c.validatePools()...)...)
}

const maxNameBytes = 512

func (t *TargetConfig) validate() error {
	switch {
	case t.Pool == "" || len(t.Pool) > maxNameBytes:
		return fmt.Errorf("pool: want 1 to %d bytes", maxNameBytes)
	case t.Weight < 0 || t.Weight > MaxWeight:
		return fmt.Errorf("weight: %d, want 0 to %d", t.Weight, MaxWeight)
	case t.ContextTokens < 0:
		return fmt.Errorf("contextTokens: %d, want 0 (unknown) or more", t.ContextTokens)
	case slices.Contains(t.Capabilities, ""):
		return errors.New("capabilities: an empty name")
	}
	if t.Ref != "" {
		if _, err := artifact.ParseRef(t.Ref); err != nil {
			return fmt.Errorf("ref: %w", err)
		}
	}
	return nil
}

func (c *Config) validatePools() []error {
	var problems []error
	podPools := 0
	names, urls := map[string]bool{}, map[string]bool{}
	for i := range c.Pools {
		p := &c.Pools[i]
		at := fmt.Sprintf("pools[%d]", i)
		switch {
		case p.Name == "" || len(p.Name) > maxNameBytes:
			problems = append(problems, fmt.Errorf("%s.name: want 1 to %d bytes", at, maxNameBytes))
		case names[p.Name]:
			problems = append(problems, fmt.Errorf("%s.name: %q stands twice", at, p.Name))
		}
		names[p.Name] = true
		if !(p.PrefillRate >= 0) || p.KVCapacityTokens < 0 {
			problems = append(problems, fmt.Errorf("%s: prefillRate and kvCapacityTokens want 0 or more", at))
		}
		if p.Pods.Set() {
			podPools++
		}
		if err := p.Pods.validate(); err != nil {
			problems = append(problems, fmt.Errorf("%s.pods.%w", at, err))
		}
		for j := range p.Endpoints {
			e := &p.Endpoints[j]
			where := fmt.Sprintf("%s.endpoints[%d]", at, j)
			if err := checkURL(e.URL); err != nil {
				problems = append(problems, fmt.Errorf("%s.url: %w", where, err))
			}
			if urls[e.URL] {
				problems = append(problems, fmt.Errorf("%s.url: %s stands twice", where, e.URL))
			}
			urls[e.URL] = true
			if e.MaxRunning < 0 || e.KVCapacityTokens < 0 {
				problems = append(problems, fmt.Errorf("%s: maxRunning and kvCapacityTokens want 0 or more", where))
			}
		}
	}
	if podPools > MaxPodPools {
		problems = append(problems, fmt.Errorf("pools: %d select pods, want at most %d", podPools, MaxPodPools))
	}
	for i := range c.Models {
		for j := range c.Models[i].Targets {
			names[c.Models[i].Targets[j].Pool] = true
		}
	}
	if len(names) > MaxPools {
		problems = append(problems, fmt.Errorf("pools: %d with those that models name, want at most %d", len(names), MaxPools))
	}
	return problems
}

func (c *PodsConfig) validate() error {
	if !c.Set() {
		if c.Namespace != "" || c.Port != "" || c.Engine != "" || c.Accelerator != "" || len(c.ServedModels) > 0 || c.MaxRunning != 0 || c.KVCapacityTokens != 0 {
			return errors.New("selector: is empty, want labels such as app=vllm: no pod is taken unsaid")
		}
		return nil
	}
	selector, err := labels.Parse(c.Selector)
	if err != nil {
		return fmt.Errorf("selector: %w", err)
	}
	if selector.Empty() {
		return errors.New("selector: selects every pod, want labels such as app=vllm")
	}
	if c.Namespace != "" && len(validation.IsDNS1123Label(c.Namespace)) > 0 {
		return fmt.Errorf("namespace: %q, want the name of a namespace", c.Namespace)
	}
	if number, err := strconv.Atoi(c.Port); err == nil {
		if len(validation.IsValidPortNum(number)) > 0 {
			return fmt.Errorf("port: %d, want 1 to 65535", number)
		}
	} else if len(validation.IsValidPortName(c.Port)) > 0 {
		return fmt.Errorf("port: %q, want the name or number of a container's port", c.Port)
	}
	if c.MaxRunning < 0 || c.KVCapacityTokens < 0 {
		return errors.New("maxRunning and kvCapacityTokens: want 0 or more")
	}
	return nil
}

// checkURL accepts http://host:port and https://host:port and nothing after.
func checkURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil ||
		strings.TrimSuffix(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("%q, want http://host:port without a path", text)
	}
	return nil
}
