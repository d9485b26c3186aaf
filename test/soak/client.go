package soak

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"
)

// What a client saw.
const (
	sawRight   = "right"   // the whole answer, every byte as it must be
	sawError   = "error"   // a status of 400 or more with an error that says why
	sawBroken  = "broken"  // an answer that broke off, so that any client notices
	sawGarbage = "garbage" // no JSON where JSON is due
	sawExpired = "expired" // the client's patience ended
	sawLeft    = "left"    // the client left on purpose
	sawRetired = "retired" // a router that stops closed the connection before it answered
	sawBad     = "bad"     // a bad request was refused as it should be
	sawWrong   = "wrong"   // anything else: a fault of what is tested
)

// Sight is what one client saw of one request.
type Sight struct {
	ID, Kind, Front, What string
	Stream                bool
	Status                int // 0 where none came
	Prompt, Tokens        int // as they must be
	Ended                 time.Time
	Detail                string
}

// leaving is how a client leaves before the answer's end.
type leaving int

const (
	stays    leaving = iota
	resets           // RST
	closes           // closes the connection
	halfway          // shuts its sending half down and reads on
	abandons         // cancels the request; over HTTP/2 a reset of its stream
)

// ask sends a request, in one of many manners, and checks the answer.
func (f *Front) ask(ctx context.Context, rng *rand.Rand, a *ask) Sight {
	s := Sight{ID: a.id, Kind: a.kind, Front: f.Name, Stream: a.stream, Prompt: a.prompt, Tokens: a.tokens}
	how := stays
	if rng.IntN(8) == 0 {
		how = leaving(1 + rng.IntN(4))
	}
	client, slow, lone := f.plain, rng.IntN(12) == 0, rng.IntN(4) == 0
	if f.multi != nil && rng.IntN(2) == 0 {
		client, lone = f.multi, false
		if how != stays {
			how = abandons
		}
	} else if how != stays {
		lone = true // what it does to its connection is no other request's fate
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	exit := newExit(how, leave, time.Duration(rng.IntN(150_000))*time.Microsecond)
	defer exit.stop()
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: exit.got}),
		http.MethodPost, f.URL+a.path, bytes.NewReader(a.body))
	if err != nil {
		return s.is(sawWrong, err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", a.id)
	req.Header.Set("Authorization", "Bearer nobody")
	req.Close = lone
	resp, err := client.Do(req)
	if err == nil {
		defer func() { _ = resp.Body.Close() }()
		s.Status = resp.StatusCode
		var body io.Reader = resp.Body
		if slow {
			body = &slowReader{r: body, ctx: ctx, left: 200}
		}
		err = a.check(resp, body)
	}
	s.Ended = time.Now()
	return s.judge(f, how, exit, err)
}

// check reads the answer to its end.
func (a *ask) check(resp *http.Response, body io.Reader) error {
	if resp.StatusCode >= 400 {
		return refused(resp, body)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: status %s", errWrong, resp.Status)
	}
	if a.stream {
		return a.streamed(body)
	}
	return a.whole(body)
}

// errRefused is an answer that says why there is none.
var errRefused = errors.New("refused")

// refused checks that an error is one of the API's form.
func refused(resp *http.Response, body io.Reader) error {
	text, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(text, &e) != nil || e.Error.Message == "" {
		return fmt.Errorf("%w: an error that says nothing: %s %.80q", errWrong, resp.Status, text)
	}
	return fmt.Errorf("%w: %s: %s", errRefused, resp.Status, e.Error.Message)
}

func (s Sight) is(what string, err error) Sight {
	s.What = what
	if s.Ended.IsZero() {
		s.Ended = time.Now()
	}
	if err != nil {
		s.Detail = err.Error()
	}
	return s
}

// judge names what was seen.
func (s Sight) judge(f *Front, how leaving, exit *exit, err error) Sight {
	var timeout net.Error
	switch {
	case err == nil:
		return s.is(sawRight, nil)
	case errors.Is(err, errWrong):
		return s.is(sawWrong, err)
	case how != stays && exit.gone():
		return s.is(sawLeft, err)
	case errors.Is(err, errRefused):
		return s.is(sawError, err)
	case errors.Is(err, errGarbage):
		return s.is(sawGarbage, err)
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return s.is(sawExpired, err)
	case s.Status == 0 && f.Retired.Load():
		return s.is(sawRetired, err)
	case s.Status == 0:
		return s.is(sawWrong, fmt.Errorf("no answer: %w", err))
	}
	return s.is(sawBroken, err)
}

// exit makes a client leave a while after its request has a connection.
type exit struct {
	how   leaving
	leave context.CancelFunc
	after time.Duration

	mu    sync.Mutex
	conn  *net.TCPConn
	timer *time.Timer
	done  bool
}

func newExit(how leaving, leave context.CancelFunc, after time.Duration) *exit {
	return &exit{how: how, leave: leave, after: after}
}

func (e *exit) got(info httptrace.GotConnInfo) {
	if e.how == stays {
		return
	}
	conn := info.Conn
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.conn, _ = conn.(*net.TCPConn)
	if e.timer == nil {
		e.timer = time.AfterFunc(e.after, e.act)
	}
}

func (e *exit) act() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.done = true
	switch {
	case e.conn == nil || e.how == abandons:
		e.leave()
	case e.how == resets:
		_ = e.conn.SetLinger(0)
		_ = e.conn.Close()
	case e.how == closes:
		_ = e.conn.Close()
	case e.how == halfway:
		_ = e.conn.CloseWrite()
	}
}

// gone says whether the client had left.
func (e *exit) gone() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.done
}

// stop keeps a client that has its answer from leaving: the connection may be
// another request's next.
func (e *exit) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.timer != nil {
		e.timer.Stop()
	}
}

// slowReader reads a little at a time, left times, and then as it comes.
type slowReader struct {
	r    io.Reader
	ctx  context.Context //nolint:containedctx // a reader has no other way to honour it
	left int
}

func (s *slowReader) Read(p []byte) (int, error) {
	if s.left > 0 {
		s.left--
		if err := pause(s.ctx, 5*time.Millisecond); err != nil {
			return 0, err
		}
		p = p[:min(len(p), 128)]
	}
	return s.r.Read(p)
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
