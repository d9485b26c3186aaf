package resp

import (
	"bytes"
	"errors"
	"io"
	"sync"
)

// Limits of a command.
const (
	maxArguments  = 1024
	maxCommand    = 64 << 10  // bytes, without the value of a SET
	maxInline     = 4 << 10   // bytes
	maxBulk       = 512 << 20 // bytes
	maxMultibulk  = 1 << 20   // arguments of a command that is read and refused
	maxHeader     = 32        // bytes of a line before a bulk string or an array
	readBuffer    = 4 << 10   // bytes that an idle connection keeps
	openArguments = 10        // before authentication
	openBulk      = 16 << 10
	discardAtOnce = 128 << 10
)

// protocolError ends a connection: what follows on it cannot be understood.
// Its text is the client's answer.
type protocolError string

func (e protocolError) Error() string { return string(e) }

// errTooLong says that a command was read to its end and not kept.
var errTooLong = errors.New("command too long")

// command is what a client asks. Its slices are valid until the next is read.
type command struct {
	args   [][]byte
	inline bool
	// streams says that args are those before a value that is still to be read:
	// size bytes, and after them more arguments.
	streams bool
	size    int
	more    int
}

type span struct{ from, to int }

// reader takes commands from a connection.
type reader struct {
	source io.Reader
	buf    []byte
	start  int // of the command in buf
	at     int // first byte that is not understood yet
	end    int // of what was read
	spans  []span
	args   [][]byte
	// open says that nobody has authenticated: little is read.
	open bool
}

func newReader(source io.Reader) *reader {
	return &reader{source: source, buf: make([]byte, readBuffer)}
}

// next reads a command, up to the value of a SET.
func (r *reader) next() (command, error) {
	for {
		r.done()
		if err := r.need(1); err != nil {
			return command{}, err
		}
		if r.buf[r.at] != '*' {
			cmd, err := r.inline()
			if err != nil || len(cmd.args) > 0 {
				return cmd, err
			}
			continue
		}
		count, err := r.header('*', maxMultibulk, "Protocol error: invalid multibulk length")
		if err != nil {
			return command{}, err
		}
		if count <= 0 {
			continue
		}
		if r.open && count > openArguments {
			return command{}, protocolError("Protocol error: unauthenticated multibulk length")
		}
		return r.array(count)
	}
}

// done forgets the command that was read, and its memory where it was large.
func (r *reader) done() {
	r.start = r.at
	if r.start != r.end {
		return
	}
	r.start, r.at, r.end = 0, 0, 0
	if len(r.buf) > readBuffer {
		r.buf = make([]byte, readBuffer)
	}
	if cap(r.spans) > 64 {
		r.spans, r.args = nil, nil
	}
}

func (r *reader) array(count int) (command, error) {
	r.spans = r.spans[:0]
	keep := count <= maxArguments
	for i := range count {
		size, err := r.bulkHeader()
		if err != nil {
			return command{}, err
		}
		if i == 2 && keep && isSet(r.slice(r.spans[0])) {
			return command{args: r.slices(), streams: true, size: size, more: count - 3}, nil
		}
		if keep && r.at-r.start+size+2 > maxCommand {
			keep = false
		}
		if !keep {
			r.start = r.at
			if err := r.skip(size); err != nil {
				return command{}, err
			}
			r.start = r.at
			continue
		}
		if err := r.bulk(size); err != nil {
			return command{}, err
		}
	}
	if !keep {
		return command{}, errTooLong
	}
	return command{args: r.slices()}, nil
}

// rest reads the arguments after a streamed value, which has been taken.
func (r *reader) rest(count int) ([][]byte, error) {
	r.start = r.at
	r.spans = r.spans[:0]
	keep := true
	for range count {
		size, err := r.bulkHeader()
		if err != nil {
			return nil, err
		}
		if keep = keep && r.at-r.start+size+2 <= maxCommand; !keep {
			if err := r.skip(size); err != nil {
				return nil, err
			}
			r.start = r.at
			continue
		}
		if err := r.bulk(size); err != nil {
			return nil, err
		}
	}
	if !keep {
		return nil, errTooLong
	}
	return r.slices(), nil
}

func (r *reader) bulkHeader() (int, error) {
	size, err := r.header('$', maxBulk, "Protocol error: invalid bulk length")
	if err != nil {
		return 0, err
	}
	if size < 0 {
		return 0, protocolError("Protocol error: invalid bulk length")
	}
	if r.open && size > openBulk {
		return 0, protocolError("Protocol error: unauthenticated bulk length")
	}
	return size, nil
}

// bulk keeps the bytes of a bulk string.
func (r *reader) bulk(size int) error {
	if err := r.need(size + 2); err != nil {
		return err
	}
	from := r.at - r.start
	r.spans = append(r.spans, span{from, from + size})
	r.at += size
	return r.crlf()
}

// skip reads over the bytes of a bulk string.
func (r *reader) skip(size int) error {
	if err := r.discard(size); err != nil {
		return err
	}
	return r.crlf()
}

func (r *reader) crlf() error {
	if err := r.need(2); err != nil {
		return err
	}
	if r.buf[r.at] != '\r' || r.buf[r.at+1] != '\n' {
		return protocolError("Protocol error: bulk string without its end")
	}
	r.at += 2
	return nil
}

// buffered moves what is in the buffer already to dst.
func (r *reader) buffered(dst []byte) int {
	n := copy(dst, r.buf[r.at:r.end])
	r.at += n
	return n
}

// behind is room for what comes behind a value, once all that was read is
// understood. The words of the command are gone. The caller says with came how
// much of it there is.
func (r *reader) behind() []byte {
	r.start, r.at, r.end = 0, 0, 0
	return r.buf
}

func (r *reader) came(n int) { r.end = n }

var scratch = sync.Pool{New: func() any { b := make([]byte, discardAtOnce); return &b }}

// discard reads over n bytes.
func (r *reader) discard(n int) error {
	have := min(n, r.end-r.at)
	r.at += have
	n -= have
	if n == 0 {
		return nil
	}
	into := scratch.Get().(*[]byte)
	defer scratch.Put(into)
	for n > 0 {
		got, err := r.source.Read((*into)[:min(n, len(*into))])
		n -= got
		if err != nil && n > 0 {
			return err
		}
	}
	return nil
}

// header reads a line of one mark and a number.
func (r *reader) header(mark byte, most int, wrong string) (int, error) {
	line, err := r.line(maxHeader, wrong)
	if err != nil {
		return 0, err
	}
	if len(line) == 0 || line[0] != mark {
		got := byte(' ')
		if len(line) > 0 {
			got = line[0]
		}
		return 0, protocolError("Protocol error: expected '" + string(rune(mark)) + "', got '" + printable(got) + "'")
	}
	number, ok := parseInt(line[1:])
	if !ok || number > int64(most) {
		return 0, protocolError(wrong)
	}
	return int(max(number, -1)), nil
}

func printable(c byte) string {
	if c < ' ' || c > '~' {
		return "?"
	}
	return string(rune(c))
}

// line reads up to CR LF, or LF alone, and gives what is before it.
func (r *reader) line(most int, wrong string) ([]byte, error) {
	seen := 0
	for {
		if end := bytes.IndexByte(r.buf[r.at+seen:r.end], '\n'); end >= 0 {
			line := r.buf[r.at : r.at+seen+end]
			r.at += seen + end + 1
			if len(line) > most {
				return nil, protocolError(wrong)
			}
			return bytes.TrimSuffix(line, []byte{'\r'}), nil
		}
		seen = r.end - r.at
		if seen > most+1 {
			return nil, protocolError(wrong)
		}
		if err := r.need(seen + 1); err != nil {
			return nil, err
		}
	}
}

// inline reads a command that a person typed.
func (r *reader) inline() (command, error) {
	line, err := r.line(maxInline, "Protocol error: too big inline request")
	if err != nil {
		return command{}, err
	}
	r.args = r.args[:0]
	for word := range bytes.FieldsSeq(line) {
		if len(r.args) == maxArguments || r.open && len(r.args) == openArguments {
			return command{}, errTooLong
		}
		if bytes.ContainsAny(word, `"'`) {
			return command{}, protocolError("Protocol error: unbalanced quotes in request")
		}
		r.args = append(r.args, word)
	}
	return command{args: r.args, inline: true}, nil
}

// need reads until n bytes that are not understood yet are in the buffer.
func (r *reader) need(n int) error {
	for r.end-r.at < n {
		if r.at+n > len(r.buf) {
			r.room(n)
		}
		got, err := r.source.Read(r.buf[r.end:])
		r.end += got
		if err != nil && r.end-r.at < n {
			return err
		}
	}
	return nil
}

// room makes place for n bytes from at on. Only maxCommand bytes are ever kept.
func (r *reader) room(n int) {
	whole := r.at - r.start + n
	to := r.buf
	if whole > len(to) {
		size := len(to)
		for size < whole {
			size *= 2
		}
		to = make([]byte, size)
	}
	copy(to, r.buf[r.start:r.end])
	r.buf = to
	r.at -= r.start
	r.end -= r.start
	r.start = 0
}

func (r *reader) slice(s span) []byte { return r.buf[r.start+s.from : r.start+s.to] }

func (r *reader) slices() [][]byte {
	r.args = r.args[:0]
	for _, s := range r.spans {
		r.args = append(r.args, r.slice(s))
	}
	return r.args
}

func isSet(word []byte) bool {
	return len(word) == 3 && word[0]|0x20 == 's' && word[1]|0x20 == 'e' && word[2]|0x20 == 't'
}

// parseInt reads a whole number as Redis does: no sign but a minus, no needless zero.
func parseInt(text []byte) (int64, bool) {
	digits := text
	negative := len(digits) > 0 && digits[0] == '-'
	if negative {
		digits = digits[1:]
	}
	if len(digits) == 0 || len(digits) > 18 || digits[0] == '0' && (len(digits) > 1 || negative) {
		return 0, false
	}
	var number int64
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		number = number*10 + int64(c-'0')
	}
	if negative {
		number = -number
	}
	return number, true
}
