package proxy

import "bytes"

// maxLineBytes is the longest event line that is looked at whole. A longer one
// passes through unread: usage chunks are a few hundred bytes.
const maxLineBytes = 64 << 10

// sseScanner looks at an event stream as it passes: usage, the first content,
// errors, [DONE]. It takes data lines with or without the space, CRLF,
// comments, and pieces split anywhere. A line still incomplete is held back
// until its end arrives, so that a broken engine never leaves half an event
// with the client; every other byte leaves in the call that brought it.
type sseScanner struct {
	stripUsage bool // drop the usage chunk (choices empty): the router asked for it
	cutUsage   bool // cut usage members from other chunks: the router asked for them
	wantID     bool // note the id of a stored response

	usage    usage
	content  int    // data lines that carried content
	done     bool   // [DONE], or a closing event of the responses API
	finished bool   // the last event with choices said why it finished
	failed   bool   // the engine sent an error event
	events   bool   // a data line was seen
	id       string // first response id

	carry, held []byte // the line being held back; the one last given out
	through     bool   // within a line too long to hold
	unread      bool   // there was such a line
	dropBlank   bool   // the event's only line was dropped: drop its blank line
	lines       int    // lines of the current event the client got
	midEvent    bool   // the last line the client got was not blank

	// prefix is a data line up to its content's first byte, as scanned in full:
	// chunks of one stream share it, so the next is compared, not scanned.
	prefix [256]byte
	known  int
}

// feed scans p and gives what the client shall have, in order: head, then
// body. Both are valid until the next call; body lies within p, which is
// overwritten where bytes are dropped.
func (s *sseScanner) feed(p []byte) (head, body []byte) {
	from := 0 // first byte not yet judged
	out := 0  // bytes of p that stay
	if s.through {
		at := bytes.IndexByte(p, '\n')
		if at < 0 {
			return nil, p
		}
		s.through = false
		from, out = at+1, at+1
	} else if len(s.carry) > 0 {
		at := bytes.IndexByte(p, '\n')
		if at < 0 {
			if !s.holdable(len(s.carry), p) {
				s.carry, s.held = s.held[:0], s.carry
				s.through, s.unread = true, true
				return s.held, p
			}
			s.carry = append(s.carry, p...)
			return nil, nil
		}
		s.carry = append(s.carry, p[:at+1]...)
		s.carry, s.held = s.held[:0], s.carry
		keep, cut := s.line(s.held)
		if keep {
			head = cutOut(s.held, cut)
		}
		from = at + 1
		p = p[from:]
		from = 0
	}
	for from < len(p) {
		at := bytes.IndexByte(p[from:], '\n')
		if at < 0 {
			rest := p[from:]
			if s.holdable(0, rest) {
				s.carry = append(s.carry[:0], rest...)
				break
			}
			s.through, s.unread = true, true
			out += copy(p[out:], rest)
			break
		}
		line := p[from : from+at+1]
		from += at + 1
		keep, cut := s.line(line)
		if !keep {
			continue
		}
		line = cutOut(line, cut)
		if &p[out] == &line[0] {
			out += len(line)
			continue
		}
		out += copy(p[out:], line)
	}
	return head, p[:out]
}

// holdable says whether a partial line may wait for its end. A carriage return
// inside it means lines that end in CR alone: those pass unread.
func (s *sseScanner) holdable(have int, rest []byte) bool {
	if have+len(rest) > maxLineBytes {
		return false
	}
	cr := bytes.IndexByte(rest, '\r')
	return cr < 0 || cr == len(rest)-1
}

// finish gives back a last line that has no newline.
func (s *sseScanner) finish() []byte {
	last := s.carry
	s.carry = nil
	if len(last) == 0 {
		return nil
	}
	if keep, cut := s.line(last); keep {
		return cutOut(last, cut)
	}
	return nil
}

// cutOut removes cut from line in place.
func cutOut(line []byte, cut span) []byte {
	if !cut.present() {
		return line
	}
	return append(line[:cut.off], line[cut.end:]...)
}

// line judges one whole line: whether the client gets it, and without which bytes.
func (s *sseScanner) line(raw []byte) (keep bool, cut span) {
	line := raw
	if n := len(line); n > 0 && line[n-1] == '\n' {
		line = line[:n-1]
	}
	if n := len(line); n > 0 && line[n-1] == '\r' {
		line = line[:n-1]
	}
	if len(line) == 0 {
		drop := s.dropBlank
		s.dropBlank, s.lines = false, 0
		if !drop {
			s.midEvent = false
		}
		return !drop, span{}
	}
	s.dropBlank = false
	if len(line) > 5 && string(line[:5]) == "data:" {
		at := 5
		if line[5] == ' ' {
			at = 6
		}
		s.events = true
		drop, within := s.data(line[at:])
		if drop {
			s.dropBlank = s.lines == 0
			return false, span{}
		}
		if within.present() {
			cut = span{at + within.off, at + within.end}
		}
	}
	s.lines++
	s.midEvent = true
	return true, cut
}

// data reads one event's JSON.
func (s *sseScanner) data(d []byte) (drop bool, cut span) {
	if n := s.known; n > 0 && len(d) > n && bytes.Equal(d[:n], s.prefix[:n]) && d[n] != '"' {
		end := skipString(d, n-1)
		if end > 0 && !bytes.Contains(d[end:], usageName) {
			s.content++
			s.finished = finishes(d[end:])
			return false, span{}
		}
	}
	if string(d) == "[DONE]" {
		s.done = true
		return false, span{}
	}
	return s.chunk(d)
}

// chunk walks an event's strings, without regard to depth: a name that stands
// as a string followed by a colon is a member name wherever it is, and text
// cannot imitate one since its quotes are escaped.
func (s *sseScanner) chunk(d []byte) (drop bool, cut span) {
	emptyChoices, content, sawUsage := false, false, false
	choices, finish, closing := false, false, false
	first := true
	for i := 0; i < len(d); {
		at := bytes.IndexByte(d[i:], '"')
		if at < 0 {
			break
		}
		start := i + at
		end := skipString(d, start)
		if end < 0 {
			break
		}
		i = end
		v := skipSpace(d, end)
		if v >= len(d) || d[v] != ':' {
			continue
		}
		if v = skipSpace(d, v+1); v >= len(d) {
			break
		}
		i = v
		switch string(d[start+1 : end-1]) {
		case "content", "text", "reasoning_content", "reasoning", "delta", "arguments":
			if d[v] == '"' && v+1 < len(d) && d[v+1] != '"' {
				if !content && v+1 <= len(s.prefix) && !s.cutUsage && !sawUsage {
					s.known = copy(s.prefix[:], d[:v+1])
				}
				content = true
			}
		case "choices":
			if d[v] == '[' {
				inner := skipSpace(d, v+1)
				emptyChoices = inner < len(d) && d[inner] == ']'
				choices = true
			}
		case "finish_reason":
			finish = finish || d[v] == '"'
		case "usage":
			stop := skipValue(d, v, 0)
			if stop < 0 {
				break
			}
			if d[v] == '{' {
				sawUsage = true
				s.usage.readUsage(d[v:stop])
			}
			if s.cutUsage {
				cut = memberSpan(d, start, stop)
			}
			i = stop
		case "error":
			if d[v] == '{' && first {
				s.failed = true
			}
		case "type":
			if stop := skipString(d, v); d[v] == '"' && stop > 0 {
				kind := d[v:stop]
				// An event names its own type; those of what it holds are no "response.".
				closing = closing || bytes.HasPrefix(kind, responseName) && !bytes.HasSuffix(kind, deltaName)
				switch string(kind) {
				case `"response.completed"`, `"response.incomplete"`:
					s.done = true
				case `"response.failed"`, `"error"`:
					s.failed = true
				}
			}
		case "id":
			if s.wantID && s.id == "" && d[v] == '"' {
				if stop := skipString(d, v); stop > 0 {
					s.id = text(d, span{v, stop})
				}
			}
		}
		first = false
		if d[v] == '"' {
			if i < v+1 {
				i = v
			}
			// Step over a string value, so that it is not taken for a name.
			if stop := skipString(d, v); stop > 0 && i == v {
				i = stop
			}
		}
	}
	switch {
	case closing:
		s.known = 0 // tells again what deltas told
	case content:
		s.content++
	}
	if choices && !emptyChoices {
		s.finished = finish
	}
	if sawUsage && emptyChoices {
		return s.stripUsage, span{} // the usage chunk: ours to drop, or the client's whole
	}
	return false, cut
}

var (
	responseName = []byte(`"response.`)
	deltaName    = []byte(`.delta"`)
	finishName   = []byte(`"finish_reason"`)
)

// finishes says whether what follows a chunk's content tells why it finished.
func finishes(d []byte) bool {
	at := bytes.Index(d, finishName)
	if at < 0 {
		return false
	}
	at = skipSpace(d, at+len(finishName))
	if at >= len(d) || d[at] != ':' {
		return false
	}
	at = skipSpace(d, at+1)
	return at < len(d) && d[at] == '"'
}

// ended says whether the stream told its end: what ends without, breaks off.
func (s *sseScanner) ended() bool { return s.done || s.failed || s.finished }

// memberSpan is the member from name to end with the one comma that goes with it.
func memberSpan(d []byte, name, end int) span {
	i := name - 1
	for i >= 0 && (d[i] == ' ' || d[i] == '\t') {
		i--
	}
	if i >= 0 && d[i] == ',' {
		return span{i, end}
	}
	if i = skipSpace(d, end); i < len(d) && d[i] == ',' {
		return span{name, i + 1}
	}
	return span{name, end}
}
