// Package check is the headless scenario of `hearth up --check`: it runs a
// fabric of real processes through the main job and the faults it must bear,
// and takes every figure from the counters of the origin and the engines.
// `hearth up` calls it. It holds no bound on speed except the one that a step
// names.
package check

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
