package resp

import (
	"context"
	"errors"
	"io"
	"log/slog"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// setOptions are what may follow a value.
type setOptions struct {
	onlyNew, onlyOld bool
	old              bool // the former value is the answer
}

// parseSetOptions gives the error's text where they are wrong. A lifetime is
// checked and forgotten: room and use decide what stays.
func parseSetOptions(args [][]byte) (options setOptions, wrong string) {
	lifetime := false
	for len(args) > 0 {
		word := string(lower(args[0]))
		args = args[1:]
		switch word {
		case "nx":
			options.onlyNew = true
		case "xx":
			options.onlyOld = true
		case "get":
			options.old = true
		case "keepttl":
			if lifetime {
				return options, "ERR syntax error"
			}
			lifetime = true
		case "ex", "px", "exat", "pxat":
			if lifetime || len(args) == 0 {
				return options, "ERR syntax error"
			}
			lifetime = true
			number, ok := parseInt(args[0])
			if !ok {
				return options, "ERR value is not an integer or out of range"
			}
			if number <= 0 {
				return options, "ERR invalid expire time in 'set' command"
			}
			args = args[1:]
		default:
			return options, "ERR syntax error"
		}
	}
	if options.onlyNew && options.onlyOld {
		return options, "ERR syntax error"
	}
	return options, ""
}

const (
	emptyValue = "ERR a value has at least one byte"
	largeValue = "ERR string exceeds maximum allowed size (64 MiB)"
)

// storing is a SET between its key and its answer.
type storing struct {
	key   block.Key
	model *model
	size  int
	put   Put    // nil where the value is read and dropped
	wrong string // the error to answer with
}

// begin makes room for a value, without waiting.
func (c *conn) begin(name []byte, size int) storing {
	if c.tenant == nil {
		return storing{size: size, wrong: notAuthenticated}
	}
	info := parseKey(name)
	s := storing{key: c.key(name), model: c.model(&info), size: size}
	f := info.family()
	parent, hasParent := c.order.store(f, s.key)
	switch {
	case size < block.MinSize:
		s.wrong = emptyValue
		return s
	case size > block.MaxSize:
		// The tier counts what it is asked to take and does not.
		if put, err := c.tenant.blocks.Put(s.key, size, parent, hasParent); err == nil {
			put.Abort()
		}
		s.wrong = largeValue
		return s
	}
	if c.native {
		c.sizes.set(f, size)
	}
	c.tenant.sizes.learn(f, size, c.native)
	if put, err := c.tenant.blocks.Put(s.key, size, parent, hasParent); err == nil {
		s.put = put
	}
	return s
}

// abort gives the room back.
func (s *storing) abort() {
	if s.put != nil {
		s.put.Abort()
		s.put = nil
	}
}

// set is SET from the wire: the value goes straight into its place.
func (c *conn) set(name []byte, size, more int) error {
	s := c.begin(name, size)
	defer s.abort()
	if err := c.receive(&s); err != nil {
		return err
	}
	args, err := c.reader.rest(more)
	if errors.Is(err, errTooLong) {
		s.abort()
		c.error("ERR syntax error")
		return c.spill()
	}
	if err != nil {
		return err
	}
	if err := c.finishSet(&s, args); err != nil {
		return err
	}
	return c.spill()
}

// setWith is SET of a value that is in memory.
func (c *conn) setWith(name, value []byte, args [][]byte) error {
	s := c.begin(name, len(value))
	defer s.abort()
	if s.put != nil {
		copy(s.put.Bytes(), value)
		s.put.Fill(len(value))
	}
	return c.finishSet(&s, args)
}

// receive takes the value from the wire, in any case to its end.
func (c *conn) receive(s *storing) error {
	at := 0
	if s.put != nil {
		var err error
		if at, err = c.fill(s); err != nil {
			return err
		}
	}
	return c.reader.skip(s.size - at)
}

// fill puts the value into its place. It gives up the place, and tells how much
// was read, where the rest does not come in time and the connection stays.
func (c *conn) fill(s *storing) (at int, err error) {
	into, filled := s.put.Bytes(), 0
	// What came is hashed while it is in the processor's cache.
	came := func(n int) {
		at += n
		if at-filled >= fillAtOnce || at == len(into) {
			s.put.Fill(at - filled)
			filled = at
		}
	}
	came(c.reader.buffered(into))
	if at == len(into) {
		return at, nil
	}
	if err := c.flush(); err != nil {
		return at, err
	}
	if !c.queued() && c.socket.enter(len(into)-at) {
		got, more, err := c.socket.receive(into[at:], c.reader.behind()[:len(crlf)], came)
		c.reader.came(more)
		c.server.totals.bytesIn.Add(uint64(got + more))
		if err != nil {
			return at, err
		}
	}
	for from := at - receiveAtOnce; at < len(into); {
		if at-from >= receiveAtOnce { // a byte now and then is not enough to keep the room
			from = at
			c.readBy(c.server.options.BodyTimeout)
		}
		n, err := c.readValue(into[at:min(filled+fillAtOnce, len(into))], len(into)-at)
		came(n)
		if err == nil || at == len(into) {
			continue
		}
		if !stalled(err) || c.until.Load() != 0 {
			return at, err
		}
		c.tenant.figures.stalled.Add(1)
		s.abort()
		c.readBy(0)
		if !c.native {
			return at, err
		}
		return at, nil
	}
	c.readBy(0)
	return at, nil
}

// readValue reads a part of a value, and with its last part, of which rest bytes
// are missing, what comes behind it: the end of the command at least.
func (c *conn) readValue(part []byte, rest int) (int, error) {
	if len(part) < rest || c.socket.raw == nil {
		return c.Read(part)
	}
	if err := c.flush(); err != nil {
		return 0, err
	}
	n, err := c.socket.read2(part, c.reader.behind())
	c.reader.came(max(n-len(part), 0))
	c.arrived(n)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return min(n, len(part)), err
}

// finishSet publishes the value and answers.
func (c *conn) finishSet(s *storing, args [][]byte) error {
	options, wrong := parseSetOptions(args)
	if s.wrong == "" {
		s.wrong = wrong
	}
	if c.tenant == nil {
		c.error(s.wrong)
		return nil
	}
	figures := &c.tenant.figures
	if s.wrong != "" {
		if c.native {
			if err := c.drop(s); err != nil {
				return err
			}
			c.simple("OK")
		} else {
			figures.refused.Add(1)
			c.error(s.wrong)
		}
		return nil
	}
	if options != (setOptions{}) {
		return c.finishConditional(s, options)
	}
	if err := c.commit(s); err != nil {
		return c.refuse(err)
	}
	c.simple("OK")
	return nil
}

// drop counts the value as dropped. What its key had before goes as well: the
// client is told OK, and would take that for what it has just stored. An error
// says that it must not be told: errFormer, or that the listener ends before that
// is done.
func (c *conn) drop(s *storing) error {
	c.tenant.figures.dropped.Add(1)
	s.model.dropped.Add(1)
	_, err := c.tenant.blocks.Delete(c.listening.ctx, s.key)
	if err == nil {
		return nil
	}
	if ctx := c.listening.ctx; ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.server.former.Do(func() {
		c.server.options.Log.Error("a former value may come back after a kill, its end cannot be written; said at most every 10 s", slog.Any("error", err))
	})
	if !c.native {
		return errFormer
	}
	return nil // told OK all the same: an error would end its worker
}

// errFormer says that a value was not stored, and that the one before may come
// back, since no drive takes its end.
var errFormer = errors.New("ERR the value is not stored and the drive does not take the end of the former one")

// refuse tells a client that its SET came to errFormer.
func (c *conn) refuse(err error) error {
	if !errors.Is(err, errFormer) {
		return err
	}
	c.error(err.Error())
	return nil
}

// commit makes the value visible, or drops it; see drop for its error.
func (c *conn) commit(s *storing) error {
	figures := &c.tenant.figures
	if s.put == nil || s.put.Commit(c.listening.ctx) != nil {
		return c.drop(s)
	}
	s.put = nil
	if pins := &c.tenant.pins; pins.holds(s.key) {
		if pin, ok := c.tenant.blocks.Pin(s.key); ok {
			pins.replace(s.key, pin)
		}
	}
	figures.stored.Add(1)
	figures.bytesIn.Add(uint64(s.size))
	s.model.stored.Add(1)
	s.model.bytesIn.Add(uint64(s.size))
	return nil
}

// finishConditional is SET with NX, XX or GET. One of a tenant decides at a time,
// so that of several with NX one stores.
func (c *conn) finishConditional(s *storing, options setOptions) error {
	t := c.tenant
	select {
	case t.conditional <- struct{}{}:
	case <-c.listening.ctx.Done():
		return c.listening.ctx.Err()
	}
	held := true
	leave := func() {
		if held {
			held = false
			<-t.conditional
		}
	}
	defer leave()
	_, there := t.blocks.Lookup(s.key)
	var former Block
	if options.old {
		if got, err := t.blocks.Get(c.listening.ctx, s.key); err == nil {
			former = got
		}
	}
	forbidden := options.onlyNew && there || options.onlyOld && !there
	if forbidden {
		t.figures.refused.Add(1)
		s.abort()
	} else if err := c.commit(s); err != nil {
		letGo(former)
		return c.refuse(err)
	}
	leave()
	switch {
	case former != nil:
		return c.value(former.Bytes(), former)
	case options.old || forbidden:
		c.null()
	default:
		c.simple("OK")
	}
	return nil
}
