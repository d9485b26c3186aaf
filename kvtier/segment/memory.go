package segment

import (
	"fmt"
	"reflect"

	"golang.org/x/sys/unix"
)

// newPages gives zeroed memory that begins on a page, off the Go heap: drives
// write it as it lies, and the collector never looks at it. free gives it back.
func newPages(bytes int64) (p []byte, free func(), err error) {
	p, err = unix.Mmap(-1, 0, int(roundUp(bytes)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, fmt.Errorf("map %d bytes of memory: %w", bytes, err)
	}
	return p, func() { _ = unix.Munmap(p) }, nil // it is ours and mapped: that cannot fail
}

// aligned says whether memory begins on a page.
func aligned(p []byte) bool {
	return reflect.ValueOf(p).Pointer()%PageSize == 0
}

// pool lends buffers of one size and keeps some of them.
type pool struct {
	bytes int64
	idle  chan []byte
}

func newPool(bytes int64, keep int) *pool { return &pool{bytes: bytes, idle: make(chan []byte, keep)} }

func (p *pool) take() ([]byte, error) {
	select {
	case b := <-p.idle:
		return b, nil
	default:
		b, _, err := newPages(p.bytes)
		return b, err
	}
}

func (p *pool) give(b []byte) {
	select {
	case p.idle <- b:
	default:
		_ = unix.Munmap(b)
	}
}

// drain gives back what is idle.
func (p *pool) drain() {
	for {
		select {
		case b := <-p.idle:
			_ = unix.Munmap(b)
		default:
			return
		}
	}
}
