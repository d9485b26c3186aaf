package endpoints

import (
	"bytes"
	"math"
	"strconv"
)

// reading is what one scrape of an engine says. Absent figures are 0.
type reading struct {
	running, waiting uint32
	usage            float64 // 0..1
	capacity         uint64  // tokens
	block            uint32  // tokens
	prompt           uint64
	cached           uint64
	generated        uint64
	maxRunning       uint32
	started          float64 // seconds since 1970, 0 where unknown
	found            bool    // at least one line was the engine's
}

// field names what a metric's value means.
type field uint8

const (
	fRunning field = iota + 1
	fWaiting
	fUsage
	fPrompt
	fCached
	fHits     // prefix cache hits, believed where fCached is absent
	fUncached // prompt tokens computed, where cached ones are counted apart
	fGenerated
	fMaxRunning
	fCapacity
	fStarted
	fInfo // a metric whose labels carry block size and count
)

// vLLM and the simulator share names; so does everything that imitates vLLM.
var vllmNames = map[string]field{
	"vllm:num_requests_running":        fRunning,
	"vllm:num_requests_waiting":        fWaiting,
	"vllm:kv_cache_usage_perc":         fUsage,
	"vllm:gpu_cache_usage_perc":        fUsage, // before 0.10
	"vllm:prompt_tokens_total":         fPrompt,
	"vllm:prompt_tokens_cached_total":  fCached,
	"vllm:prefix_cache_hits_total":     fHits,
	"vllm:gpu_prefix_cache_hits_total": fHits, // before 0.10
	"vllm:generation_tokens_total":     fGenerated,
	"vllm:max_num_seqs":                fMaxRunning,
	"vllm:cache_config_info":           fInfo,
	"process_start_time_seconds":       fStarted,
}

var sglangNames = map[string]field{
	"sglang:num_running_reqs":        fRunning,
	"sglang:num_queue_reqs":          fWaiting,
	"sglang:token_usage":             fUsage,
	"sglang:prompt_tokens_total":     fPrompt,
	"sglang:cached_tokens_total":     fCached,
	"sglang:generation_tokens_total": fGenerated,
	"sglang:max_running_requests":    fMaxRunning,
	"sglang:max_total_num_tokens":    fCapacity,
	"sglang:cache_config_info":       fInfo,
	"process_start_time_seconds":     fStarted,
}

var llamaNames = map[string]field{
	"llamacpp:requests_processing":        fRunning,
	"llamacpp:requests_deferred":          fWaiting,
	"llamacpp:kv_cache_usage_ratio":       fUsage,
	"llamacpp:prompt_tokens_total":        fUncached,
	"llamacpp:prompt_tokens_cached_total": fCached,
	"llamacpp:tokens_predicted_total":     fGenerated,
	"process_start_time_seconds":          fStarted,
}

var namesOf = map[string]map[string]field{
	EngineVLLM: vllmNames, EngineSim: vllmNames, EngineSGLang: sglangNames, EngineLlamaServer: llamaNames,
}

// parse reads the few lines of a metrics page that names lists. It walks the
// page once and keeps none of it. A metric that appears once per engine core
// or rank is summed, except usage (their mean) and facts of the process (the
// greatest). Lines it cannot read are passed over.
func parse(page []byte, names map[string]field) reading {
	var r reading
	var usages int
	var hits, uncached uint64
	var exact bool
	for len(page) > 0 {
		var line []byte
		line, page, _ = bytes.Cut(page, []byte{'\n'})
		name, labels, value, ok := split(line)
		if !ok {
			continue
		}
		f, wanted := names[string(name)]
		if !wanted {
			continue
		}
		if f != fStarted {
			r.found = true
		}
		switch f {
		case fRunning:
			r.running = addCount(r.running, value)
		case fWaiting:
			r.waiting = addCount(r.waiting, value)
		case fUsage:
			usages++
			r.usage += min(max(value, 0), 1)
		case fPrompt:
			r.prompt = addTotal(r.prompt, value)
		case fUncached:
			uncached = addTotal(uncached, value)
		case fCached:
			exact = true
			r.cached = addTotal(r.cached, value)
		case fHits:
			hits = addTotal(hits, value)
		case fGenerated:
			r.generated = addTotal(r.generated, value)
		case fMaxRunning:
			r.maxRunning = addCount(r.maxRunning, value)
		case fCapacity:
			r.capacity = addTotal(r.capacity, value)
		case fStarted:
			r.started = max(r.started, value)
		case fInfo:
			block, capacity := cacheInfo(labels)
			r.block = max(r.block, block)
			r.capacity = addTotal(r.capacity, float64(capacity))
		}
	}
	if !exact {
		r.cached = hits
	}
	if uncached > 0 {
		r.prompt = uncached + r.cached
	}
	if usages > 1 {
		r.usage /= float64(usages)
	}
	return r
}

// split takes a sample line apart: name, text between the braces, value.
// Comments, NaN, infinities and malformed lines are not ok.
func split(line []byte) (name, labels []byte, value float64, ok bool) {
	if len(line) == 0 || line[0] == '#' {
		return nil, nil, 0, false
	}
	end := bytes.IndexAny(line, "{ \t")
	if end <= 0 {
		return nil, nil, 0, false
	}
	name, rest := line[:end], line[end:]
	if rest[0] == '{' {
		shut := closing(rest)
		if shut < 0 {
			return nil, nil, 0, false
		}
		labels, rest = rest[1:shut], rest[shut+1:]
	}
	rest = bytes.TrimLeft(rest, " \t")
	if stop := bytes.IndexAny(rest, " \t\r"); stop >= 0 {
		rest = rest[:stop] // a timestamp may follow
	}
	value, err := strconv.ParseFloat(string(rest), 64)
	if err != nil || math.IsNaN(value) || math.IsInf(value, 0) {
		return nil, nil, 0, false
	}
	return name, labels, value, true
}

// closing is the index of the brace that ends the labels, -1 where none does.
func closing(text []byte) int {
	quoted := false
	for i := 1; i < len(text); i++ {
		switch {
		case quoted && text[i] == '\\':
			i++
		case text[i] == '"':
			quoted = !quoted
		case !quoted && text[i] == '}':
			return i
		}
	}
	return -1
}

// cacheInfo reads block size in tokens and capacity in tokens from the labels
// of a cache_config_info line. The engine's own total is believed before the
// product of size and count.
func cacheInfo(labels []byte) (block uint32, capacity uint64) {
	size := labelCount(labels, "block_size", "page_size")
	total := labelCount(labels, "kv_cache_size_tokens")
	if total == 0 && size > 0 {
		if count := labelCount(labels, "num_gpu_blocks", "num_pages"); count <= math.MaxUint32 {
			total = size * count
		}
	}
	return uint32(min(size, math.MaxUint32)), total
}

// labelCount gives the first of the labels that is a positive whole number
// below 2^40, else 0 (engines write None there).
func labelCount(labels []byte, names ...string) uint64 {
	for _, name := range names {
		for rest := labels; ; {
			at := bytes.Index(rest, []byte(name+`="`))
			if at < 0 {
				break
			}
			whole := at == 0 || rest[at-1] == ','
			rest = rest[at+len(name)+2:]
			text, _, shut := bytes.Cut(rest, []byte{'"'})
			if !whole || !shut {
				continue
			}
			if n, err := strconv.ParseUint(string(text), 10, 40); err == nil {
				return n
			}
			break
		}
	}
	return 0
}

func addCount(sum uint32, value float64) uint32 {
	return uint32(min(float64(sum)+max(value, 0), math.MaxUint32))
}

func addTotal(sum uint64, value float64) uint64 {
	return uint64(min(float64(sum)+max(value, 0), 1<<53))
}
