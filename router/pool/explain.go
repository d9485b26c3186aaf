package pool

import "github.com/hearth-dev/hearth/router/pick"

// Explanation is what Acquire would do with a request, and why. Nothing is
// reserved or remembered for it.
type Explanation struct {
	Model   string              `json:"model"`
	Error   string              `json:"error,omitempty"`
	Pool    string              `json:"pool,omitempty"`
	Served  string              `json:"servedModel,omitempty"`
	Chosen  string              `json:"endpoint,omitempty"`
	Reason  pick.Reason         `json:"reason,omitempty"`
	Alarm   bool                `json:"alarm,omitempty"`
	Credit  int                 `json:"predictedCachedTokens"`
	Targets []TargetExplanation `json:"targets"` // in the order in which they were asked
}

// TargetExplanation is one target's part of an Explanation.
type TargetExplanation struct {
	Pool        string      `json:"pool"`
	ServedModel string      `json:"servedModel"`
	Weight      int         `json:"weight"`
	Ready       bool        `json:"ready"`
	Skipped     string      `json:"skipped,omitempty"` // why it was not asked or could not take it
	Candidates  []pick.Term `json:"candidates,omitempty"`
}
