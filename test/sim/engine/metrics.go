package engine

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// Stats is a snapshot of an engine's load and counters; tokens unless said.
type Stats struct {
	Running, Waiting           int // requests
	KVUsage                    float64
	PrefixQueries, PrefixHits  uint64
	PromptTokens, CachedTokens uint64
	GenerationTokens           uint64
	// PrefillSeconds is the simulated time spent on prefills, before Speedup.
	PrefillSeconds float64
}

// Stats returns the engine's present load and counters.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.mu.count
	return Stats{
		Running: e.mu.running, Waiting: len(e.mu.waiting), KVUsage: e.usageLocked(),
		PrefixQueries: c.queries, PrefixHits: c.hits, PromptTokens: c.prompt, CachedTokens: c.cached, GenerationTokens: c.generated,
		PrefillSeconds: c.prefillSeconds,
	}
}

func (e *Engine) usageLocked() float64 {
	return float64(e.mu.reserved) / float64(e.opts.KVTokens/e.opts.BlockTokens)
}

// handleMetrics writes the Prometheus text page under vLLM's names and labels.
func (e *Engine) handleMetrics(w http.ResponseWriter, _ *http.Request) {
	s := e.Stats()
	e.mu.Lock()
	finished := maps.Clone(e.mu.count.finished)
	e.mu.Unlock()
	var b bytes.Buffer
	labels := fmt.Sprintf("engine=\"0\",model_name=%q", e.opts.ServedModel)
	family := func(name, kind, help string) {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
	}
	one := func(name, kind, help string, v float64) {
		family(name, kind, help)
		fmt.Fprintf(&b, "%s{%s} %v\n", name, labels, v)
	}
	one("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", float64(s.Running))
	one("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", float64(s.Waiting))
	one("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", s.KVUsage)
	one("vllm:prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of number of queried tokens.", float64(s.PrefixQueries))
	one("vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens.", float64(s.PrefixHits))
	one("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", float64(s.PromptTokens))
	one("vllm:prompt_tokens_cached_total", "counter", "Number of cached prompt tokens.", float64(s.CachedTokens))
	one("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", float64(s.GenerationTokens))
	family("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for _, reason := range slices.Sorted(maps.Keys(finished)) {
		if reason != "abort" { // the engine this follows does not count them
			fmt.Fprintf(&b, "vllm:request_success_total{%s,finished_reason=%q} %d\n", labels, reason, finished[reason])
		}
	}
	family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	fmt.Fprintf(&b, "vllm:cache_config_info{block_size=\"%d\",engine=\"0\",num_gpu_blocks=\"%d\",enable_prefix_caching=\"True\",kv_cache_size_tokens=\"%d\"} 1\n",
		e.opts.BlockTokens, e.opts.KVTokens/e.opts.BlockTokens, e.opts.KVTokens)
	family("hearth_sim:prefill_seconds_total", "counter", "Simulated seconds of prefill.")
	fmt.Fprintf(&b, "hearth_sim:prefill_seconds_total{%s} %v\n", labels, s.PrefillSeconds)
	family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	fmt.Fprintf(&b, "process_start_time_seconds %.3f\n", float64(e.started.UnixMilli())/1000)
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = w.Write(b.Bytes()) // the scraper is gone: nothing to tell it
}
