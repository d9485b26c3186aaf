// Package mover moves bytes for tests that count them: an End listens and
// connects, sends and receives in every way that a program may, and keeps its
// own books of payload. It runs in the test's process, or in one of its own, in
// a network namespace and a cgroup (Start). Only tests import it.
package mover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// patience bounds each step, so that a fault ends a test and does not hang it.
const patience = 3 * time.Minute

// Counts are payload in bytes.
type Counts struct{ Sent, Received uint64 }

// Nothing is an argument or an answer that says nothing.
type Nothing int

// End is one side of connections. Its methods have the form of net/rpc.
type End struct {
	// Control, where it is set, sees each socket before it is connected or bound.
	Control func(fd uintptr) error

	sent, received atomic.Uint64
	answering      sync.RWMutex // held for reading by each answer

	mu        sync.Mutex
	changed   sync.Cond
	listeners []interface{ Close() error }
	conns     []*net.TCPConn // those that were made
	served    map[*net.TCPConn]bool
	ended     int   // of served ones
	failed    error // of served ones
	stop      chan struct{}
	streams   *errgroup.Group
}

// NewEnd gives an End without connections.
func NewEnd() *End {
	e := &End{served: map[*net.TCPConn]bool{}}
	e.changed.L = &e.mu
	return e
}

// Socket says how sockets are made.
type Socket struct {
	Address   string // where to connect to or to listen at, ADDRESS:PORT
	From      string // own ADDRESS:PORT, for those that connect; empty: the kernel's choice
	Count     int    // connections to make
	Mark      int    // SO_MARK; 0: none
	Multipath bool   // MPTCP
}

func (e *End) control(of Socket) func(network, address string, raw syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error {
		var err error
		within := raw.Control(func(fd uintptr) {
			if of.Mark != 0 {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, of.Mark)
			}
			if err == nil && of.From != "" {
				// Several connections may have one port, each to another end.
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			}
			if err == nil && e.Control != nil {
				err = e.Control(fd)
			}
		})
		return errors.Join(within, err)
	}
}

// Listen accepts connections and answers them until Close. It gives its address.
func (e *End) Listen(of Socket, address *string) error {
	config := net.ListenConfig{Control: e.control(of)}
	config.SetMultipathTCP(of.Multipath)
	listener, err := config.Listen(context.Background(), "tcp", of.Address)
	if err != nil {
		return err
	}
	*address = listener.Addr().String()
	e.mu.Lock()
	e.listeners = append(e.listeners, listener)
	e.mu.Unlock()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			one := conn.(*net.TCPConn)
			e.mu.Lock()
			e.served[one] = true
			e.changed.Broadcast()
			e.mu.Unlock()
			go e.serve(one)
		}
	}()
	return nil
}

// serve answers requests on one connection until the other side ends it.
func (e *End) serve(conn *net.TCPConn) {
	for {
		var head [HeadSize]byte
		_ = conn.SetDeadline(time.Time{})
		if err := e.take(conn, head[:]); err != nil {
			break
		}
		n := binary.BigEndian
		how := Way(n.Uint64(head[16:]))
		e.answering.RLock()
		err := e.receive(conn, n.Uint64(head[:]), how)
		if err == nil {
			err = e.send(conn, n.Uint64(head[8:]), how)
		}
		e.answering.RUnlock()
		if err != nil {
			e.fail(err)
			break
		}
	}
	_ = conn.Close()
	e.mu.Lock()
	delete(e.served, conn)
	e.ended++
	e.changed.Broadcast()
	e.mu.Unlock()
}

// fail notes what ended a connection amid a request, but for the other end.
func (e *End) fail(err error) {
	for _, end := range []error{unix.ECONNRESET, unix.EPIPE, net.ErrClosed, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, end) {
			return
		}
	}
	e.mu.Lock()
	e.failed = errors.Join(e.failed, err)
	e.mu.Unlock()
}

// Dial makes connections and keeps them.
func (e *End) Dial(of Socket, _ *Nothing) error {
	made, err := e.dial(of)
	e.mu.Lock()
	e.conns = append(e.conns, made...)
	e.mu.Unlock()
	return err
}

func (e *End) dial(of Socket) ([]*net.TCPConn, error) {
	dialer := net.Dialer{Control: e.control(of), Timeout: patience, KeepAlive: -1}
	dialer.SetMultipathTCP(of.Multipath)
	if of.From != "" {
		from, err := net.ResolveTCPAddr("tcp", of.From)
		if err != nil {
			return nil, err
		}
		dialer.LocalAddr = from
	}
	var made []*net.TCPConn
	for range max(1, of.Count) {
		// On this goroutine, and so in the network namespace of its thread.
		conn, err := dialer.Dial("tcp", of.Address)
		if err != nil {
			return made, err
		}
		made = append(made, conn.(*net.TCPConn))
	}
	return made, nil
}

// Request is what passes on each connection: up to the one that listens, then
// down again.
type Request struct {
	Up, Down uint64 // payload in bytes; a head of HeadSize goes up before it
	Way      Way
	Half     bool // no more goes up after that: the connection is half closed then
}

// HeadSize is what goes up in each Request besides its payload, in bytes. Counts
// have it in.
const HeadSize = 24

// Head is what goes up first, for those that make requests by themselves.
func (r Request) Head() []byte {
	n := binary.BigEndian
	return n.AppendUint64(n.AppendUint64(n.AppendUint64(nil, r.Up), r.Down), uint64(r.Way))
}

// Exchange makes a request on each connection, all at once.
func (e *End) Exchange(r Request, _ *Nothing) error {
	e.mu.Lock()
	conns := slices.Clone(e.conns)
	e.mu.Unlock()
	var all errgroup.Group
	all.SetLimit(256)
	for _, conn := range conns {
		all.Go(func() error { return e.exchange(conn, r) })
	}
	return all.Wait()
}

func (e *End) exchange(conn *net.TCPConn, r Request) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if err := e.give(conn, r.Head()); err != nil {
		return err
	}
	if err := e.send(conn, r.Up, r.Way); err != nil {
		return err
	}
	if r.Half {
		if err := conn.CloseWrite(); err != nil {
			return err
		}
	}
	return e.receive(conn, r.Down, r.Way)
}

// Stream makes requests on each connection, one after the other, until Quiet.
func (e *End) Stream(r Request, _ *Nothing) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	stop := make(chan struct{})
	e.stop, e.streams = stop, &errgroup.Group{}
	for _, conn := range e.conns {
		e.streams.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				if err := e.exchange(conn, r); err != nil {
					return err
				}
			}
		})
	}
	return nil
}

// Quiet ends Stream, each connection after a whole request.
func (e *End) Quiet(_ Nothing, _ *Nothing) error {
	close(e.stop)
	return e.streams.Wait()
}

// Churn is connections that are made for one request each.
type Churn struct {
	Socket  // Count in all
	Request Request
	AtOnce  int
	Reset   bool // ended by RST
}

// Churn makes, uses and ends connections.
func (e *End) Churn(c Churn, _ *Nothing) error {
	var all errgroup.Group
	all.SetLimit(max(1, c.AtOnce))
	one := c.Socket
	one.Count = 1
	for range c.Count {
		all.Go(func() error {
			conns, err := e.dial(one)
			if err != nil {
				return err
			}
			err = e.exchange(conns[0], c.Request)
			if c.Reset {
				err = errors.Join(err, conns[0].SetLinger(0))
			}
			return errors.Join(err, conns[0].Close())
		})
	}
	return all.Wait()
}

// Hangup ends the connections that Dial made, by FIN or, if asked, by RST.
func (e *End) Hangup(reset bool, _ *Nothing) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	var errs []error
	for _, conn := range e.conns {
		if reset {
			errs = append(errs, conn.SetLinger(0))
		}
		errs = append(errs, conn.Close())
	}
	e.conns = nil
	return errors.Join(errs...)
}

// Ended waits until this many accepted connections have come and ended.
func (e *End) Ended(want int, _ *Nothing) error {
	err := e.wait(func() bool { return e.ended >= want && len(e.served) == 0 }, "%d connections to end", want)
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(err, e.failed)
}

// Accepted waits until this many accepted connections are there.
func (e *End) Accepted(want int, _ *Nothing) error {
	return e.wait(func() bool { return len(e.served) >= want }, "%d connections to come", want)
}

func (e *End) wait(until func() bool, what string, want int) error {
	late := time.AfterFunc(patience, e.changed.Broadcast)
	defer late.Stop()
	began := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	for !until() {
		if time.Since(began) >= patience {
			return fmt.Errorf("wait for "+what+": %d are there, %d have ended", want, len(e.served), e.ended)
		}
		e.changed.Wait()
	}
	return nil
}

// Totals gives the books, once the answers that are under way are in them: who
// asked has one before its last bytes are noted here.
func (e *End) Totals(_ Nothing, totals *Counts) error {
	e.answering.Lock()
	defer e.answering.Unlock()
	*totals = Counts{Sent: e.sent.Load(), Received: e.received.Load()}
	return nil
}

// Close ends everything, connections by RST.
func (e *End) Close(_ Nothing, _ *Nothing) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, listener := range e.listeners {
		_ = listener.Close()
	}
	for conn := range e.served {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
	for _, conn := range e.conns {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
	e.listeners, e.conns = nil, nil
	return nil
}
