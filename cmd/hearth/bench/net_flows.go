package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// stream sends on one new connection while more says so of the bytes sent, and
// gives bytes per second.
func (s *server) stream(ctx context.Context, more func(int) bool) (rate float64, err error) {
	var pair [2]int
	if err := s.room.do(func() (err error) { pair, err = s.connect(nil); return err }); err != nil {
		return 0, err
	}
	defer closePair(pair)
	var sending sync.WaitGroup
	var sendErr error
	begin := time.Now()
	sending.Go(func() {
		// The other end of the stream, whatever happens.
		defer func() { _ = unix.Shutdown(pair[0], unix.SHUT_WR) }()
		buf := make([]byte, 256<<10)
		for sent := 0; more(sent); {
			n, err := unix.Write(pair[0], buf)
			if err = errors.Join(ignored(err), ctx.Err()); err != nil {
				sendErr = fmt.Errorf("send: %w", err)
				return
			}
			sent += max(0, n)
		}
	})
	received, err := receive(pair[1])
	elapsed := time.Since(begin)
	sending.Wait()
	return float64(received) / elapsed.Seconds(), errors.Join(err, sendErr)
}

func receive(fd int) (received int, err error) {
	buf := make([]byte, 256<<10)
	for {
		n, err := unix.Read(fd, buf)
		if err = ignored(err); err != nil {
			// Whoever sends is told by a reset.
			_ = unix.Shutdown(fd, unix.SHUT_RD)
			return received, fmt.Errorf("receive: %w", err)
		}
		if n == 0 {
			return received, nil
		}
		received += max(0, n)
	}
}

// ignored is an error but for one of a call that a signal interrupted.
func ignored(err error) error {
	if errors.Is(err, unix.EINTR) {
		return nil
	}
	return err
}

// exchange makes connections one after another, each with a request and a
// response between two threads, while more says so of how many there were: what
// netperf calls TCP_CRR. It gives connections per second.
func (r *room) exchange(ctx context.Context, more func(int) bool) (rate float64, err error) {
	s, err := r.listen()
	if err != nil {
		return 0, err
	}
	defer s.end()
	var answering sync.WaitGroup
	answering.Go(s.answer)
	err = r.do(func() error {
		made, begin := 0, time.Now()
		for ; more(made); made++ {
			if err := errors.Join(ctx.Err(), s.ask()); err != nil {
				return err
			}
		}
		rate = float64(made) / time.Since(begin).Seconds()
		return nil
	})
	_ = unix.Shutdown(s.fd, unix.SHUT_RDWR) // nobody waits in accept any more
	answering.Wait()
	return rate, err
}

// ask connects, sends a byte and gets one.
func (s *server) ask() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	one := []byte{1}
	if err := unix.Connect(fd, s.at); err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	if _, err := unix.Write(fd, one); err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	for {
		n, err := unix.Read(fd, one)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = errNoAnswer
		}
		if err != nil {
			return fmt.Errorf("ask: %w", err)
		}
		return nil
	}
}

var errNoAnswer = errors.New("the connection ended without an answer")

// answer gives each connection its byte back and ends it, until the listener is
// shut down.
func (s *server) answer() {
	one := make([]byte, 1)
	for {
		fd, _, err := unix.Accept4(s.fd, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		if n, err := unix.Read(fd, one); err == nil && n == 1 {
			_, _ = unix.Write(fd, one)
		}
		_ = unix.Close(fd)
	}
}
