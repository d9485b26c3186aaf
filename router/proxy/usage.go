package proxy

import "bytes"

// usage is what an engine says about one request's tokens.
type usage struct {
	prompt, cached, completion int
	known, cachedKnown         bool
}

// readUsage reads a usage object in any of the engines' spellings:
// prompt_tokens or input_tokens, completion_tokens or output_tokens,
// prompt_tokens_details.cached_tokens or input_tokens_details.cached_tokens.
// b must begin with the object; a broken or foreign object leaves u as it is.
func (u *usage) readUsage(b []byte) {
	if len(b) == 0 || b[0] != '{' {
		return
	}
	end := skipValue(b, 0, 0)
	if end < 0 {
		return
	}
	var got usage
	eachMember(b, span{0, end}, func(key []byte, v span) {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			got.prompt, got.known = count(v.of(b)), got.known || isNumber(b, v)
		case "completion_tokens", "output_tokens":
			got.completion, got.known = count(v.of(b)), got.known || isNumber(b, v)
		case "total_tokens":
			got.known = got.known || isNumber(b, v)
		case "prompt_tokens_details", "input_tokens_details":
			if !v.is(b, '{') {
				return
			}
			eachMember(b, v, func(key []byte, v span) {
				if string(key) == "cached_tokens" && isNumber(b, v) {
					got.cached, got.cachedKnown = count(v.of(b)), true
				}
			})
		}
	})
	if got.known {
		*u = got
	}
}

// isNumber says whether a count is one: null, a text or a list is none, and
// an engine that gives those has not said what it used.
func isNumber(b []byte, v span) bool { return b[v.off] >= '0' && b[v.off] <= '9' }

const (
	usageObjectMax = 2 << 10 // longest usage object that is read, in bytes
	usageOverlap   = 16      // bytes kept from one read to the next
)

var usageName = []byte(`"usage"`)

// bodyScan finds the usage object, and the id of a stored response, in a JSON
// answer that passes in pieces. It keeps at most usageObjectMax bytes and the
// last usage it saw wins.
type bodyScan struct {
	usage   usage
	id      string
	wantID  bool
	first   bool
	overlap [2 * usageOverlap]byte
	kept    int
	capture []byte // bytes from a match on, nil when none is open
}

func (s *bodyScan) feed(p []byte) {
	if len(p) == 0 {
		return
	}
	if s.wantID && !s.first {
		s.id = firstID(p)
	}
	s.first = true
	if s.capture != nil {
		s.collect(p)
	} else if s.kept > 0 {
		// A match across the seam.
		seam := append(s.overlap[:s.kept], p[:min(len(p), usageOverlap)]...)
		if at := bytes.Index(seam, usageName); at >= 0 && at < s.kept && at+len(usageName) > s.kept {
			s.capture = append(make([]byte, 0, 512), s.overlap[at:s.kept]...)
			s.collect(p)
		}
	}
	for from := 0; s.capture == nil; {
		at := bytes.Index(p[from:], usageName)
		if at < 0 {
			break
		}
		from += at
		if s.take(p[from:]) {
			from += len(usageName)
			continue
		}
		s.capture = append(make([]byte, 0, max(512, len(p)-from)), p[from:]...)
		break
	}
	tail := p[max(0, len(p)-usageOverlap):]
	if len(p) < usageOverlap && s.kept > 0 {
		keep := min(s.kept, usageOverlap-len(p))
		copy(s.overlap[:], s.overlap[s.kept-keep:s.kept])
		s.kept = keep + copy(s.overlap[keep:], tail)
		return
	}
	s.kept = copy(s.overlap[:], tail)
}

// collect adds p to an open capture and closes it once it can be read, or
// once it is longer than any usage object.
func (s *bodyScan) collect(p []byte) {
	s.capture = append(s.capture, p[:min(len(p), usageObjectMax-min(len(s.capture), usageObjectMax))]...)
	if s.take(s.capture) || len(s.capture) >= usageObjectMax {
		s.capture = nil
	}
}

// take reads the usage member that begins at b[0]; false if b ends within it.
func (s *bodyScan) take(b []byte) bool {
	i := skipSpace(b, len(usageName))
	if i >= len(b) {
		return false
	}
	if b[i] != ':' {
		return true
	}
	if i = skipSpace(b, i+1); i >= len(b) {
		return false
	}
	if b[i] != '{' {
		return true
	}
	limit := min(len(b), i+usageObjectMax)
	if end := skipValue(b[:limit], i, 0); end < 0 {
		return ^end < limit || limit < len(b) // broken or too long: look on behind it
	}
	s.usage.readUsage(b[i:limit])
	return true
}

// firstID is the value of the first member named id, "" if p shows none.
func firstID(p []byte) string {
	for i := 0; i < len(p); i++ {
		if p[i] != '"' {
			continue
		}
		end := skipString(p, i)
		if end < 0 {
			return ""
		}
		if string(p[i:end]) == `"id"` {
			at := skipSpace(p, end)
			if at < len(p) && p[at] == ':' {
				at = skipSpace(p, at+1)
				if at < len(p) && p[at] == '"' {
					if stop := skipString(p, at); stop > 0 {
						return text(p, span{at, stop})
					}
				}
			}
		}
		i = end - 1
	}
	return ""
}
