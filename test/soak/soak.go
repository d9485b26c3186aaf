// Package soak drives the router with a long mixed load while engines, agents,
// devices and routers fail, and then compares three books that must agree:
// what each client saw, what each engine says it generated, and the routers'
// usage records. Its own tests call it: the short ones in process with every
// `make test`, the long one over real processes with `make soak`. A router is
// replaced as behind any balancer: a second process on another address takes
// the new requests, and the first drains what it has begun. It measures
// no speed, knows nothing of the router's inside beyond its admin API, and no
// other package builds on it.
package soak

import (
	"context"
	"crypto/tls"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// ServedModel is the name to which the engines of a soak answer. Models are
// the logical models that its routers offer.
const ServedModel = "sim"

// Models are the logical models of a soak.
var Models = []string{"exact", "plain"}

// EngineSeed is the seed of every engine, so that each gives the same answer.
const EngineSeed = 7

// Front is one router as clients see it.
type Front struct {
	Name string
	URL  string // http:// or https://
	// Retired is set before the router is told to stop: from then on it may
	// close a connection on which a request is just being sent.
	Retired atomic.Bool

	plain *http.Client // HTTP/1.1
	multi *http.Client // HTTP/2; nil where the router speaks plain text
}

// NewFront gives the clients of one router. roots is nil for plain text.
func NewFront(name, url string, roots *tls.Config) *Front {
	dial := (&net.Dialer{}).DialContext // bounded by the request's patience
	f := &Front{Name: name, URL: url}
	f.plain = &http.Client{Transport: &http.Transport{
		DialContext: dial, MaxIdleConnsPerHost: 256, TLSClientConfig: roots, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}}
	if roots != nil {
		f.multi = &http.Client{Transport: &http.Transport{DialContext: dial, TLSClientConfig: roots.Clone(), ForceAttemptHTTP2: true}}
	}
	return f
}

// CloseIdle closes the connections that no request uses.
func (f *Front) CloseIdle() {
	f.plain.CloseIdleConnections()
	if f.multi != nil {
		f.multi.CloseIdleConnections()
	}
}

// Load is a set of clients that ask without end.
type Load struct {
	// Fronts gives the routers to ask now.
	Fronts func() []*Front
	// Clients ask at a time, each one request after the other.
	Clients int
	Seed    uint64
	// Name begins every request's id.
	Name string
	// Big bounds the prompts, in bytes; 0 is 4 MiB.
	Big int
	// Patience is how long a client waits for an answer; 0 is 5 minutes. It
	// tells a request that is stuck, and no slow machine: what hangs at an engine
	// ends when that is killed.
	Patience time.Duration

	Book Book

	gate   sync.RWMutex // held by Calm
	serial atomic.Uint64
}

// Run asks until ctx ends and lets each client finish the request it has.
func (l *Load) Run(ctx context.Context) {
	if l.Big == 0 {
		l.Big = 4 << 20
	}
	if l.Patience == 0 {
		l.Patience = 5 * time.Minute
	}
	var group sync.WaitGroup
	for i := range l.Clients {
		group.Go(func() {
			rng := rand.New(rand.NewPCG(l.Seed, uint64(i)))
			for ctx.Err() == nil {
				l.one(context.WithoutCancel(ctx), rng)
			}
		})
	}
	group.Wait()
}

// Calm keeps every client from asking while f runs, after those under way have
// ended.
func (l *Load) Calm(f func()) {
	l.gate.Lock()
	defer l.gate.Unlock()
	for _, front := range l.Fronts() {
		front.CloseIdle()
	}
	f()
}

// one makes one request and notes how it went.
func (l *Load) one(ctx context.Context, rng *rand.Rand) {
	l.gate.RLock()
	defer l.gate.RUnlock()
	fronts := l.Fronts()
	front := fronts[rng.IntN(len(fronts))]
	id := l.Name + "-" + base36(l.serial.Add(1))
	ctx, cancel := context.WithTimeout(ctx, l.Patience)
	defer cancel()
	if rng.IntN(20) == 0 {
		l.Book.saw(front.bad(ctx, rng, id))
		return
	}
	l.Book.saw(front.ask(ctx, rng, plan(rng, id, l.Big)))
}
