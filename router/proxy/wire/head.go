package wire

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// Bounds of a response's head.
const (
	maxHeadBytes     = 64 << 10
	maxFields        = 512
	maxInformational = 8 // 1xx responses before the answer
)

// ErrMalformed is a response that cannot be trusted to end where it seems to.
var ErrMalformed = errors.New("malformed response")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrMalformed}, args...)...)
}

// Field is one line of a head, its name in canonical form.
type Field struct{ Name, Value string }

// appendHead writes the head of req, whose body is length bytes.
func appendHead(b []byte, req *Request, length int) []byte {
	b = append(append(b, req.Method...), ' ')
	b = appendTarget(b, req.Target)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = appendValue(b, req.Host)
	b = append(b, '\r', '\n')
	for name, values := range req.Header {
		for _, v := range values {
			b = append(append(b, name...), ':', ' ')
			b = append(appendValue(b, v), '\r', '\n')
		}
	}
	if length > 0 || req.Method != http.MethodGet && req.Method != http.MethodHead && req.Method != http.MethodDelete {
		b = strconv.AppendInt(append(b, "Content-Length: "...), int64(length), 10)
		b = append(b, '\r', '\n')
	}
	return append(b, '\r', '\n')
}

// appendTarget escapes what would end a request line; the rest is the client's.
func appendTarget(b []byte, target string) []byte {
	const hex = "0123456789ABCDEF"
	for i := range len(target) {
		if c := target[i]; c <= ' ' || c == 0x7f {
			b = append(b, '%', hex[c>>4], hex[c&15])
		} else {
			b = append(b, c)
		}
	}
	return b
}

// appendValue writes a field's value; a line break in it cannot begin a field.
func appendValue(b []byte, v string) []byte {
	from := len(b)
	b = append(b, v...)
	for i, c := range b[from:] {
		if c == '\r' || c == '\n' || c == 0 {
			b[from+i] = ' '
		}
	}
	return b
}

// readHead reads the response's head, past informational ones, and prepares r
// to read the body.
func (c *conn) readHead(method string, r *Response) error {
	for range maxInformational + 1 {
		n, err := c.wholeHead()
		if err != nil {
			return err
		}
		raw := c.block.b[c.from : c.from+n]
		c.from += n
		h := head{fields: c.fields[:0]}
		if err := h.parse(raw); err != nil {
			return err
		}
		c.fields = h.fields
		switch {
		case h.status == http.StatusSwitchingProtocols:
			return malformed("protocol switch nobody asked for")
		case h.status < 200:
			continue
		}
		r.Status, r.Fields, r.Length = h.status, h.fields, h.length
		r.keep = h.keep
		switch {
		case method == http.MethodHead || h.status == http.StatusNoContent || h.status == http.StatusNotModified:
			r.body = bodyDone
		case h.chunked:
			r.body, r.Length = bodyChunked, -1
		case h.length >= 0:
			r.body, r.left = bodyLength, h.length
			if h.length == 0 {
				r.body = bodyDone
			}
		default:
			r.body, r.keep, r.toEnd = bodyToEnd, false, true
		}
		return nil
	}
	return malformed("more than %d informational responses", maxInformational)
}

// wholeHead reads until the unread bytes hold a head and gives its length.
func (c *conn) wholeHead() (int, error) {
	line := 0 // where the line begins that is looked at, from c.from
	seen := 0 // bytes looked at
	for {
		if c.block != nil {
			unread := c.block.b[c.from:c.end]
			for {
				at := bytes.IndexByte(unread[seen:], '\n')
				if at < 0 {
					seen = len(unread)
					break
				}
				seen += at + 1
				if seen > maxHeadBytes {
					return 0, malformed("head longer than %d bytes", maxHeadBytes)
				}
				if size := seen - line; line > 0 && (size == 1 || size == 2 && unread[line] == '\r') {
					return seen, nil
				}
				line = seen
			}
			if err := c.grow(); err != nil {
				return 0, err
			}
		}
		if err := c.fill(); err != nil {
			if errors.Is(err, ErrMalformed) {
				return 0, err
			}
			return 0, c.lost(err)
		}
	}
}

// head is a parsed response head.
type head struct {
	status  int
	fields  []Field
	length  int64 // -1 if not given
	chunked bool
	keep    bool // the connection may carry another request
}

// parse reads a whole head. The fields share one string.
func (h *head) parse(raw []byte) error {
	s := string(raw)
	line, rest := cutLine(s)
	minor, status, err := statusLine(line)
	if err != nil {
		return err
	}
	h.status, h.length, h.keep = status, -1, minor == 1
	for rest != "" {
		line, rest = cutLine(rest)
		if line == "" {
			break
		}
		f, err := field(line)
		if err != nil {
			return err
		}
		if len(h.fields) == maxFields {
			return malformed("more than %d fields", maxFields)
		}
		h.fields = append(h.fields, f)
		switch f.Name {
		case "Content-Length":
			n, err := contentLength(f.Value)
			if err != nil {
				return err
			}
			if h.length >= 0 && h.length != n {
				return malformed("two lengths")
			}
			h.length = n
		case "Transfer-Encoding":
			if h.chunked || minor == 0 || !equalFold(f.Value, "chunked") {
				return malformed("transfer encoding %.40q", f.Value)
			}
			h.chunked = true
		case "Connection":
			if hasToken(f.Value, "close") {
				h.keep = false
			} else if minor == 0 && hasToken(f.Value, "keep-alive") {
				h.keep = true
			}
		}
	}
	if h.chunked && h.length >= 0 {
		return malformed("both a length and a transfer encoding")
	}
	return nil
}

// cutLine takes the first line off s, which has one.
func cutLine(s string) (line, rest string) {
	for i := range len(s) {
		if s[i] == '\n' {
			line, rest = s[:i], s[i+1:]
			if i > 0 && s[i-1] == '\r' {
				line = s[:i-1]
			}
			return line, rest
		}
	}
	return s, ""
}

func statusLine(line string) (minor, status int, err error) {
	if len(line) < len("HTTP/1.1 200") || line[:7] != "HTTP/1." || line[7] != '0' && line[7] != '1' || line[8] != ' ' ||
		len(line) > 12 && line[12] != ' ' {
		return 0, 0, malformed("status line %.40q", line)
	}
	for _, d := range []byte(line[9:12]) {
		if d < '0' || d > '9' {
			return 0, 0, malformed("status line %.40q", line)
		}
		status = status*10 + int(d-'0')
	}
	if status < 100 {
		return 0, 0, malformed("status %d", status)
	}
	return int(line[7] - '0'), status, nil
}

// field reads "Name: value". A line that continues the one before is refused,
// since readers differ about it.
func field(line string) (Field, error) {
	colon := 0
	canonical, start := true, true
	for ; colon < len(line) && line[colon] != ':'; colon++ {
		c := line[colon]
		switch class := tokens[c]; {
		case class == 0:
			return Field{}, malformed("field %.40q", line)
		case start && class == lower, !start && class == upper:
			canonical = false
		}
		start = c == '-'
	}
	if colon == 0 || colon == len(line) {
		return Field{}, malformed("field %.40q", line)
	}
	f := Field{Name: line[:colon], Value: trim(line[colon+1:])}
	if !canonical {
		f.Name = http.CanonicalHeaderKey(f.Name)
	}
	for i := range len(f.Value) {
		if c := f.Value[i]; c < ' ' && c != '\t' || c == 0x7f {
			return Field{}, malformed("control character in field %.40q", f.Name)
		}
	}
	return f, nil
}

// Classes of the characters a field's name may have.
const (
	lower = iota + 1
	upper
	other
)

var tokens = func() (t [256]uint8) {
	for c := 'a'; c <= 'z'; c++ {
		t[c], t[c-'a'+'A'] = lower, upper
	}
	for _, c := range "0123456789!#$%&'*+-.^_`|~" {
		t[c] = other
	}
	return t
}()

func trim(s string) string {
	for s != "" && (s[0] == ' ' || s[0] == '\t') {
		s = s[1:]
	}
	for s != "" && (s[len(s)-1] == ' ' || s[len(s)-1] == '\t') {
		s = s[:len(s)-1]
	}
	return s
}

func contentLength(v string) (int64, error) {
	if v == "" || len(v) > 18 {
		return 0, malformed("length %.40q", v)
	}
	var n int64
	for i := range len(v) {
		if v[i] < '0' || v[i] > '9' {
			return 0, malformed("length %.40q", v)
		}
		n = n*10 + int64(v[i]-'0')
	}
	return n, nil
}

// equalFold compares with a lower-case word.
func equalFold(s, word string) bool {
	if len(s) != len(word) {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != word[i] {
			return false
		}
	}
	return true
}

// hasToken says whether a comma-separated list has the lower-case word.
func hasToken(list, word string) bool {
	for list != "" {
		at := 0
		for at < len(list) && list[at] != ',' {
			at++
		}
		item := list[:at]
		list = list[min(at+1, len(list)):]
		if equalFold(trim(item), word) {
			return true
		}
	}
	return false
}
