package peer

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// rawCall is a caller that sends what a test says.
type rawCall struct {
	t    testing.TB
	conn net.Conn
}

func dial(t testing.TB, g *giver) *rawCall {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	return &rawCall{t, conn}
}

// call dials and says hello.
func call(t testing.TB, g *giver) *rawCall {
	t.Helper()
	c := dial(t, g)
	c.send(hello{lowest, Version}.append(nil))
	if h, err := parseHello(c.read(helloSize)); err != nil || h != (hello{Version, Version}) {
		t.Fatalf("the answer to hello is %+v, %v", h, err)
	}
	return c
}

func (c *rawCall) send(data []byte) {
	c.t.Helper()
	if _, err := c.conn.Write(data); err != nil {
		c.t.Fatal(err)
	}
}

func (c *rawCall) read(n int) []byte {
	c.t.Helper()
	data := make([]byte, n)
	if _, err := io.ReadFull(c.conn, data); err != nil {
		c.t.Fatal(err)
	}
	return data
}

// ended waits for the other side to close.
func (c *rawCall) ended() {
	c.t.Helper()
	if n, err := c.conn.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Errorf("the connection stands: %d bytes, %v", n, err)
	}
}
