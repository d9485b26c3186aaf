package kvload

import (
	"encoding/binary"
	"fmt"
	"sync"
)

// Oracle knows which version of each key of a tenant a read may give, through any
// number of lives of the agent. A version is superseded where a SET or DEL that
// began after its answer was answered before the read began. A miss is always
// right.
type Oracle struct {
	mu    sync.Mutex
	clock int64
	next  int
	ends  map[int]int64 // of versions: when they were answered
	open  map[int]bool  // versions that were not, so far
	keys  []known
}

// known is what is known of a key.
type known struct {
	barrier int64 // when the last of what is answered had begun
	// version is what the key has for sure where nothing else is under way, 0 for
	// nothing; -1 is not sure.
	version int
	began   int // calls so far that change it
	open    int // of them under way
}

// NewOracle knows so many keys, which have nothing.
func NewOracle(keys int) *Oracle {
	return &Oracle{ends: map[int]int64{}, open: map[int]bool{}, keys: make([]known, keys)}
}

// change begins a SET or DEL. The function it gives is called with its answer.
func (o *Oracle) change(key int, set bool) (version int, done func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	k := &o.keys[key]
	o.clock++
	start := o.clock
	if set {
		o.next++
		version = o.next
		o.open[version] = true
	}
	alone := k.open == 0
	k.began++
	k.open++
	k.version = -1
	count := k.began
	return version, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		k.open--
		o.clock++
		if set {
			o.ends[version] = o.clock
			delete(o.open, version)
		}
		k.barrier = max(k.barrier, start)
		if alone && k.began == count {
			k.version = version
		}
	}
}

// Reborn notes that the agent ended: what was under way has no answer any more, and
// happened by now or never.
func (o *Oracle) Reborn() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.clock++
	for version := range o.open {
		o.ends[version] = o.clock
	}
	clear(o.open)
	for i := range o.keys {
		o.keys[i].open = 0
	}
}

// sure is the version that a key has, if it is there; 0 and less is none that is
// known.
func (o *Oracle) sure(key int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.keys[key].version
}

// read begins a read. The function it gives judges what came.
func (o *Oracle) read(key int) func(value []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	barrier := o.keys[key].barrier
	return func(value []byte) error {
		k, version, whole := understand(value)
		o.mu.Lock()
		defer o.mu.Unlock()
		switch end, answered := o.ends[version]; {
		case !whole || k != key || version > o.next:
			return fmt.Errorf("key %d: a value of %d bytes, of key %d and version %d, whole %t", key, len(value), k, version, whole)
		case len(value) != Size(key):
			return fmt.Errorf("key %d: version %d has %d bytes of %d", key, version, len(value), Size(key))
		case answered && end < barrier:
			return fmt.Errorf("key %d: version %d, though another SET or DEL was answered after it", key, version)
		}
		return nil
	}
}

// sizes are those of values, in bytes: all of one class have one, as a client's
// of one model have.
var sizes = []int{1024, 3968, 4096, 70_000, 262_144, 600_000}

// Size is the length of a key's values.
func Size(key int) int { return sizes[key%len(sizes)] }

// Name is a key as LMCache's native client writes it.
func Name(key int) string { return fmt.Sprintf("model%d@1@0@%016x@half", key%len(sizes), key) }

// Value are the bytes of a version: they tell what they are, all of them.
func Value(key, version int) []byte {
	value := make([]byte, Size(key))
	var word [16]byte
	binary.LittleEndian.PutUint64(word[:], uint64(key))
	binary.LittleEndian.PutUint64(word[8:], uint64(version))
	for n := copy(value, word[:]); n < len(value); n *= 2 {
		copy(value[n:], value[:n])
	}
	return value
}

func understand(value []byte) (key, version int, whole bool) {
	if len(value) < 16 {
		return 0, 0, false
	}
	for i := 16; i < len(value); i++ {
		if value[i] != value[i-16] {
			return 0, 0, false
		}
	}
	return int(binary.LittleEndian.Uint64(value)), int(binary.LittleEndian.Uint64(value[8:])), true
}
