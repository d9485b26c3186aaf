//go:build outside

package outside

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// watch stands between a client of RESP2 and its server, passes all on and counts
// commands and answers.
type watch struct {
	addr string
	ln   net.Listener
	// change is told of every command and answer; capacity 1.
	change chan struct{}

	mu              sync.Mutex
	asked, answered int
	conns           []net.Conn
	passing         sync.WaitGroup
}

// Answers are held back for answerAfter; a client that has not spoken for quiet,
// with nothing owed to it, is stuck.
const (
	answerAfter = 20 * time.Millisecond
	quiet       = 60 * time.Second
)

func startWatch(ctx context.Context, t *testing.T, to string) *watch {
	t.Helper()
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &watch{addr: ln.Addr().String(), ln: ln, change: make(chan struct{}, 1)}
	t.Cleanup(func() { w.end() })
	go func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			var d net.Dialer
			server, err := d.DialContext(ctx, "tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			w.mu.Lock()
			w.conns = append(w.conns, client, server)
			w.passing.Add(2)
			w.mu.Unlock()
			go w.pass(ctx, client, server, &w.asked, 0)
			go w.pass(ctx, server, client, &w.answered, answerAfter)
		}
	}()
	return w
}

// pass passes on one way: whole commands, or whole answers.
func (w *watch) pass(ctx context.Context, from, to net.Conn, count *int, delay time.Duration) {
	defer w.passing.Done()
	defer func() { _ = errors.Join(from.Close(), to.Close()) }() // the other way may have closed them
	in := bufio.NewReaderSize(from, 1<<20)
	for {
		if _, err := in.Peek(1); err != nil {
			return
		}
		if delay > 0 {
			timer := time.NewTimer(delay)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return
			}
		}
		if err := copyReply(to, in); err != nil {
			return
		}
		w.mu.Lock()
		*count++
		w.mu.Unlock()
		select {
		case w.change <- struct{}{}:
		default:
		}
	}
}

// copyReply copies one array, bulk string or line of RESP2. A nil may be written
// with zeros.
func copyReply(to io.Writer, from *bufio.Reader) error {
	line, err := from.ReadString('\n')
	if err != nil {
		return err
	}
	if _, err := io.WriteString(to, line); err != nil {
		return err
	}
	if line[0] != '*' && line[0] != '$' {
		return nil
	}
	n, err := strconv.Atoi(strings.TrimSpace(line[1:]))
	if err != nil {
		return fmt.Errorf("line %q: %w", line, err)
	}
	if line[0] == '$' {
		if n >= 0 {
			_, err = io.CopyN(to, from, int64(n)+2)
		}
		return err
	}
	for range n {
		if err := copyReply(to, from); err != nil {
			return err
		}
	}
	return nil
}

// untilStuck gives a context that ends when nothing was said for long.
func (w *watch) untilStuck(ctx context.Context) (context.Context, context.CancelFunc) {
	limited, cancel := context.WithCancel(ctx)
	go func() {
		timer := time.NewTimer(quiet)
		defer timer.Stop()
		for {
			select {
			case <-w.change:
				timer.Reset(quiet)
			case <-timer.C:
				if asked, _ := w.counts(); asked == 0 { // it is not up yet
					timer.Reset(quiet)
					continue
				}
				cancel()
				return
			case <-limited.Done():
				return
			}
		}
	}()
	return limited, cancel
}

func (w *watch) counts() (asked, owed int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked, w.asked - w.answered
}

// end closes all and tells how many commands there were and how many of them had
// no answer.
func (w *watch) end() (asked, owed int) {
	_ = w.ln.Close()
	w.mu.Lock()
	conns := w.conns
	w.mu.Unlock()
	var errs []error
	for _, c := range conns {
		errs = append(errs, c.Close())
	}
	_ = errors.Join(errs...) // most are closed already
	w.passing.Wait()
	return w.counts()
}
