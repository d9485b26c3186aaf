package bench

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/units"
)

// kvOp is what a load client does to a server of blocks.
type kvOp string

const (
	kvGet  kvOp = "get"
	kvSet  kvOp = "set"
	kvDrop kvOp = "drop" // every key, once
)

// kvOrder is one measurement that the load client is to make: a line of JSON.
type kvOrder struct {
	Addr  string `json:"addr"` // host:port, or the path of a socket
	Data  string `json:"data"` // names the values of this server, by whichever address
	Op    kvOp   `json:"op"`
	Size  int    `json:"size"`  // bytes of a value
	Keys  int    `json:"keys"`  // of this size, at least as many as connections
	Conns int    `json:"conns"` // each with one command at a time
	Ops   int    `json:"ops"`   // of all connections together; 0 sets or drops every key once
}

// kvOutcome is what came of it.
type kvOutcome struct {
	Ops     int     `json:"ops"`
	Bytes   int64   `json:"bytes"` // of values
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpu"`     // seconds of the load client, user and system
	Checked int     `json:"checked"` // values that were compared byte by byte
	Missed  int     `json:"missed"`  // values that were not there
	Error   string  `json:"error,omitempty"`
}

// kvCheckEvery is how often a value that was got is compared byte by byte; the
// first of each connection always is. Its head and end are compared each time.
const kvCheckEvery = 64

// kvStamp is the length of a value's head: the key's number and the version.
const kvStamp = 16

// maxKVConns is how many connections a measurement has at most.
const maxKVConns = 16

// maxKVValue is the longest value.
const maxKVValue = int(64 * units.MiB)

// How long a call waits for bytes of an answer before it looks at those it has,
// and how long before the server is given up.
const (
	kvPatience = time.Second
	kvTimeout  = 60 * time.Second
)

// loadCommand is the hidden child that is the load client. It reads orders from
// in, says when it is ready, waits for a line, and tells the outcome. It is a
// process of its own, so that what it costs is not the server's.
func loadCommand() *cobra.Command {
	return &cobra.Command{Use: "child-kvload", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serveLoad(cmd.InOrStdin(), cmd.OutOrStdout())
	}}
}

func serveLoad(in io.Reader, out io.Writer) error {
	// A call that waits keeps its place: no thread of another is woken for it.
	runtime.GOMAXPROCS(max(maxKVConns, runtime.GOMAXPROCS(0)))
	l := &loader{base: kvBase(), held: map[string]*keyspace{}}
	lines, answers := bufio.NewScanner(in), json.NewEncoder(out)
	for lines.Scan() {
		var order kvOrder
		if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		ready := func() error {
			if err := answers.Encode(kvOutcome{}); err != nil {
				return fmt.Errorf("tell to be ready: %w", err)
			}
			if !lines.Scan() {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
		outcome, err := l.run(order, ready)
		if err != nil {
			outcome.Error = err.Error()
		}
		if err := answers.Encode(outcome); err != nil {
			return fmt.Errorf("tell the outcome: %w", err)
		}
	}
	return lines.Err()
}

// kvBase is what all values are made of: bytes that do not compress.
var kvBase = sync.OnceValue(func() []byte {
	base := make([]byte, maxKVValue)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(base) // never fails
	return base
})

// keyspace is what a server was given of one size.
type keyspace struct {
	size    int
	names   []string // of the keys, all of one length
	version []uint64 // last one set of each key; 0 where it was not
}

// newKeyspace names keys as LMCache's server does, all of one family.
func newKeyspace(size, keys int) *keyspace {
	k := &keyspace{size: size, names: make([]string, keys), version: make([]uint64, keys)}
	for i := range k.names {
		k.names[i] = fmt.Sprintf("bench/%d@01000100@0@%064x", size, uint64(i+1)*0x9e3779b97f4a7c15)
	}
	return k
}

type loader struct {
	base []byte
	held map[string]*keyspace
}

// run makes the connections, uses each once, calls ready, and measures.
func (l *loader) run(o kvOrder, ready func() error) (outcome kvOutcome, err error) {
	if o.Conns < 1 || o.Conns > maxKVConns || o.Keys < o.Conns || o.Size < kvStamp || o.Size > len(l.base) {
		return outcome, fmt.Errorf("order %+v cannot be", o)
	}
	at := fmt.Sprint(o.Data, o.Size, o.Keys)
	space := l.held[at]
	if space == nil {
		space = newKeyspace(o.Size, o.Keys)
		l.held[at] = space
	}
	conns := make([]*kvConn, 0, o.Conns)
	defer func() {
		for _, c := range conns {
			err = errors.Join(err, unix.Close(c.fd))
		}
	}()
	for i := range o.Conns {
		c, err := l.connect(o.Addr, space, i, o.Conns)
		if err != nil {
			return outcome, err
		}
		conns = append(conns, c)
		// The first use of a connection is not measured: pages and buffers are new.
		if o.Ops > 0 {
			if err := c.do(o.Op, c.own(i)); err != nil {
				return outcome, err
			}
		}
		c.ops, c.bytes, c.checked, c.missed = 0, 0, 0, 0
	}
	if err := ready(); err != nil {
		return outcome, err
	}
	var group errgroup.Group
	before, begin := ownCPU(), time.Now()
	for i, c := range conns {
		group.Go(func() error { return c.work(o, i) })
	}
	err = group.Wait()
	outcome.Seconds, outcome.CPU = time.Since(begin).Seconds(), (ownCPU() - before).Seconds()
	for _, c := range conns {
		outcome.Ops, outcome.Bytes = outcome.Ops+c.ops, outcome.Bytes+c.bytes
	}
	// What was set is looked at when the clock stands.
	if err == nil && o.Op == kvSet {
		for i, c := range conns {
			for key := i; key < o.Keys && key < 4*o.Conns; key += o.Conns {
				c.ops = 0 // as the first of a connection it is compared whole
				err = errors.Join(err, c.do(kvGet, key))
			}
		}
	}
	for _, c := range conns {
		outcome.Checked, outcome.Missed = outcome.Checked+c.checked, outcome.Missed+c.missed
	}
	return outcome, err
}

// work does a connection's share.
func (c *kvConn) work(o kvOrder, conn int) error {
	if o.Ops == 0 {
		for key := conn; key < o.Keys; key += o.Conns {
			if err := c.do(o.Op, key); err != nil {
				return err
			}
		}
		return nil
	}
	random := rand.New(rand.NewPCG(uint64(conn), uint64(c.space.version[conn]))) //nolint:gosec // which key is next is no secret
	for i := conn; i < o.Ops; i += o.Conns {
		key := random.IntN(o.Keys)
		if o.Op == kvSet { // no two connections set one key
			key = c.own(key)
		}
		if err := c.do(o.Op, key); err != nil {
			return err
		}
	}
	return nil
}

// kvConn is one connection, with blocking system calls and one buffer each way.
type kvConn struct {
	fd          int
	space       *keyspace
	base        []byte
	conn, conns int
	send        []byte // a SET
	name, value []byte // the parts of send that are the key and the value
	question    []byte // a GET or DEL
	asked       []byte // the part of question that is the key
	head        string // of the answer to a GET
	receive     []byte

	ops, checked, missed int
	bytes                int64
}

func (l *loader) connect(addr string, space *keyspace, conn, conns int) (*kvConn, error) {
	fd, err := dialFD(addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	c := &kvConn{fd: fd, space: space, base: l.base, conn: conn, conns: conns}
	key := space.names[0]
	c.send = make([]byte, 0, space.size+256)
	c.send = fmt.Appendf(c.send, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n", len(key), key)
	c.name = c.send[len(c.send)-2-len(key):][:len(key)]
	c.head = fmt.Sprintf("$%d\r\n", space.size)
	c.send = append(c.send, c.head...)
	c.value = c.send[len(c.send):][:space.size]
	c.send = append(append(c.send, l.base[:space.size]...), "\r\n"...)
	c.question = fmt.Appendf(nil, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(key), key)
	c.asked = c.question[len(c.question)-2-len(key):][:len(key)]
	c.receive = make([]byte, len(c.head)+space.size+2)
	return c, nil
}

// own is the key of the connection's own nearest to one.
func (c *kvConn) own(key int) int {
	key = key - key%c.conns + c.conn
	if key >= len(c.space.version) {
		key -= c.conns
	}
	return key
}

func (c *kvConn) do(op kvOp, key int) error {
	c.ops++
	var err error
	switch op {
	case kvGet:
		err = c.get(key)
	case kvSet:
		err = c.set(key)
	case kvDrop:
		err = c.drop(key)
	default:
		err = fmt.Errorf("op %q: unknown", op)
	}
	if err != nil {
		return fmt.Errorf("%s of key %d, %d bytes: %w", op, key, c.space.size, err)
	}
	return nil
}

func (c *kvConn) get(key int) error {
	if err := c.ask("GET", key); err != nil {
		return err
	}
	// All of it is awaited at once. An answer that is shorter shows when the kernel
	// gives up waiting for the rest.
	for got, waited := 0, time.Duration(0); got < len(c.receive); {
		n, _, err := unix.Recvfrom(c.fd, c.receive[got:], unix.MSG_WAITALL)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if waited += kvPatience; waited >= kvTimeout {
				return fmt.Errorf("receive: %d of %d bytes in %s", got, len(c.receive), waited)
			}
			continue
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case n == 0:
			return fmt.Errorf("receive: %w", io.ErrUnexpectedEOF)
		}
		got += n
		if line, whole := bytes.CutSuffix(c.receive[:got], []byte("\r\n")); whole && bytes.HasPrefix(line, []byte("$-")) && len(line) < len(c.head) {
			c.missed++
			return nil
		}
		if c.receive[0] != '$' {
			return fmt.Errorf("answer %q", c.receive[:min(got, 200)])
		}
	}
	c.bytes += int64(c.space.size)
	head := len(c.head)
	value := c.receive[head : head+c.space.size]
	if string(c.receive[:head]) != c.head || string(c.receive[len(c.receive)-2:]) != "\r\n" {
		return fmt.Errorf("answer begins %q", c.receive[:head])
	}
	if n, v := binary.LittleEndian.Uint64(value), binary.LittleEndian.Uint64(value[8:]); n != uint64(key) || v != c.space.version[key] {
		return fmt.Errorf("value is of key %d in version %d, want key %d in version %d", n, v, key, c.space.version[key])
	}
	if (c.ops-1)%kvCheckEvery == 0 {
		c.checked++
		if !bytes.Equal(value[kvStamp:], c.base[kvStamp:c.space.size]) {
			return errors.New("value has other bytes than were set")
		}
	}
	return nil
}

func (c *kvConn) set(key int) error {
	c.space.version[key]++
	binary.LittleEndian.PutUint64(c.value, uint64(key))
	binary.LittleEndian.PutUint64(c.value[8:], c.space.version[key])
	copy(c.name, c.space.names[key])
	for left := c.send; len(left) > 0; {
		n, err := unix.Write(c.fd, left)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("send: %w", err)
		}
		left = left[max(n, 0):]
	}
	c.bytes += int64(c.space.size)
	return c.expect("+OK\r\n")
}

func (c *kvConn) drop(key int) error {
	if err := c.ask("DEL", key); err != nil {
		return err
	}
	c.space.version[key] = 0
	return c.expect(":1\r\n", ":0\r\n")
}

// ask sends a command of three letters with one key.
func (c *kvConn) ask(command string, key int) error {
	copy(c.question[len("*2\r\n$3\r\n"):], command)
	copy(c.asked, c.space.names[key])
	n, err := unix.Write(c.fd, c.question)
	if err == nil && n != len(c.question) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

// expect receives one of several answers of one length.
func (c *kvConn) expect(answers ...string) error {
	for got, waited := 0, time.Duration(0); got < len(answers[0]); {
		n, _, err := unix.Recvfrom(c.fd, c.receive[got:len(answers[0])], 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			if waited += kvPatience; waited >= kvTimeout {
				return fmt.Errorf("receive: no answer in %s", waited)
			}
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case n == 0:
			return fmt.Errorf("receive: %w", io.ErrUnexpectedEOF)
		default:
			got += n
		}
	}
	if got := c.receive[:len(answers[0])]; !slices.Contains(answers, string(got)) {
		return fmt.Errorf("answer begins %q", got)
	}
	return nil
}
