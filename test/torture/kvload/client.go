// Package kvload loads an agent's KV sockets with values that tell what they are,
// and knows what a read may give. The torture driver and the tests on real file
// systems use it. It starts and ends no agent.
package kvload

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// answerLimit is how long an agent that lives may take for an answer.
const answerLimit = 60 * time.Second

// maxValue bounds what is read of an answer, in bytes.
const maxValue = 64 << 20

// Client is a connection that speaks RESP as LMCache's own client does, or as
// those that begin with HELLO 3. One goroutine uses it.
type Client struct {
	conn net.Conn
	in   *bufio.Reader
	out  *bufio.Writer
}

// Dial connects. password is sent where it is not empty; hello begins with HELLO 3.
func Dial(ctx context.Context, network, addr, password string, hello bool) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	c := &Client{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), out: bufio.NewWriterSize(conn, 64<<10)}
	switch {
	case hello && password != "":
		_, err = c.Do("HELLO", "3", "AUTH", "default", password)
	case hello:
		_, err = c.Do("HELLO", "3")
	case password != "":
		_, err = c.Do("AUTH", password)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return c, nil
}

// Close ends the connection.
func (c *Client) Close() { _ = c.conn.Close() }

// Reply is an answer: a text, a number, a value or a list of them, or nothing.
type Reply struct {
	Text  string
	Value []byte
	N     int64
	List  []Reply
	Nil   bool
}

// ErrAnswer wraps what the server said is wrong.
var ErrAnswer = errors.New("the server answers")

// Do sends a command and reads its answer.
func (c *Client) Do(args ...string) (Reply, error) {
	if err := c.conn.SetDeadline(time.Now().Add(answerLimit)); err != nil {
		return Reply{}, err
	}
	_, _ = fmt.Fprintf(c.out, "*%d\r\n", len(args)) // Flush tells
	for _, arg := range args {
		_, _ = fmt.Fprintf(c.out, "$%d\r\n", len(arg))
		_, _ = c.out.WriteString(arg)
		_, _ = c.out.WriteString("\r\n")
	}
	if err := c.out.Flush(); err != nil {
		return Reply{}, fmt.Errorf("send: %w", err)
	}
	return c.read()
}

func (c *Client) read() (Reply, error) {
	line, err := c.in.ReadString('\n')
	if err != nil {
		return Reply{}, fmt.Errorf("read answer: %w", err)
	}
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return Reply{}, fmt.Errorf("%w: no line: %.80q", ErrAnswer, line)
	}
	kind, rest := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		return Reply{Text: rest}, nil
	case '-':
		return Reply{}, fmt.Errorf("%w: %s", ErrAnswer, rest)
	case '_':
		return Reply{Nil: true}, nil
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	if err != nil || n > maxValue {
		return Reply{}, fmt.Errorf("%w: %.80q", ErrAnswer, line)
	}
	switch {
	case kind == ':':
		return Reply{N: n}, nil
	case n < 0:
		return Reply{Nil: true}, nil
	case kind == '$' || kind == '=':
		value := make([]byte, n+2)
		if _, err := io.ReadFull(c.in, value); err != nil {
			return Reply{}, fmt.Errorf("read value: %w", err)
		}
		return Reply{Value: value[:n]}, nil
	case kind == '*' || kind == '%' || kind == '~':
		if kind == '%' {
			n *= 2
		}
		var list []Reply
		for range n {
			r, err := c.read()
			if err != nil {
				return Reply{}, err
			}
			list = append(list, r)
		}
		return Reply{List: list}, nil
	}
	return Reply{}, fmt.Errorf("%w: %.80q", ErrAnswer, line)
}
