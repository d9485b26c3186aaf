package resp

import "sync"

// maxFamilies bounds what is remembered of a tenant's families: 24 bytes each.
const maxFamilies = 4096

// sizes remembers the one size of the values of each family of a tenant.
type sizes struct {
	mu    sync.RWMutex
	known map[family]int
	order []family // as they were learned; a ring once it is full
	next  int
}

func (s *sizes) get(f family) (size int, ok bool) {
	if f == 0 {
		return 0, false
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	size, ok = s.known[f]
	return size, ok
}

// learn takes a size that was seen. One that was told before stands unless the
// new one is certain: a native client has just stored such a value.
func (s *sizes) learn(f family, size int, certain bool) {
	if f == 0 {
		return
	}
	if known, ok := s.get(f); ok && (known == size || !certain) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.known[f]; !ok {
		if s.known == nil {
			s.known = make(map[family]int)
		}
		if len(s.order) < maxFamilies {
			s.order = append(s.order, f)
		} else {
			delete(s.known, s.order[s.next])
			s.order[s.next] = f
			s.next = (s.next + 1) % maxFamilies
		}
	} else if !certain {
		return
	}
	s.known[f] = size
}

// ownSizes are those that one native connection stored itself: they are what its
// process awaits, whatever another client of the tenant stores.
type ownSizes struct {
	families [4]family
	sizes    [4]int
	next     int
}

func (o *ownSizes) get(f family) (int, bool) {
	if f == 0 {
		return 0, false
	}
	for i, known := range o.families {
		if known == f {
			return o.sizes[i], true
		}
	}
	return 0, false
}

func (o *ownSizes) set(f family, size int) {
	if f == 0 {
		return
	}
	for i, known := range o.families {
		if known == f {
			o.sizes[i] = size
			return
		}
	}
	o.families[o.next], o.sizes[o.next] = f, size
	o.next = (o.next + 1) % len(o.families)
}
