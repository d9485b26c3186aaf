package proxy

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"sync/atomic"
)

// edit replaces body[off:end] by text; off == end inserts.
type edit struct {
	off, end int
	text     string
}

// edits makes the splices a target needs: its served model name, and the usage
// a stream must report. stripUsage says the usage chunk is ours and must not
// reach the client; cutUsage the same for usage members of other chunks.
func (f *facts) edits(body []byte, servedModel string, meterStream, continuous bool) (list []edit, stripUsage, cutUsage bool) {
	if f.model.present() && servedModel != "" && text(body, f.model) != servedModel {
		quoted, err := json.Marshal(servedModel)
		if err == nil {
			list = append(list, edit{f.model.off, f.model.end, string(quoted)})
		}
	}
	if !f.stream || !meterStream {
		return list, false, false
	}
	addUsage, addContinuous := !f.wantsUsage, continuous && !f.wantsContinuous
	if !addUsage && !addContinuous {
		return list, false, false
	}
	members := ""
	add := func(wanted bool, value span, name string) {
		switch {
		case !wanted:
		case f.streamOptions.is(body, '{') && value.present():
			list = append(list, edit{value.off, value.end, "true"})
		default:
			if members != "" {
				members += ","
			}
			members += `"` + name + `":true`
		}
	}
	add(addUsage, f.includeUsage, "include_usage")
	add(addContinuous, f.continuousUsage, "continuous_usage_stats")
	switch {
	case members == "":
	case f.streamOptions.is(body, '{'):
		if !f.optionsEmpty {
			members += ","
		}
		list = append(list, edit{f.optionsOpen, f.optionsOpen, members})
	case f.streamOptions.present():
		if body[f.streamOptions.off] != 'n' {
			return list, false, false // not an object: the engine refuses it, not we
		}
		list = append(list, edit{f.streamOptions.off, f.streamOptions.end, "{" + members + "}"})
	default:
		list = append(list, edit{f.open, f.open, `"stream_options":{` + members + "},"})
	}
	slices.SortFunc(list, func(a, b edit) int { return a.off - b.off })
	return list, addUsage, addContinuous
}

// bodyBuffer is a request body shared by the handler and the attempts that
// send it. The transport may still write after an early response, so the
// bytes go back to the pool only when the last holder has let go.
type bodyBuffer struct {
	b    []byte
	refs atomic.Int32
}

func (s *bodyBuffer) hold() { s.refs.Add(1) }

func (s *bodyBuffer) release() {
	if s.refs.Add(-1) == 0 {
		b := s.b
		s.b = nil
		putBuffer(b)
	}
}

// splicedBody reads a body with edits applied. The transport owns it from
// RoundTrip until Close.
type splicedBody struct {
	shared *bodyBuffer
	list   []edit
	pos    int // next byte of the body
	cut    int // bytes of list[0].text already read
	closed atomic.Bool
	reads  atomic.Int32 // guards the buffer against a Close that overtakes a Read
}

func newSplicedBody(shared *bodyBuffer, list []edit) *splicedBody {
	shared.hold()
	s := &splicedBody{shared: shared, list: list}
	s.reads.Store(1)
	return s
}

// copyBelow is the size up to which a body is copied with its splices into
// memory of its own. The transport sends headers and body in one write only
// where it knows the body to be in memory.
const copyBelow = 16 << 10

// sendable is a body with edits applied, and its length.
func sendable(shared *bodyBuffer, list []edit) (io.ReadCloser, int64) {
	s := splicedBody{shared: shared, list: list}
	n := s.length()
	if n > copyBelow {
		return newSplicedBody(shared, list), n
	}
	b := make([]byte, 0, n)
	pos := 0
	for _, e := range list {
		b = append(append(b, shared.b[pos:e.off]...), e.text...)
		pos = e.end
	}
	return io.NopCloser(bytes.NewReader(append(b, shared.b[pos:]...))), n
}

// length is the number of bytes the reader yields.
func (s *splicedBody) length() int64 {
	n := len(s.shared.b)
	for _, e := range s.list {
		n += len(e.text) - (e.end - e.off)
	}
	return int64(n)
}

// Read implements io.Reader.
func (s *splicedBody) Read(p []byte) (int, error) {
	if s.reads.Add(1) <= 1 {
		return 0, io.ErrClosedPipe
	}
	defer s.letGo()
	if s.closed.Load() {
		return 0, io.ErrClosedPipe
	}
	body := s.shared.b
	n := 0
	for n < len(p) {
		if len(s.list) > 0 && s.pos == s.list[0].off {
			c := copy(p[n:], s.list[0].text[s.cut:])
			n += c
			if s.cut += c; s.cut == len(s.list[0].text) {
				s.pos, s.cut, s.list = s.list[0].end, 0, s.list[1:]
			}
			continue
		}
		limit := len(body)
		if len(s.list) > 0 {
			limit = s.list[0].off
		}
		if s.pos == limit {
			break
		}
		c := copy(p[n:], body[s.pos:limit])
		n += c
		s.pos += c
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Close implements io.Closer; it may run beside a Read and more than once.
func (s *splicedBody) Close() error {
	if s.closed.CompareAndSwap(false, true) {
		s.letGo()
	}
	return nil
}

func (s *splicedBody) letGo() {
	if s.reads.Add(-1) == 0 {
		s.shared.release()
	}
}
