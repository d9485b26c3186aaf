package pool

import (
	"container/list"
	"sync"
)

// responses maps response ids of /v1/responses to the incarnation of the
// endpoint that holds them. Full: the least recently used id is forgotten.
type responses struct {
	limit int

	mu    sync.Mutex
	order *list.List               // of *held, most recently used first; guarded by mu
	byID  map[string]*list.Element // guarded by mu
}

type held struct {
	id       string
	endpoint *endpoint
}

// maxResponseID bounds one id in bytes; engines' ids have about 40.
const maxResponseID = 256

func newResponses(limit int) *responses {
	return &responses{limit: limit, order: list.New(), byID: map[string]*list.Element{}}
}

func (r *responses) remember(id string, e *endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if el, found := r.byID[id]; found {
		el.Value = &held{id, e}
		r.order.MoveToFront(el)
		return
	}
	for len(r.byID) >= r.limit {
		last := r.order.Back()
		r.order.Remove(last)
		delete(r.byID, last.Value.(*held).id)
	}
	r.byID[id] = r.order.PushFront(&held{id, e})
}

func (r *responses) holder(id string) (*endpoint, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	el, found := r.byID[id]
	if !found {
		return nil, false
	}
	r.order.MoveToFront(el)
	return el.Value.(*held).endpoint, true
}

func (r *responses) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.byID)
}

// Remember notes which endpoint holds a response of /v1/responses. Ids longer
// than 256 bytes and unknown endpoints are not remembered.
func (p *Pools) Remember(responseID, endpointID string) {
	e := p.routes.Load().endpoints[endpointID]
	if e == nil || responseID == "" || len(responseID) > maxResponseID {
		return
	}
	p.responses.remember(responseID, e)
}

// Holder gives the endpoint that holds a response. It is not found once it is
// forgotten, or once the endpoint is gone or restarted: the engine's memory of
// the response is gone with it.
func (p *Pools) Holder(responseID string) (endpointID string, found bool) {
	e, found := p.responses.holder(responseID)
	if !found || p.routes.Load().endpoints[e.id] != e {
		return "", false
	}
	return e.id, true
}
