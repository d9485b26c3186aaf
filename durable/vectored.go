package durable

import (
	"errors"
	"io"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// Vectored is a File that moves several buffers from or to one range of it in
// one system call, as a record of header and payload needs. ReadVAt and WriteVAt
// do the same with any File.
//
// Of a file opened with syscall.O_DIRECT the buffers' addresses and lengths, and
// the offset, must be multiples of the drive's sector. A file opened for
// appending is not for WriteVAt.
type Vectored interface {
	// ReadVAt fills bufs, one after the other, from off on. It reads all of them
	// or says why not: io.EOF where the file ends at or before off,
	// io.ErrUnexpectedEOF where it ends within. n counts the bytes read.
	ReadVAt(bufs [][]byte, off int64) (n int, err error)
	// WriteVAt writes bufs, one after the other, from off on: all, or an error.
	// n counts the bytes written.
	WriteVAt(bufs [][]byte, off int64) (n int, err error)
}

// ReadVAt is Vectored.ReadVAt, one ReadAt for each buffer where f is none.
func ReadVAt(f File, bufs [][]byte, off int64) (n int, err error) {
	if v, ok := f.(Vectored); ok {
		return v.ReadVAt(bufs, off)
	}
	for _, b := range bufs {
		if len(b) == 0 {
			continue
		}
		part, err := f.ReadAt(b, off+int64(n))
		n += part
		if part == len(b) {
			continue // an io.EOF that comes with all bytes says nothing new
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = endOfFile(n)
		}
		return n, err
	}
	return n, nil
}

// WriteVAt is Vectored.WriteVAt, one WriteAt for each buffer where f is none.
func WriteVAt(f File, bufs [][]byte, off int64) (n int, err error) {
	if v, ok := f.(Vectored); ok {
		return v.WriteVAt(bufs, off)
	}
	for _, b := range bufs {
		if len(b) == 0 {
			continue
		}
		part, err := f.WriteAt(b, off+int64(n))
		n += part
		if err != nil {
			return n, err
		}
		if part < len(b) {
			return n, io.ErrShortWrite
		}
	}
	return n, nil
}

// endOfFile is the error of a read that the file's end cut after n bytes.
func endOfFile(n int) error {
	if n == 0 {
		return io.EOF
	}
	return io.ErrUnexpectedEOF
}

// maxBuffers is IOV_MAX, how many buffers the kernel takes in one call.
const maxBuffers = 1024

// ReadVAt implements Vectored.
func (f *OSFile) ReadVAt(bufs [][]byte, off int64) (int, error) {
	n, err := f.vectored("preadv", unix.Preadv, bufs, off)
	switch {
	case err == nil && n < total(bufs):
		return n, endOfFile(n)
	case errors.Is(err, syscall.EINVAL) && n > 0 && f.endsBy(off+int64(n)):
		// A file opened with O_DIRECT may refuse the offset where its end cut the
		// read, instead of saying that it ends there.
		return n, endOfFile(n)
	}
	return n, err
}

// WriteVAt implements Vectored.
func (f *OSFile) WriteVAt(bufs [][]byte, off int64) (int, error) {
	n, err := f.vectored("pwritev", unix.Pwritev, bufs, off)
	if err == nil && n < total(bufs) {
		err = &fs.PathError{Op: "pwritev", Path: f.Name(), Err: io.ErrShortWrite}
	}
	return n, err
}

// vectored repeats a call until all bytes of bufs are moved, it moves none, or
// it fails. It leaves bufs as they are.
func (f *OSFile) vectored(op string, move func(fd int, bufs [][]byte, off int64) (int, error), bufs [][]byte, off int64) (n int, err error) {
	left := total(bufs)
	bufs = behind(bufs, 0)
	for left > 0 {
		part := 0
		err := f.call(op, func(fd int) (err error) {
			part, err = move(fd, bufs[:min(len(bufs), maxBuffers)], off+int64(n))
			return err
		})
		if err != nil {
			return n, err
		}
		if part == 0 {
			return n, nil
		}
		n, left = n+part, left-part
		if left > 0 {
			bufs = behind(bufs, part)
		}
	}
	return n, nil
}

// behind is what is left of bufs after their first n bytes: a copy of the list
// where one of them is cut, and it never begins with an empty one.
func behind(bufs [][]byte, n int) [][]byte {
	for len(bufs) > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs = bufs[1:]
	}
	if n == 0 {
		return bufs
	}
	rest := append([][]byte(nil), bufs...)
	rest[0] = rest[0][n:]
	return rest
}

func total(bufs [][]byte) (n int) {
	for _, b := range bufs {
		n += len(b)
	}
	return n
}

// endsBy reports whether the file has no byte at off or later.
func (f *OSFile) endsBy(off int64) bool {
	info, err := f.Stat()
	return err == nil && info.Size() <= off
}
