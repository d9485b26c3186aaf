package hub

import (
	"maps"
	"net/http"
	"strings"
)

// Fault is one way to misbehave. The zero Fault changes nothing; fields
// combine where that makes sense.
type Fault struct {
	// Status answers with this status, Header and an empty body, or Body.
	Status int
	Header http.Header
	Body   string
	// Drop closes the connection without an answer.
	Drop bool
	// IgnoreRange answers 200 with the whole file to a ranged request.
	IgnoreRange bool
	// ContentRange and ETag replace these headers of a file answer.
	ContentRange string
	ETag         string
	// CutAfter breaks the body off after so many bytes, if > 0; 1 byte is the
	// least.
	CutAfter int64
	// StallAfter stops after so many bytes, if > 0, until the client goes or
	// Release is closed.
	StallAfter int64
	Release    <-chan struct{}
	// WrongBytes flips one bit of every piece of the body.
	WrongBytes bool
}

// FaultFunc chooses a fault for a request; nil means none. It is called once
// for every request, also those to the CDN, and must be safe for concurrent
// use.
type FaultFunc func(r *http.Request) *Fault

type scheduledFault struct {
	match string
	left  int
	fault Fault
}

// SetFault installs f for requests from here on; nil clears it.
func (o *Origin) SetFault(f FaultFunc) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fault = f
}

// AddFault makes the next n requests whose path contains match fail so, before
// SetFault's function is asked.
func (o *Origin) AddFault(match string, n int, f Fault) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.faultList = append(o.faultList, scheduledFault{match, n, f})
}

// faultFor takes the fault of a request; never nil.
func (o *Origin) faultFor(r *http.Request) *Fault {
	o.mu.Lock()
	for i := range o.faultList {
		s := &o.faultList[i]
		if s.left > 0 && strings.Contains(r.URL.Path, s.match) {
			s.left--
			f := s.fault
			o.mu.Unlock()
			return &f
		}
	}
	choose := o.fault
	o.mu.Unlock()
	if choose != nil {
		if f := choose(r); f != nil {
			return f
		}
	}
	return &Fault{}
}

// apply answers at once where the fault wants that, and reports whether it
// did.
func (f *Fault) apply(w http.ResponseWriter) bool {
	if f.Drop {
		panic(http.ErrAbortHandler)
	}
	maps.Copy(w.Header(), f.Header)
	if f.Status == 0 {
		return false
	}
	w.WriteHeader(f.Status)
	_, _ = w.Write([]byte(f.Body))
	return true
}
