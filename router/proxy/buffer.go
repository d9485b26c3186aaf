package proxy

import (
	"errors"
	"io"
	"sync"
)

// Buffers come in a few sizes, so that a stream of small requests does not
// keep big ones alive. Above the largest class a buffer is garbage after use.
var bufferClasses = [...]int{4 << 10, 32 << 10, 128 << 10, 512 << 10}

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

// firstBodyBytes is what a body gets before a byte of it has come.
const firstBodyBytes = 4 << 10

// readBody reads r to its end, at most limit bytes. declared is the length
// the client announced, -1 if it announced none. A length is a promise, not
// memory: room grows with what has come, to at most twice that and 32 KiB, and
// each growth is first asked of charge, in bytes, whose refusal is errNoRoom.
func readBody(r io.Reader, declared int64, limit int, charge func(bytes int) bool) (_ []byte, err error) {
	if declared > int64(limit) {
		return nil, errBodyTooLarge
	}
	most := limit + 1 // one more byte tells that it is too long
	if declared >= 0 {
		most = int(declared)
	}
	var b []byte
	defer func() {
		if err != nil && b != nil {
			putBuffer(b)
		}
	}()
	for room := 0; ; {
		if len(b) == room {
			grown := min(firstBodyBytes, most)
			if room > 0 {
				grown = min(max(2*room, 32<<10), most)
			}
			if !charge(min(grown, limit) - room) {
				return nil, errNoRoom
			}
			room = grown
			if room > cap(b) {
				larger := append(getBuffer(room), b...)
				putBuffer(b)
				b = larger
			}
		}
		n, err := r.Read(b[len(b):room])
		b = b[:len(b)+n]
		if len(b) > limit {
			return nil, errBodyTooLarge
		}
		if err == io.EOF || err == nil && int64(len(b)) == declared {
			return b, nil
		}
		if err != nil {
			return nil, err
		}
	}
}
