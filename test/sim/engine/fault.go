package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strconv"
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
	FaultEarly   = "early"   // the same, before the request's body is read
	FaultEnd     = "end"     // a stream ends cleanly without its terminator, a JSON answer after half its length
	FaultRST     = "rst"     // the connection is reset (RST) at that token
	FaultHints   = "hints"   // no fault to a client that knows HTTP: a 103 before the answer, a trailer after a stream
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

var (
	errFault = errors.New("fault")
	errEnd   = errors.New("fault: clean end")
	errRST   = errors.New("fault: reset")
)

func (e *Engine) handleFault(w http.ResponseWriter, r *http.Request) {
	var f Fault
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&f); err != nil {
		refuse(w, badRequest("", "read fault: %v", err))
		return
	}
	switch f.Mode {
	case FaultDie, FaultHang, FaultReset, FaultTrickle, FaultGarbage, FaultStatus, FaultEarly, FaultEnd, FaultRST, FaultHints:
	default:
		refuse(w, badRequest("mode", "unknown fault %q", f.Mode))
		return
	}
	e.mu.Lock()
	e.mu.fault = f
	e.mu.Unlock()
	writeJSON(w, http.StatusOK, f)
}

// early answers a request whose fault comes before its body.
func (e *Engine) early(w http.ResponseWriter, r *http.Request) bool {
	if r.Method != http.MethodPost || r.URL.Path == "/sim/fault" {
		return false
	}
	e.mu.Lock()
	f := e.mu.fault
	taken := f.Mode == FaultEarly && f.Count > 0
	if taken {
		e.mu.fault.Count--
	}
	e.mu.Unlock()
	if taken {
		f.refuse(w)
	}
	return taken
}

// takeFaultLocked hands the pending fault to one request.
func (e *Engine) takeFaultLocked() Fault {
	if e.mu.fault.Count == 0 || e.mu.fault.Mode == FaultEarly {
		return Fault{}
	}
	e.mu.fault.Count--
	return e.mu.fault
}

// refusal answers a request whose fault is a status.
func (g *generation) refusal(w http.ResponseWriter) bool {
	switch g.fault.Mode {
	case FaultStatus:
		g.fault.refuse(w)
		return true
	case FaultHints:
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		w.Header().Set(http.TrailerPrefix+"X-Sim-Trailer", "end")
	}
	return false
}

func (f *Fault) refuse(w http.ResponseWriter) {
	status := f.Status
	if status == 0 {
		status = http.StatusInternalServerError
	}
	if f.RetryAfter != "" {
		w.Header().Set("Retry-After", f.RetryAfter)
	}
	writeError(w, status, "InternalServerError", "", "injected fault")
}

// half sends the first half of an answer that promises a whole one.
func half(w http.ResponseWriter) {
	const body = `{"id":"cut","object":"cut","choices":[{"index":0,"message":`
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(2*len(body)))
	_, _ = w.Write([]byte(body)) // the client is gone: nothing to tell it
}

// reset closes the connection with RST, whatever it still holds.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		abort() // no connection of its own, such as HTTP/2
		return
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
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
	case FaultEnd:
		return errEnd
	case FaultRST:
		return errRST
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
