package pool

import (
	"errors"
	"fmt"
	"strings"
)

// Errors of Acquire. UnmetNeedsError wraps ErrUnmetNeeds and carries the facts,
// NoEndpointError wraps ErrNoEndpoint.
var (
	// ErrUnknownModel means that no logical model has the name.
	ErrUnknownModel = errors.New("unknown model")
	// ErrNoEndpoint means that the model exists and nothing can answer now.
	ErrNoEndpoint = errors.New("no endpoint")
	// ErrUnmetNeeds means that no target declares what the request needs.
	ErrUnmetNeeds = errors.New("unmet needs")
)

// UnmetNeedsError says what a request needs and no target of its model has.
type UnmetNeedsError struct {
	Model   string
	Missing []string // capabilities that no target has together with the rest
	// PromptTokens and ContextTokens are set where the request is too long: its
	// estimated length and the longest context of the targets.
	PromptTokens, ContextTokens int
}

// Error names what is missing.
func (e *UnmetNeedsError) Error() string {
	if len(e.Missing) > 0 {
		return fmt.Sprintf("acquire endpoint for %q: no target declares %s", e.Model, strings.Join(e.Missing, ", "))
	}
	return fmt.Sprintf("acquire endpoint for %q: about %d prompt tokens do not fit the context of %d", e.Model, e.PromptTokens, e.ContextTokens)
}

// Unwrap gives ErrUnmetNeeds.
func (e *UnmetNeedsError) Unwrap() error { return ErrUnmetNeeds }

// NoEndpointError says why nothing can answer a model that exists.
type NoEndpointError struct {
	Model string
	// Causes has one line per target, in their order.
	Causes []string
	// Tried is set when endpoints exist and the caller avoided all of them.
	Tried bool
}

// Error gives the causes.
func (e *NoEndpointError) Error() string {
	return fmt.Sprintf("acquire endpoint for %q: %s", e.Model, strings.Join(e.Causes, "; "))
}

// Unwrap gives ErrNoEndpoint.
func (e *NoEndpointError) Unwrap() error { return ErrNoEndpoint }
