package proxy

import (
	"github.com/cespare/xxhash/v2"

	"github.com/hearth-dev/hearth/router/pick"
)

// The canonical walk is the byte string whose blocks name a request's prefix.
// It is defined by KEYS.md and follows the order in which chat templates lay a
// prompt out: tools, instructions, then each message. The walk of a
// conversation is a prefix of the walk of every later turn, because messages
// are only ever appended and nothing is written behind them.

// maxKeys bounds the keys of one request: 4 MiB of prompt, about a million tokens.
const maxKeys = 16 << 10

// Marks stand between the pieces of a walk. They are control characters,
// which JSON strings cannot hold raw, so no text can imitate them.
const (
	markTools   = 0x01
	markSystem  = 0x02
	markMessage = 0x03
	markContent = 0x04
	markMember  = 0x05
	markPart    = 0x06
	markText    = 0x07
)

// imageTokenBytes is how much of an image's URL counts as prompt: a data URL's
// length says nothing about the tokens the image becomes.
const imageTokenBytes = 1 << 10

// walker hashes a canonical walk block by block.
type walker struct {
	keys    []pick.Key
	chain   uint64
	fill    int
	total   int // bytes walked
	counted int // bytes that count as prompt, for the token estimate
	images  bool
	user    bool        // a message of the user has been walked
	name    uint64      // of the conversation, 0 until it has one
	long    longStrings // of the body that is walked
	block   [pick.BlockBytes]byte
	digest  xxhash.Digest
}

// run walks the request whose facts are f and leaves its keys in w.keys.
func (w *walker) run(b []byte, f *facts) {
	w.keys, w.fill, w.total, w.counted, w.images = w.keys[:0], 0, 0, 0, false
	w.long, w.user, w.name = f.long, false, 0
	w.digest.ResetWithSeed(0)
	if f.cacheSalt.present() {
		_, _ = w.digest.Write(f.cacheSalt.of(b))
	}
	w.chain = w.digest.Sum64()
	if f.adapter.present() && !f.adapter.is(b, 'n') {
		w.digest.ResetWithSeed(w.chain)
		_, _ = w.digest.Write(f.adapter.of(b))
		w.chain = w.digest.Sum64()
	}
	if f.tools.is(b, '[') {
		w.mark(markTools)
		w.compact(f.tools.of(b))
	}
	if f.instructions.present() {
		w.mark(markSystem)
		w.value(b, f.instructions)
	}
	switch {
	case f.messages.present():
		w.conversation(b, f.messages)
	case f.prompt.present():
		w.mark(markText)
		w.value(b, f.prompt)
		w.listed(b, f.prompt)
	case f.input.present():
		w.conversation(b, f.input)
	}
}

// mark writes one separator.
func (w *walker) mark(c byte) {
	w.block[w.fill] = c
	w.total++
	if w.fill++; w.fill == pick.BlockBytes {
		w.close(w.block[:])
		w.fill = 0
	}
}

// write adds p to the walk.
func (w *walker) write(p []byte) {
	w.total += len(p)
	w.counted += len(p)
	if w.fill > 0 {
		n := copy(w.block[w.fill:], p)
		p = p[n:]
		if w.fill += n; w.fill < pick.BlockBytes {
			return
		}
		w.close(w.block[:])
		w.fill = 0
	}
	for len(p) >= pick.BlockBytes {
		w.close(p[:pick.BlockBytes])
		p = p[pick.BlockBytes:]
	}
	w.fill = copy(w.block[:], p)
}

// close chains one whole block; a last partial block never becomes a key.
func (w *walker) close(block []byte) {
	if len(w.keys) == maxKeys {
		return
	}
	w.digest.ResetWithSeed(w.chain)
	_, _ = w.digest.Write(block)
	w.chain = w.digest.Sum64()
	w.keys = append(w.keys, w.chain)
}

// compact writes a raw JSON value without the white space between its tokens.
func (w *walker) compact(raw []byte) {
	from := 0
	for i := 0; i < len(raw); {
		switch raw[i] {
		case '"':
			i = skipString(raw, i)
		case ' ', '\n', '\t', '\r':
			w.write(raw[from:i])
			i = skipSpace(raw, i)
			from = i
		default:
			i++
		}
	}
	w.write(raw[from:])
}

// value writes a string's inner bytes as they stand in the body, or any other
// value compacted. What escapes add to a string is no prompt.
func (w *walker) value(b []byte, v span) {
	if b[v.off] == '"' {
		w.write(b[v.off+1 : v.end-1])
		w.counted -= w.long.escapes(b, v)
		return
	}
	w.compact(v.of(b))
}

// listed takes what makes a list of strings one out of the count; a list of
// token ids stays as it was counted.
func (w *walker) listed(b []byte, list span) {
	if !list.is(b, '[') {
		return
	}
	elements(b, list.off, func(at int) int {
		end := w.long.skip(b, at)
		if b[at] == '"' {
			w.counted -= len(`"",`) + w.long.escapes(b, span{at, end})
		}
		return end
	})
	w.counted = max(w.counted-1, 0)
}

// conversation walks an array of messages, or a plain string as one text.
func (w *walker) conversation(b []byte, list span) {
	if !list.is(b, '[') {
		w.mark(markText)
		w.value(b, list)
		return
	}
	elements(b, list.off, func(at int) int {
		w.mark(markMessage)
		if b[at] == '{' {
			end := w.message(b, at)
			if w.user && w.name == 0 {
				w.name = w.soFar()
			}
			return end
		}
		end := w.long.skip(b, at)
		w.value(b, span{at, end})
		return end
	})
}

// soFar is a hash of all that has been walked. Up to the first message of the
// user it is the same in every turn of a conversation, and seldom in two.
func (w *walker) soFar() uint64 {
	w.digest.ResetWithSeed(w.chain)
	_, _ = w.digest.Write(w.block[:w.fill])
	return w.digest.Sum64()
}

// otherMembers is how many members besides role and content are kept while a
// message is walked; a message with more is looked at once more.
const otherMembers = 6

// message writes role, then content, then every other member in its order, and
// gives the offset past the message. Content that stands behind the role, as
// it mostly does, is walked where it stands: a long text is passed over once.
func (w *walker) message(b []byte, at int) int {
	var content span
	var others [otherMembers]struct{ key, value span }
	count, written, roleSeen := 0, false, false
	end := members(b, at, func(key span, i int) int {
		switch string(key.of(b)) {
		case "role":
			end := w.long.skip(b, i)
			w.user = w.user || string(b[i:end]) == `"user"`
			if !written {
				w.value(b, span{i, end})
				roleSeen = true
			}
			return end
		case "content":
			if roleSeen && !written {
				written = true
				w.mark(markContent)
				return w.content(b, i)
			}
			content = span{i, w.long.skip(b, i)}
			return content.end
		}
		end := w.long.skip(b, i)
		if b[i] != 'n' {
			if count < otherMembers {
				others[count].key, others[count].value = key, span{i, end}
			}
			count++
		}
		return end
	})
	if !written {
		w.mark(markContent)
		if content.present() {
			w.content(b, content.off)
		}
	}
	for _, m := range others[:min(count, otherMembers)] {
		w.member(b, m.key, m.value)
	}
	if count > otherMembers {
		seen := 0
		members(b, at, func(key span, i int) int {
			end := w.long.skip(b, i)
			if name := string(key.of(b)); name != "role" && name != "content" && b[i] != 'n' {
				if seen++; seen > otherMembers {
					w.member(b, key, span{i, end})
				}
			}
			return end
		})
	}
	return end
}

func (w *walker) member(b []byte, key, value span) {
	w.mark(markMember)
	w.write(key.of(b))
	w.mark(markContent)
	w.value(b, value)
}

// content writes a string's bytes, or the parts, and gives the offset past it.
func (w *walker) content(b []byte, at int) int {
	if b[at] == '[' {
		first := true
		return elements(b, at, func(i int) int {
			if !first {
				w.mark(markPart)
			}
			first = false
			return w.part(b, i)
		})
	}
	end := w.long.skip(b, at)
	if b[at] != 'n' {
		w.value(b, span{at, end})
	}
	return end
}

// part writes the text of a text part, the URL of an image, or the whole part,
// and gives the offset past it.
func (w *walker) part(b []byte, at int) int {
	if b[at] != '{' {
		end := w.long.skip(b, at)
		w.value(b, span{at, end})
		return end
	}
	var body, image span
	end := members(b, at, func(key span, i int) int {
		v := span{i, w.long.skip(b, i)}
		switch string(key.of(b)) {
		case "text":
			body = v
		case "image_url":
			image = v
		}
		return v.end
	})
	switch {
	case body.is(b, '"'):
		w.value(b, body)
	case image.present():
		w.images = true
		url := image
		if image.is(b, '{') {
			members(b, image.off, func(key span, i int) int {
				v := span{i, w.long.skip(b, i)}
				if string(key.of(b)) == "url" {
					url = v
				}
				return v.end
			})
		}
		before := w.counted
		w.value(b, url)
		w.counted = before + min(w.counted-before, imageTokenBytes)
	default:
		w.compact(b[at:end])
	}
	return end
}

// elements calls each with the offset of every element of the scanned, valid
// array at b[at]; each gives the offset past its element, elements that past
// the array.
func elements(b []byte, at int, each func(i int) int) int {
	i := skipSpace(b, at+1)
	for b[i] != ']' {
		i = skipSpace(b, each(i))
		if b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
	return i + 1
}

// members does for the object at b[at] what elements does for an array.
func members(b []byte, at int, each func(key span, i int) int) int {
	i := skipSpace(b, at+1)
	for b[i] != '}' {
		keyEnd := skipString(b, i)
		key := span{i + 1, keyEnd - 1}
		i = skipSpace(b, skipSpace(b, keyEnd)+1)
		i = skipSpace(b, each(key, i))
		if b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
	return i + 1
}

// eachMember is members for callers that want the values skipped for them.
func eachMember(b []byte, object span, each func(key []byte, v span)) {
	members(b, object.off, func(key span, i int) int {
		v := span{i, skipValue(b, i, 0)}
		each(key.of(b), v)
		return v.end
	})
}
