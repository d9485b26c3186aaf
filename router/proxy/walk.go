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
	block   [pick.BlockBytes]byte
	digest  xxhash.Digest
}

// run walks the request whose facts are f and leaves its keys in w.keys.
func (w *walker) run(b []byte, f *facts) {
	w.keys, w.fill, w.total, w.counted, w.images = w.keys[:0], 0, 0, 0, false
	w.digest.ResetWithSeed(0)
	if f.cacheSalt.present() {
		_, _ = w.digest.Write(f.cacheSalt.of(b))
	}
	w.chain = w.digest.Sum64()
	if f.tools.is(b, '[') {
		w.mark(markTools)
		w.compact(f.tools.of(b))
	}
	if f.instructions.present() {
		w.mark(markSystem)
		w.value(f.instructions.of(b))
	}
	switch {
	case f.messages.present():
		w.conversation(b, f.messages)
	case f.prompt.present():
		w.mark(markText)
		w.value(f.prompt.of(b))
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
// value compacted.
func (w *walker) value(raw []byte) {
	if raw[0] == '"' {
		w.write(raw[1 : len(raw)-1])
		return
	}
	w.compact(raw)
}

// conversation walks an array of messages, or a plain string as one text.
func (w *walker) conversation(b []byte, list span) {
	if !list.is(b, '[') {
		w.mark(markText)
		w.value(list.of(b))
		return
	}
	elements(b, list, func(v span) {
		w.mark(markMessage)
		if !v.is(b, '{') {
			w.value(v.of(b))
			return
		}
		w.message(b, v)
	})
}

// message writes role, then content, then every other member in its order.
func (w *walker) message(b []byte, v span) {
	var role, content span
	others := false
	members(b, v, func(key []byte, m span) {
		switch string(key) {
		case "role":
			role = m
		case "content":
			content = m
		default:
			others = true
		}
	})
	if role.present() {
		w.value(role.of(b))
	}
	w.mark(markContent)
	switch {
	case content.is(b, '['):
		first := true
		elements(b, content, func(part span) {
			if !first {
				w.mark(markPart)
			}
			first = false
			w.part(b, part)
		})
	case content.present() && b[content.off] != 'n':
		w.value(content.of(b))
	}
	if !others {
		return
	}
	members(b, v, func(key []byte, m span) {
		if string(key) == "role" || string(key) == "content" || b[m.off] == 'n' {
			return
		}
		w.mark(markMember)
		w.write(key)
		w.mark(markContent)
		w.value(m.of(b))
	})
}

// part writes the text of a text part, the URL of an image, or the whole part.
func (w *walker) part(b []byte, v span) {
	if !v.is(b, '{') {
		w.value(v.of(b))
		return
	}
	var body, image span
	members(b, v, func(key []byte, m span) {
		switch string(key) {
		case "text":
			body = m
		case "image_url":
			image = m
		}
	})
	switch {
	case body.is(b, '"'):
		w.value(body.of(b))
	case image.present():
		w.images = true
		url := image
		if image.is(b, '{') {
			members(b, image, func(key []byte, m span) {
				if string(key) == "url" {
					url = m
				}
			})
		}
		before := w.counted
		w.value(url.of(b))
		w.counted = before + min(w.counted-before, imageTokenBytes)
	default:
		w.compact(v.of(b))
	}
}

// elements calls each for the elements of a scanned, valid array.
func elements(b []byte, list span, each func(span)) {
	i := skipSpace(b, list.off+1)
	for b[i] != ']' {
		end := skipValue(b, i, 0)
		each(span{i, end})
		i = skipSpace(b, end)
		if b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
}

// members calls each for the members of a scanned, valid object.
func members(b []byte, object span, each func(key []byte, v span)) {
	i := skipSpace(b, object.off+1)
	for b[i] != '}' {
		keyEnd := skipString(b, i)
		key := b[i+1 : keyEnd-1]
		i = skipSpace(b, skipSpace(b, keyEnd)+1)
		end := skipValue(b, i, 0)
		each(key, span{i, end})
		i = skipSpace(b, end)
		if b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
}
