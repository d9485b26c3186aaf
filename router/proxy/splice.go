package proxy

import (
	"encoding/json"
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
