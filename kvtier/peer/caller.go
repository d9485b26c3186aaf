package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// caller is one connection of a peer.
type caller struct {
	server  *Server
	conn    net.Conn
	reader  *bufio.Reader
	writer  *bufio.Writer
	number  uint32
	version uint16
	writing bool // an answer
	buf     []byte
	entries []entry
}

// greet makes the connection safe, learns who calls, and exchanges hellos. Plain
// connections have no name.
func (c *caller) greet(ctx context.Context) (who string, err error) {
	if c.server.opts.TLS != nil {
		secured := tls.Server(c.conn, c.server.opts.TLS)
		if err := secured.HandshakeContext(ctx); err != nil {
			return "", fmt.Errorf("greet KV peer: %w", err)
		}
		who, err = nameOf(secured.ConnectionState())
		if err != nil {
			return "", fmt.Errorf("greet KV peer: %w", err)
		}
		c.conn = secured
	}
	c.reader = bufio.NewReaderSize(c.conn, 32<<10)
	c.writer = bufio.NewWriterSize(c.conn, 16<<10)
	data := make([]byte, helloSize)
	if _, err := io.ReadFull(c.reader, data); err != nil {
		return "", fmt.Errorf("greet KV peer: %w", err)
	}
	theirs, err := parseHello(data)
	if err != nil {
		return "", fmt.Errorf("greet KV peer: %w", err)
	}
	version := theirs.common()
	if _, err := c.conn.Write(hello{version, version}.append(nil)); err != nil {
		return "", fmt.Errorf("greet KV peer: %w", err)
	}
	if version == 0 {
		return "", fmt.Errorf("greet KV peer: %w: it speaks %d to %d", errNoVersion, theirs.lowest, theirs.highest)
	}
	c.version = version
	return who, nil
}

// nameOf is who a certificate is of. That it is an agent's was checked, but for a
// configuration that checks nothing: that is refused.
func nameOf(state tls.ConnectionState) (string, error) {
	if len(state.PeerCertificates) == 0 {
		return "", errors.New("no certificate is shown")
	}
	who, err := identity.PeerOf(state.PeerCertificates[0])
	if err != nil {
		return "", err
	}
	if who.Role != identity.RoleAgent {
		return "", fmt.Errorf("%w: %s", identity.ErrWrongRole, who.URI())
	}
	return who.URI(), nil
}

// serve answers requests until the connection ends.
func (c *caller) serve(ctx context.Context) error {
	for {
		c.writing = false
		r, err := c.read()
		if err != nil {
			return err
		}
		c.writing = true
		space, shared := c.server.find(r.space)
		if r.kind == kindHas {
			err = c.has(ctx, r, space, shared)
		} else {
			err = c.get(ctx, r, space, shared)
		}
		if err != nil {
			return fmt.Errorf("answer KV peer: %w", err)
		}
	}
}

// read reads the next request.
func (c *caller) read() (request, error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(serverIdle))
	if _, err := c.reader.Peek(1); err != nil {
		return request{}, err
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(pieceWithin))
	c.buf = sized(c.buf, requestSize)
	if _, err := io.ReadFull(c.reader, c.buf); err != nil {
		return request{}, fmt.Errorf("read request: %w", err)
	}
	n, err := entriesOf(c.buf)
	if err != nil {
		return request{}, err
	}
	c.buf = sized(c.buf, requestSize+n*entrySize)
	if _, err := io.ReadFull(c.reader, c.buf[requestSize:]); err != nil {
		return request{}, fmt.Errorf("read request: %w", err)
	}
	r, err := parseRequest(c.buf, c.entries)
	if err != nil {
		return r, err
	}
	c.entries = r.entries
	if c.number++; r.number != c.number {
		return r, fmt.Errorf("%w: request %d follows %d", ErrProtocol, r.number, c.number-1)
	}
	return r, nil
}

// sized gives a slice of n bytes that begins with those of b.
func sized(b []byte, n int) []byte {
	if cap(b) >= n {
		return b[:n]
	}
	return append(make([]byte, 0, max(n, 4<<10)), b...)[:n]
}

// has answers which blocks are here.
func (c *caller) has(ctx context.Context, r request, space *kvtier.Namespace, shared bool) error {
	sizes := make([]int, len(r.entries))
	if shared {
		space.Peek(r.keys(), sizes)
	}
	for i, size := range sizes {
		if sizes[i] = max(0, size); sizes[i] > 0 {
			c.server.totals.found.Add(1)
		} else {
			c.server.totals.notFound.Add(1)
		}
	}
	answer := appendSizes(nil, r.number, sizes)
	_ = c.conn.SetWriteDeadline(time.Now().Add(ofServer.piece))
	if _, err := c.conn.Write(answer); err != nil {
		return err
	}
	if c.server.opts.Limiter != nil {
		// Somebody waits for so little: it goes, and what comes next waits for it.
		return c.server.opts.Limiter.WaitN(ctx, len(answer))
	}
	return nil
}

// get answers with blocks.
func (c *caller) get(ctx context.Context, r request, space *kvtier.Namespace, shared bool) error {
	parents, known := make([]block.Key, len(r.entries)), make([]bool, len(r.entries))
	if shared && c.version >= withParents {
		space.Parents(r.keys(), parents, known)
	}
	for i, e := range r.entries {
		var parent []byte
		if known[i] {
			parent = appendParent(nil, parents[i])
		}
		if err := c.send(ctx, r.number, i, e, parent, space, shared); err != nil {
			return err
		}
	}
	_ = c.conn.SetWriteDeadline(time.Now().Add(ofServer.piece))
	return c.writer.Flush()
}

// send sends one block, with its parent where there is any, or that it is absent.
func (c *caller) send(ctx context.Context, number uint32, place int, e entry, parent []byte, space *kvtier.Namespace, shared bool) error {
	var got *kvtier.Block
	if shared {
		var err error
		if got, err = space.Lend(ctx, e.key); err == nil {
			defer got.Release()
		}
	}
	h := head{kind: kindAbsent, place: uint16(place), number: number, key: e.key}
	var data []byte
	if got != nil && len(got.Bytes()) == int(e.size) {
		data = got.Bytes()
		h.kind, h.size, h.sum = kindBlock, e.size, got.Sum()
		if parent != nil {
			h.kind = kindChild
		}
	} else {
		parent = nil
	}
	pace := ofServer.pace(c.server.opts.Limiter, len(data))
	until, err := pace.take(ctx, blockSize+len(parent))
	if err != nil {
		return err
	}
	_ = c.conn.SetWriteDeadline(until)
	if _, err := c.writer.Write(append(h.append(c.buf[:0]), parent...)); err != nil {
		return err
	}
	if h.kind == kindAbsent {
		c.server.totals.absent.Add(1)
		return nil
	}
	for len(data) > 0 {
		n := min(len(data), piece)
		until, err := pace.take(ctx, n)
		if err != nil {
			return err
		}
		_ = c.conn.SetWriteDeadline(until)
		if _, err := c.writer.Write(data[:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	c.server.totals.blocks.Add(1)
	c.server.totals.blockBytes.Add(int64(e.size))
	return nil
}
