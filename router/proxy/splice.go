package proxy

import (
	"bytes"
	"encoding/json"
	"slices"
	"sync/atomic"
)

// edit replaces body[off:end] by text; off == end inserts.
type edit struct {
	off, end int
	text     string
}

func byOffset(a, b edit) int { return a.off - b.off }

// askUsage is the splice that most streams need.
const askUsage = `"stream_options":{"include_usage":true},`

// edits makes the splices a target needs: its served model name, added where
// addModel says that a body without one needs it, and the usage a stream must
// report. stripUsage says the usage chunk is ours and must not
// reach the client; cutUsage the same for usage members of other chunks.
func (f *facts) edits(body []byte, servedModel string, addModel, meterStream, continuous bool) (list []edit, stripUsage, cutUsage bool) {
	switch {
	case servedModel == "":
	case f.model.present():
		if !equalText(body, f.model, servedModel) {
			list = append(list, edit{f.model.off, f.model.end, quote(servedModel)})
		}
	case addModel:
		member := `"model":` + quote(servedModel)
		if body[skipSpace(body, f.open)] != '}' {
			member += ","
		}
		list = append(list, edit{f.open, f.open, member})
	}
	if !f.stream || !meterStream {
		return list, false, false
	}
	addUsage, addContinuous := !f.wantsUsage, continuous && !f.wantsContinuous
	if !addUsage && !addContinuous {
		return list, false, false
	}
	if !continuous && !f.streamOptions.present() {
		list = append(list, edit{f.open, f.open, askUsage})
		slices.SortStableFunc(list, byOffset)
		return list, true, false
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
	slices.SortStableFunc(list, byOffset)
	return list, addUsage, addContinuous
}

// equalText compares a string span's value without allocating.
func equalText(b []byte, s span, want string) bool {
	if inner := b[s.off+1 : s.end-1]; bytes.IndexByte(inner, '\\') < 0 {
		return string(inner) == want
	}
	return text(b, s) == want
}

// quote is s as a JSON string.
func quote(s string) string {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= 0x7f {
			quoted, err := json.Marshal(s)
			if err != nil {
				return `""` // strings marshal
			}
			return string(quoted)
		}
	}
	return `"` + s + `"`
}

// bodyBuffer is a request body shared by the handler and the attempts that
// send it. The transport may still write after an early response, so the
// bytes go back to the pool only when the last holder has let go.
type bodyBuffer struct {
	b    []byte
	refs atomic.Int32
}

// Hold takes a share.
func (s *bodyBuffer) Hold() { s.refs.Add(1) }

// Release gives a share back.
func (s *bodyBuffer) Release() {
	if s.refs.Add(-1) == 0 {
		b := s.b
		s.b = nil
		putBuffer(b)
	}
}

// splice appends the pieces of body with edits applied.
func splice(pieces [][]byte, body []byte, list []edit) [][]byte {
	pos := 0
	add := func(p []byte) {
		if len(p) > 0 {
			pieces = append(pieces, p)
		}
	}
	for _, e := range list {
		add(body[pos:e.off])
		add([]byte(e.text))
		pos = e.end
	}
	add(body[pos:])
	return pieces
}
