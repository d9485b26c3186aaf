package proxy

import (
	"bytes"
	"net/http"
)

// framing looks at the bytes of a request's head for what net/http's server
// does not tell: whether a client gave two answers to the question where its
// body ends. The server takes one of them; what stands in front of this router
// may have taken the other, and would then see a second request where the body
// goes on.
type framing struct {
	line      [20]byte // beginning of the current line
	have      int      // bytes of it
	lines     int
	past      bool // the head's end has been seen
	behind    int  // bytes that came with its end and stand behind it
	blind     bool // it does not begin where the request does
	length    bool // Content-Length stands in it
	transfers bool // Transfer-Encoding does
}

var (
	lengthField    = []byte("content-length:")
	transfersField = []byte("transfer-encoding:")
)

// feed takes bytes of a head, cut anywhere. Those behind its end are left alone.
func (f *framing) feed(b []byte) {
	for len(b) > 0 && !f.past {
		at := bytes.IndexByte(b, '\n')
		piece := b
		if at >= 0 {
			piece = b[:at]
			b = b[at+1:]
		}
		f.have += copy(f.line[f.have:], piece)
		if at < 0 {
			return
		}
		f.judge()
		if f.past {
			f.behind = len(b)
		}
	}
}

// whole says whether a body of n bytes is known to have come with its head.
func (f *framing) whole(n int64) bool { return f.past && !f.blind && n >= 0 && int64(f.behind) >= n }

// judge looks at a line whose beginning is whole.
func (f *framing) judge() {
	line := f.line[:f.have]
	f.have = 0
	f.lines++
	if len(line) == 0 || len(line) == 1 && line[0] == '\r' {
		f.past = f.lines > 1
		if f.lines == 1 {
			f.lines = 0 // an empty line before a request is passed over
		}
		return
	}
	switch line[0] | 0x20 {
	case 'c':
		f.length = f.length || len(line) >= len(lengthField) && bytes.EqualFold(line[:len(lengthField)], lengthField)
	case 't':
		f.transfers = f.transfers || len(line) >= len(transfersField) && bytes.EqualFold(line[:len(transfersField)], transfersField)
	}
}

// ambiguous says whether r could end at two places for two readers. unsure is
// for a request whose head f did not see whole, such as a pipelined one.
func (f *framing) ambiguous(r *http.Request) (yes, unsure bool) {
	if !f.past || f.blind {
		return false, len(r.TransferEncoding) > 0 || !r.ProtoAtLeast(1, 1)
	}
	return f.transfers && (f.length || !r.ProtoAtLeast(1, 1)), false
}

func ambiguousLength() *Refusal {
	return invalid(http.StatusBadRequest, "ambiguous_length", "bad-http",
		"The request says in two ways where its body ends: send a Content-Length, or Transfer-Encoding: chunked with HTTP/1.1, not both.")
}
