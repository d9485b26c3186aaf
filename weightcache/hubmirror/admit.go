package hubmirror

import "sync"

// places admits a bounded number of bodies at once, in the order in which they
// asked. What waits costs no goroutine of its own.
type places struct {
	mu    sync.Mutex
	free  int
	queue []*place // waiting, first come first
}

// place is one body's claim on being sent.
type place struct {
	of      *places
	granted chan struct{} // closed once the body may be sent
	ended   bool          // guarded by of.mu
}

// ask queues a claim; granted closes at once where a place is free.
func (p *places) ask() *place {
	c := &place{of: p, granted: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free > 0 {
		p.free--
		close(c.granted)
		return c
	}
	p.queue = append(p.queue, c)
	return c
}

// has reports whether the claim was granted and not ended since.
func (c *place) has() bool {
	if c == nil {
		return false
	}
	select {
	case <-c.granted:
		return true
	default:
		return false
	}
}

// end gives the place to whoever waits longest, or leaves the queue. More than
// once, or for nil, is harmless.
func (c *place) end() {
	if c == nil {
		return
	}
	p := c.of
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.ended {
		return
	}
	c.ended = true
	if !c.has() {
		for i, waiting := range p.queue {
			if waiting == c {
				p.queue = append(p.queue[:i], p.queue[i+1:]...)
				return
			}
		}
		return
	}
	if len(p.queue) == 0 {
		p.free++
		return
	}
	close(p.queue[0].granted)
	p.queue = p.queue[1:]
}
