package wire

// maxLineBytes bounds a chunk's size line with its extensions.
const maxLineBytes = 4 << 10

// maxTrailerBytes bounds what may follow the last chunk.
const maxTrailerBytes = 64 << 10

// States of a chunked body's decoder.
const (
	chunkSize    = iota // at the first digit of a size
	chunkDigits         // within the size
	chunkPad            // within the blanks behind a size
	chunkExt            // within an extension, before the line's CR
	chunkSizeLF         // the size line's LF is due
	chunkData           // within the payload
	chunkDataCR         // the CR behind a payload is due
	chunkDataLF         // the LF behind a payload is due
	trailerStart        // at the first byte of a trailer line
	trailerLine         // within a trailer line
	trailerLF           // the LF that ends the trailers is due
	chunkEnd            // past the end
)

// chunks decodes a chunked body that comes in pieces split anywhere. It keeps
// no bytes. Extensions and trailers are passed over.
type chunks struct {
	state int
	left  int64 // of the payload
	line  int   // bytes of the current line, or of all trailers
}

// maxChunk keeps a size from overflowing; no payload is near it.
const maxChunk = 1 << 56

// decode moves the payload bytes of p to its front. It gives their number and
// how many bytes of p it has used: all of them, unless the body ended.
func (d *chunks) decode(p []byte) (payload, used int, err error) {
	i := 0
	for i < len(p) && d.state != chunkEnd {
		c := p[i]
		switch d.state {
		case chunkData:
			n := int(min(d.left, int64(len(p)-i)))
			if payload != i {
				copy(p[payload:], p[i:i+n])
			}
			payload += n
			i += n
			if d.left -= int64(n); d.left == 0 {
				d.state = chunkDataCR
			}
			continue
		case chunkSize, chunkDigits:
			if v := hexValue(c); v >= 0 {
				if d.state == chunkSize {
					d.state, d.left, d.line = chunkDigits, 0, 0
				}
				if d.left >= maxChunk>>4 {
					return payload, i, malformed("chunk size too large")
				}
				d.left = d.left<<4 | int64(v)
				break
			}
			switch {
			case d.state == chunkSize:
				return payload, i, malformed("no chunk size at %q", c)
			case c == '\r':
				d.state = chunkSizeLF
			case c == ';':
				d.state = chunkExt
			case c == ' ' || c == '\t':
				d.state = chunkPad
			default:
				return payload, i, malformed("chunk size with %q", c)
			}
		case chunkPad:
			switch c {
			case '\r':
				d.state = chunkSizeLF
			case ';':
				d.state = chunkExt
			case ' ', '\t':
			default:
				return payload, i, malformed("chunk size with %q", c)
			}
		case chunkExt:
			if c == '\r' {
				d.state = chunkSizeLF
			} else if c < ' ' && c != '\t' {
				return payload, i, malformed("chunk extension with %q", c)
			}
		case chunkSizeLF:
			if c != '\n' {
				return payload, i, malformed("chunk size without line end")
			}
			d.state, d.line = chunkData, 0
			if d.left == 0 {
				d.state = trailerStart
			}
		case chunkDataCR:
			if c != '\r' {
				return payload, i, malformed("chunk longer than its size")
			}
			d.state = chunkDataLF
		case chunkDataLF:
			if c != '\n' {
				return payload, i, malformed("chunk without line end")
			}
			d.state = chunkSize
		case trailerStart:
			d.state = trailerLine
			if c == '\r' {
				d.state = trailerLF
			}
		case trailerLine:
			if c == '\n' {
				d.state = trailerStart
			}
		case trailerLF:
			if c != '\n' {
				return payload, i, malformed("trailers without line end")
			}
			d.state = chunkEnd
		}
		i++
		if d.line++; d.state < chunkData && d.line > maxLineBytes || d.line > maxTrailerBytes {
			return payload, i, malformed("chunk framing too long")
		}
	}
	return payload, i, nil
}

func hexValue(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}
