// Package pick decides which endpoint serves a request. Pick is one pure
// function over immutable values: it takes no lock, reads no clock and does no
// I/O. The pool package calls it with a snapshot and applies the answer.
package pick

import "time"

// Key identifies a prefix of a request: a chained 64-bit hash over about 256
// bytes of its canonical walk. Key i of a request covers blocks 0..i.
type Key = uint64

// BlockBytes is the length of one hashed prefix block in bytes.
const BlockBytes = 256

// Request is what the choice depends on. The proxy fills it from one forward
// scan of the body; nothing in it refers to the body itself.
type Request struct {
	ID    string // request id, for logs
	Model string // logical model name as the client sent it
	// Keys are the chained prefix keys, longest last. They are independent of
	// the target; the pool salts them with model and adapter.
	Keys []Key
	// PromptBytes is the length of the canonical walk; PromptTokens is the
	// estimate made from it (about 4 bytes a token).
	PromptBytes  int
	PromptTokens int
	// MaxTokens is the most the client lets the engine generate, 0 if unsaid.
	MaxTokens int
	// Needs are capabilities the target must declare ("tools", "vision", ...).
	Needs []string
	// Pin, when set, is the only endpoint that may serve (a response id of
	// /v1/responses maps to it).
	Pin string
	// Conversation is the same in every turn of a conversation, 0 where the
	// request is none. Targets with a weight are drawn by it.
	Conversation uint64
	// Tie spreads equal candidates: any value that differs from request to request.
	Tie uint64
}

// Health is the folded state of an endpoint's devices.
type Health uint8

// Health values, best first.
const (
	Healthy Health = iota
	Degraded
	Unhealthy
)

// Candidate is one endpoint as Pick sees it.
type Candidate struct {
	ID     string // node/name, or the URL of a static endpoint
	Health Health
	// Draining endpoints get no new request, not even the last one of a pool.
	Draining bool
	// Suspended endpoints failed to connect lately (passive health, half open
	// after a pause); they are chosen only where nothing else is left.
	Suspended bool
	// MatchedBlocks counts leading keys of the request this endpoint holds.
	MatchedBlocks int
	// HeldBlocks is what the endpoint's prefix memory holds of CapacityBlocks (0 =
	// unknown); cold prefixes go where less of it is in use.
	HeldBlocks, CapacityBlocks int
	// Load the node reported, and its age. A stale report lowers confidence in
	// Running, Waiting and KVUsage; it never removes the endpoint.
	Running, Waiting int
	// InFlightAtReport is the most this router had in flight there while the
	// report was made: that part of Running and Waiting is its own, and InFlight
	// says better what became of it.
	InFlightAtReport int
	MaxRunning       int // 0 = unknown
	KVUsage          float64
	LoadAge          time.Duration
	// What this router itself has in flight there.
	InFlight             int
	InFlightPromptTokens int // uncached tokens of requests before their first byte
	InFlightDecodeTokens int
	// PrefillRate is prompt tokens per second as learned or configured, 0 = unknown.
	PrefillRate float64
}
