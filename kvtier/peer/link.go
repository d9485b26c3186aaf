package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
)

const (
	// piece is what is sent, received and hashed at a time, in bytes.
	piece = 256 << 10
	// pieceWithin bounds the time for one, and for a frame without bytes.
	pieceWithin = 2 * time.Second
)

// patience bounds how slow the other side may be. A server's is greater: it cannot
// know what a limiter holds back on the other side.
type patience struct {
	piece, block time.Duration
	rate         float64 // bytes per second, below which a block is given up
}

var (
	ofCaller = patience{pieceWithin, time.Second, 8 << 20}
	ofServer = patience{10 * time.Second, 20 * time.Second, 1 << 20}
)

// counted counts what goes over a connection.
type counted struct {
	net.Conn
	in, out *atomic.Int64
}

// Read implements net.Conn.
func (c counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.in.Add(int64(n))
	return n, err
}

// Write implements net.Conn.
func (c counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.out.Add(int64(n))
	return n, err
}

// pace bounds a transfer in time, without what a limiter holds back.
type pace struct {
	limiter Limiter
	piece   time.Duration
	until   time.Time
}

func (p patience) pace(limiter Limiter, size int) pace {
	return pace{limiter, p.piece, time.Now().Add(p.block + time.Duration(float64(size)/p.rate*float64(time.Second)))}
}

// take takes n bytes and gives the time until which they are to have passed.
func (p *pace) take(ctx context.Context, n int) (time.Time, error) {
	now := time.Now()
	if p.limiter != nil {
		if err := p.limiter.WaitN(ctx, n); err != nil {
			return now, err
		}
		after := time.Now()
		p.until = p.until.Add(after.Sub(now))
		now = after
	}
	until := now.Add(p.piece)
	if p.until.Before(until) {
		until = p.until
	}
	return until, nil
}

// link is a connection to a peer, on which one request at a time is answered.
type link struct {
	raw     net.Conn // under conn, which may be TLS
	conn    net.Conn
	reader  *bufio.Reader
	buf     []byte
	number  uint32 // of the last request
	version uint16
	ask     time.Duration
	stop    func() bool
}

// open makes a connection and says hello. It ends with ctx.
func (p *Peers) open(ctx context.Context, r *remote) (_ *link, err error) {
	opening, cancel := context.WithTimeout(ctx, openWithin)
	defer cancel()
	raw, err := p.opts.DialContext(opening, "tcp", r.Addr)
	if err != nil {
		return nil, fmt.Errorf("dial KV peer: %w", err)
	}
	raw = counted{raw, &p.totals.bytesIn, &p.totals.bytesOut}
	// Who waits longer for answers gives its peers as long.
	l := &link{raw: raw, conn: raw, ask: max(askWithin, p.opts.LookupWait)}
	l.stop = context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if deadline, ok := opening.Deadline(); ok {
		_ = raw.SetDeadline(deadline)
	}
	if p.opts.TLS != nil {
		secured := tls.Client(raw, p.opts.TLS)
		if err := secured.HandshakeContext(opening); err != nil {
			return nil, fmt.Errorf("greet KV peer: %w", err)
		}
		l.conn = secured
	}
	l.reader = bufio.NewReaderSize(l.conn, 16<<10)
	if _, err := l.conn.Write(hello{lowest, Version}.append(nil)); err != nil {
		return nil, fmt.Errorf("greet KV peer: %w", err)
	}
	answer := make([]byte, helloSize)
	if _, err := io.ReadFull(l.reader, answer); err != nil {
		return nil, fmt.Errorf("greet KV peer: %w", err)
	}
	h, err := parseHello(answer)
	if err != nil {
		return nil, fmt.Errorf("greet KV peer: %w", err)
	}
	if h.lowest != h.highest || h.lowest < lowest || h.lowest > Version {
		return nil, fmt.Errorf("greet KV peer: %w", errNoVersion)
	}
	l.version = h.highest
	return l, nil
}

// errNoVersion says that a peer speaks no version that is spoken here, which is
// no fault of its.
var errNoVersion = errors.New("the peer speaks other versions of the protocol")

// close ends the connection at once: a goodbye of TLS might wait for the peer.
func (l *link) close() {
	l.stop()
	_ = l.raw.Close()
}

// errStale says that a connection that was idle has ended before any answer.
var errStale = errors.New("the connection had ended")

// send sends a request, whose first byte of an answer is awaited until a time.
func (l *link) send(kind kind, space block.Namespace, entries []entry, until time.Time) error {
	reused := l.number > 0
	l.number++
	l.buf = request{kind, l.number, space, entries}.append(l.buf[:0])
	_ = l.conn.SetDeadline(until)
	_, err := l.conn.Write(l.buf)
	if err == nil {
		_, err = l.reader.Peek(1)
	}
	var timeout net.Error
	if err != nil && reused && !(errors.As(err, &timeout) && timeout.Timeout()) {
		return fmt.Errorf("%w: %w", errStale, err)
	}
	return err
}

// has asks which blocks are there, and writes their lengths.
func (l *link) has(space block.Namespace, entries []entry, sizes []int) error {
	until := time.Now().Add(l.ask)
	if err := l.send(kindHas, space, entries, until); err != nil {
		return fmt.Errorf("ask KV peer: %w", err)
	}
	answer := make([]byte, hasSize+4*len(sizes))
	if _, err := io.ReadFull(l.reader, answer); err != nil {
		return fmt.Errorf("ask KV peer: %w", err)
	}
	if err := parseSizes(answer, l.number, sizes); err != nil {
		return fmt.Errorf("ask KV peer: %w", err)
	}
	return nil
}

// get asks for blocks and receives them into slots, in their order. took is
// called with each when it is whole and verified, or absent.
func (l *link) get(ctx context.Context, limiter Limiter, space block.Namespace, entries []entry, slots []slot, took func(i int, absent bool)) error {
	if err := l.send(kindGet, space, entries, time.Now().Add(pieceWithin)); err != nil {
		return fmt.Errorf("get blocks of KV peer: %w", err)
	}
	for i, e := range entries {
		absent, err := l.receive(ctx, limiter, i, e, slots[i])
		if err != nil {
			return fmt.Errorf("get block %s of KV peer: %w", e.key, err)
		}
		took(i, absent)
	}
	return nil
}

// slot is where a block is received: a kvtier.Put.
type slot interface {
	Bytes() []byte
	Fill(n int)
	Sum() [16]byte
	Follows(parent block.Key)
}

// receive receives one answer.
func (l *link) receive(ctx context.Context, limiter Limiter, place int, e entry, into slot) (absent bool, err error) {
	var header [blockSize]byte
	pace := ofCaller.pace(limiter, int(e.size))
	until, err := pace.take(ctx, len(header))
	if err != nil {
		return false, err
	}
	_ = l.conn.SetDeadline(until)
	if _, err := io.ReadFull(l.reader, header[:]); err != nil {
		return false, err
	}
	h, err := parseHead(header[:])
	if err != nil {
		return false, err
	}
	if !h.answers(l.number, place, e) {
		return false, fmt.Errorf("%w: request %d, place %d, block %s of %d bytes, instead of request %d, place %d and %d bytes",
			errDamaged, h.number, h.place, h.key, h.size, l.number, place, e.size)
	}
	if h.kind == kindAbsent {
		return true, nil
	}
	if h.kind == kindChild {
		if err := l.receiveParent(ctx, &pace, into); err != nil {
			return false, err
		}
	}
	for data := into.Bytes(); len(data) > 0; {
		n := min(len(data), piece)
		until, err := pace.take(ctx, n)
		if err != nil {
			return false, err
		}
		_ = l.conn.SetDeadline(until)
		if _, err := io.ReadFull(l.reader, data[:n]); err != nil {
			return false, err
		}
		into.Fill(n)
		data = data[n:]
	}
	if into.Sum() != h.sum {
		return false, fmt.Errorf("%w: its bytes have another checksum", errDamaged)
	}
	return false, nil
}

// receiveParent receives which block comes before the one that follows.
func (l *link) receiveParent(ctx context.Context, pace *pace, into slot) error {
	if l.version < withParents {
		return fmt.Errorf("%w: a parent in version %d", ErrProtocol, l.version)
	}
	var data [parentSize]byte
	until, err := pace.take(ctx, len(data))
	if err != nil {
		return err
	}
	_ = l.conn.SetDeadline(until)
	if _, err := io.ReadFull(l.reader, data[:]); err != nil {
		return err
	}
	parent, err := parseParent(data[:])
	if err == nil {
		into.Follows(parent)
	}
	return err
}
