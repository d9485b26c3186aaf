package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/hearth-dev/hearth/units"
)

// Modes of a Fault.
const (
	FaultDie     = "die"     // the process ends at that token
	FaultHang    = "hang"    // no further byte until the client leaves
	FaultReset   = "reset"   // the connection breaks at that token
	FaultTrickle = "trickle" // every further token takes Delay
	FaultGarbage = "garbage" // chunks that are no JSON
	FaultStatus  = "status"  // an error status instead of an answer
)

// Fault is what POST /sim/fault sets: the next Count generating requests
// misbehave, from token AfterTokens on. Count 0 clears the fault.
type Fault struct {
	Mode        string         `json:"mode"`
	Count       int            `json:"count"`
	AfterTokens int            `json:"afterTokens,omitempty"`
	Delay       units.Duration `json:"delay,omitempty"`      // trickle
	Status      int            `json:"status,omitempty"`     // status; default 500
	RetryAfter  string         `json:"retryAfter,omitempty"` // status: the header, verbatim
}

var errFault = errors.New("fault")

func (e *Engine) handleFault(w http.ResponseWriter, r *http.Request) {
	var f Fault
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&f); err != nil {
		refuse(w, badRequest("", "read fault: %v", err))
		return
	}
	switch f.Mode {
	case FaultDie, FaultHang, FaultReset, FaultTrickle, FaultGarbage, FaultStatus:
	default:
		refuse(w, badRequest("mode", "unknown fault %q", f.Mode))
		return
	}
	e.mu.Lock()
	e.mu.fault = f
	e.mu.Unlock()
	writeJSON(w, http.StatusOK, f)
}

// takeFaultLocked hands the pending fault to one request.
func (e *Engine) takeFaultLocked() Fault {
	if e.mu.fault.Count == 0 {
		return Fault{}
	}
	e.mu.fault.Count--
	return e.mu.fault
}

// refusal answers a request whose fault is a status.
func (g *generation) refusal(w http.ResponseWriter) bool {
	if g.fault.Mode != FaultStatus {
		return false
	}
	status := g.fault.Status
	if status == 0 {
		status = http.StatusInternalServerError
	}
	if g.fault.RetryAfter != "" {
		w.Header().Set("Retry-After", g.fault.RetryAfter)
	}
	writeError(w, status, "InternalServerError", "", "injected fault")
	return true
}

// beforeToken does what the request's fault asks for at token i, from 0.
func (g *generation) beforeToken(ctx context.Context, i int) error {
	if i < g.fault.AfterTokens {
		return nil
	}
	switch g.fault.Mode {
	case FaultHang:
		<-ctx.Done()
		return ctx.Err()
	case FaultReset:
		return errFault
	case FaultTrickle:
		return g.engine.opts.Sleep(ctx, time.Duration(g.fault.Delay))
	case FaultDie:
		g.engine.mu.Lock()
		g.engine.mu.dead = true
		g.engine.mu.Unlock()
		if g.engine.opts.Die != nil {
			g.engine.opts.Die()
		}
		return errFault
	}
	return nil
}
