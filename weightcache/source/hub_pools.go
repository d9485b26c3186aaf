package source

import (
	"context"
	"io"
	"net/http"
	"sync"
)

// maxPools bounds the connection pools of flights at once. Further flights
// share the connections of requests without a flight, and are not told apart.
const maxPools = 64

// pools are a Hub's connections. Each flight has its own, so that no connection
// carries bytes of two: whoever counts a connection counts one flight.
type pools struct {
	fresh  func() *pool
	shared *pool // of requests without a flight

	mu      sync.Mutex
	flights map[uint32]*pool
}

// pool is a client with connections of its own.
type pool struct {
	*http.Client

	// Guarded by pools.mu:
	users int  // requests and answers that are not done
	ended bool // its flight is over
}

func newPools(fresh func() *pool) *pools {
	return &pools{fresh: fresh, shared: fresh(), flights: map[uint32]*pool{}}
}

// do sends a request over the connections of its flight. The caller closes the
// answer's body.
func (s *pools) do(req *http.Request) (*http.Response, error) {
	ctx, p := s.take(req.Context())
	resp, err := p.Do(req.WithContext(ctx))
	if err != nil {
		s.give(p)
		return nil, err
	}
	resp.Body = &pooledBody{ReadCloser: resp.Body, give: sync.OnceFunc(func() { s.give(p) })}
	return resp, nil
}

// take gives the pool for a request, and the ctx to dial under: a connection of
// the shared pool is no flight's, whoever asked for it first.
func (s *pools) take(ctx context.Context) (context.Context, *pool) {
	id, found := FlightOf(ctx)
	if !found {
		return ctx, s.shared
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.flights[id]
	if p == nil {
		if len(s.flights) >= maxPools {
			return WithFlight(ctx, 0), s.shared
		}
		p = s.fresh()
		s.flights[id] = p
	}
	p.users++
	return ctx, p
}

// give ends one use. A request that began just as its flight ended has told the
// transport to keep connections again; the last one out closes them.
func (s *pools) give(p *pool) {
	if p == s.shared {
		return
	}
	s.mu.Lock()
	p.users--
	over := p.ended && p.users == 0
	s.mu.Unlock()
	if over {
		p.CloseIdleConnections()
	}
}

// end drops a flight's pool.
func (s *pools) end(id uint32) {
	s.mu.Lock()
	p := s.flights[id]
	delete(s.flights, id)
	if p != nil {
		p.ended = true
	}
	s.mu.Unlock()
	if p != nil {
		p.CloseIdleConnections() // and those that become idle from now on
	}
}

// closeIdle drops the idle connections of all.
func (s *pools) closeIdle() {
	s.mu.Lock()
	all := []*pool{s.shared}
	for _, p := range s.flights {
		all = append(all, p)
	}
	s.mu.Unlock()
	for _, p := range all {
		p.CloseIdleConnections()
	}
}

// pooledBody ends its use of a pool once it is closed.
type pooledBody struct {
	io.ReadCloser
	give func()
}

// Close implements io.Closer.
func (b *pooledBody) Close() error {
	err := b.ReadCloser.Close()
	b.give()
	return err
}
