package proxy

import (
	"errors"
	"io"
	"sync"
)

// Buffers come in a few sizes, so that a stream of small requests does not
// keep big ones alive. Above the largest class a buffer is garbage after use.
var bufferClasses = [...]int{4 << 10, 32 << 10, 512 << 10}

var bufferPools [len(bufferClasses)]sync.Pool

// boxes carries slices through sync.Pool without allocating a header each time.
var boxes = sync.Pool{New: func() any { return new([]byte) }}

// getBuffer gives an empty buffer with room for at least size bytes.
func getBuffer(size int) []byte {
	for i, class := range bufferClasses {
		if size > class {
			continue
		}
		if box, ok := bufferPools[i].Get().(*[]byte); ok {
			b := *box
			*box = nil
			boxes.Put(box)
			return b[:0]
		}
		return make([]byte, 0, class)
	}
	return make([]byte, 0, size)
}

func putBuffer(b []byte) {
	for i, class := range bufferClasses {
		if cap(b) == class {
			box, _ := boxes.Get().(*[]byte)
			*box = b[:0]
			bufferPools[i].Put(box)
			return
		}
	}
}

var (
	errBodyTooLarge = errors.New("body too large")
	errNoRoom       = errors.New("too many bodies")
)

// readBody reads r to its end, at most limit bytes. declared is the length
// the client announced, -1 if it announced none; each growth of such a body is
// first asked of charge, in bytes, whose refusal is errNoRoom.
func readBody(r io.Reader, declared int64, limit int, charge func(bytes int) bool) ([]byte, error) {
	if declared > int64(limit) {
		return nil, errBodyTooLarge
	}
	// A length is a promise, not memory: a liar gets at most 1 MiB ahead of
	// what it has sent.
	b := getBuffer(int(min(max(declared+1, 4<<10), 1<<20)))
	if declared < 0 && !charge(cap(b)) {
		putBuffer(b)
		return nil, errNoRoom
	}
	for {
		if len(b) == cap(b) {
			size := min(max(2*cap(b), 32<<10), limit+1)
			if declared < 0 && !charge(size-cap(b)) {
				putBuffer(b)
				return nil, errNoRoom
			}
			grown := getBuffer(size)
			grown = append(grown, b...)
			putBuffer(b)
			b = grown
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if len(b) > limit {
			putBuffer(b)
			return nil, errBodyTooLarge
		}
		if err == io.EOF || err == nil && declared >= 0 && int64(len(b)) == declared {
			return b, nil
		}
		if err != nil {
			putBuffer(b)
			return nil, err
		}
	}
}
