package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// benchModel is the logical model that the router under test serves.
const benchModel = "bench"

// requestBytes is one prepared HTTP request whose body is about size bytes.
func requestBytes(mode string, stream bool, size int, salt string) []byte {
	open := fmt.Sprintf(`{"user":%q,"model":%q,"stream":%t,"max_tokens":64,"messages":[{"role":"system","content":"You are a careful assistant. %s"},{"role":"user","content":"`,
		mode, benchModel, stream, salt)
	end := `"}]}`
	fill := max(size-len(open)-len(end), 0)
	body := open + strings.Repeat("The quick brown fox jumps over it. ", fill/35+1)[:fill] + end
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: application/json\r\nUser-Agent: bench\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
}

// client is one kept-alive connection that sends prepared requests in turn.
type client struct {
	conn net.Conn
	in   *bufio.Reader
}

func dial(ctx context.Context, addr string) (*client, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return &client{conn: conn, in: bufio.NewReaderSize(conn, 16<<10)}, nil
}

// do sends the request and reads the whole answer; anything but 200 is an error.
func (c *client) do(request []byte) error {
	if _, err := c.conn.Write(request); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	status, length, chunked, err := readHead(c.in)
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	if status != "200" {
		text, _ := c.in.Peek(min(c.in.Buffered(), 300))
		return fmt.Errorf("read answer: status %s: %s", status, text)
	}
	if chunked {
		err = readChunks(c.in, io.Discard)
	} else {
		_, err = c.in.Discard(length)
	}
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// closedLoop sends total requests over conns connections as fast as answers come.
// As many as lost answers may break off.
func closedLoop(ctx context.Context, addr string, conns, total, lost int, request func(conn int) []byte) error {
	var left, broken atomic.Int64
	left.Store(int64(total))
	group, ctx := errgroup.WithContext(ctx)
	for i := range conns {
		group.Go(func() error {
			c, err := dial(ctx, addr)
			if err != nil {
				return err
			}
			defer func() { _ = c.conn.Close() }()
			bytes := request(i)
			for left.Add(-1) >= 0 && ctx.Err() == nil {
				err := c.do(bytes)
				if err == nil {
					continue
				}
				if broken.Add(1) > int64(lost) {
					return err
				}
				_ = c.conn.Close()
				next, err := dial(ctx, addr)
				if err != nil {
					return err
				}
				c = next
			}
			return ctx.Err()
		})
	}
	return group.Wait()
}

// openLoop sends total requests at perSecond, whether or not answers came, and
// returns the median time to the whole answer.
func openLoop(ctx context.Context, addr string, perSecond, total int, request []byte) (time.Duration, error) {
	const conns = 32
	free := make(chan *client, conns)
	for range conns {
		c, err := dial(ctx, addr)
		if err != nil {
			return 0, err
		}
		defer func() { _ = c.conn.Close() }()
		free <- c
	}
	times := make([]time.Duration, total)
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	group, ctx := errgroup.WithContext(ctx)
	for i := range total {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, errors.Join(ctx.Err(), group.Wait())
		}
		begin := time.Now()
		group.Go(func() error {
			select {
			case c := <-free:
				err := c.do(request)
				times[i] = time.Since(begin)
				free <- c
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// holdStreams opens n streams that send one chunk and then wait, calls held while
// all are open, and closes them. As many as lost streams may break off before
// their first chunk, and are opened anew.
func holdStreams(ctx context.Context, addr string, n, lost int, request []byte, held func() error) error {
	clients := make([]*client, 0, n)
	defer func() {
		for _, c := range clients {
			_ = c.conn.Close()
		}
	}()
	for len(clients) < n {
		c, err := dial(ctx, addr)
		if err != nil {
			return err
		}
		if err := c.begin(request); err != nil {
			_ = c.conn.Close()
			if lost--; lost < 0 {
				return err
			}
			continue
		}
		clients = append(clients, c)
	}
	return held()
}

// begin sends a request for a stream and waits for its first chunk.
func (c *client) begin(request []byte) error {
	if _, err := c.conn.Write(request); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	status, _, _, err := readHead(c.in)
	if err != nil {
		return fmt.Errorf("open stream: %w", err)
	}
	if status != "200" {
		return fmt.Errorf("open stream: status %s", status)
	}
	if _, err := c.in.ReadSlice('\n'); err != nil {
		return fmt.Errorf("read first chunk: %w", err)
	}
	return nil
}
