package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
)

// MaxDepth is the deepest nesting of arrays and objects a request may have.
const MaxDepth = 512

// Scan errors. Malformed bodies carry the byte offset in the wrapped text.
var (
	ErrMalformed      = errors.New("malformed JSON")
	ErrTooDeep        = errors.New("JSON nested too deep")
	ErrNotObject      = errors.New("body is not a JSON object")
	ErrDuplicateModel = errors.New("duplicate member model")
	ErrModelType      = errors.New("model is not a string")
	ErrModelSpelling  = errors.New("a member is model but for upper case, which some engines take for it")
)

// span is a byte range of the body; end 0 means absent.
type span struct{ off, end int }

func (s span) present() bool            { return s.end != 0 }
func (s span) of(b []byte) []byte       { return b[s.off:s.end] }
func (s span) is(b []byte, c byte) bool { return s.present() && b[s.off] == c }

// facts is what one forward scan of a request body finds. Spans are the raw
// JSON values. A member given twice counts with its last value, as in every
// decoder the engines use; model twice is refused, since two readers may differ.
type facts struct {
	open                 int // offset just past the opening brace
	model                span
	stream               bool
	streamOptions        span
	includeUsage         span // value inside stream_options
	continuousUsage      span
	optionsOpen          int // offset just past the brace of stream_options
	optionsEmpty         bool
	wantsUsage           bool
	wantsContinuous      bool
	maxTokens            int
	messages             span
	prompt               span
	input                span
	instructions         span
	tools                span
	cacheSalt            span
	adapter              span // named beside the model, as SGLang and llama.cpp take it
	previousResponse     span
	toolChoice           span
	responseFormat       span
	sawMaxCompletionForm bool
	long                 longStrings
}

// longString is a string of a body, and by how many bytes escapes make it longer
// than the UTF-8 text it stands for.
type longString struct {
	span
	escapes int
}

// longStrings notes where long strings lie, in order, so that a second walk
// over a scanned body steps over them. Past maxLong they are not noted.
type longStrings []longString

const (
	longBytes = 256  // shorter strings are passed over again as fast
	maxLong   = 4096 // 96 KiB of notes
)

func (l *longStrings) note(s longString) {
	n := len(*l)
	// stream_options is looked at twice, hence the order's check.
	if s.end-s.off >= longBytes && n < maxLong && (n == 0 || s.off > (*l)[n-1].off) {
		*l = append(*l, s)
	}
}

// at is the noted string that begins at b[i], nil if there is none.
func (l longStrings) at(i int) *longString {
	if len(l) == 0 {
		return nil
	}
	if at, found := slices.BinarySearchFunc(l, i, func(s longString, i int) int { return s.off - i }); found {
		return &l[at]
	}
	return nil
}

// skip is skipValue for a body that has been scanned.
func (l longStrings) skip(b []byte, i int) int {
	if b[i] != '"' || len(l) == 0 {
		return skipValue(b, i, 0)
	}
	if s := l.at(i); s != nil {
		return s.end
	}
	return skipString(b, i)
}

// escapes is longString.escapes of any string.
func (l longStrings) escapes(b []byte, s span) int {
	if s.end-s.off >= longBytes {
		if noted := l.at(s.off); noted != nil {
			return noted.escapes
		}
	}
	_, n := skipText(b, s.off)
	return n
}

// failure codes of the skip functions: an offset that failed is ^offset.
const tooDeep = -1 << 62

// scan validates body as one JSON value and finds the members the router
// needs. It accepts exactly what encoding/json.Valid accepts, provided the
// value is an object no deeper than MaxDepth: invalid UTF-8 inside strings is
// passed on for the engine to judge. It allocates only on the error path and
// for member names written with escapes.
func scan(body []byte, f *facts) error {
	*f = facts{long: f.long[:0]}
	i := skipSpace(body, 0)
	if i >= len(body) {
		return fmt.Errorf("%w: the body is empty", ErrMalformed)
	}
	if body[i] != '{' {
		end := skipValue(body, i, 0)
		if end < 0 {
			return scanError(end)
		}
		if end = skipSpace(body, end); end != len(body) {
			return scanError(^end)
		}
		return ErrNotObject
	}
	f.open = i + 1
	end, err := f.object(body, i, 1, f.member)
	if err != nil {
		return err
	}
	if end = skipSpace(body, end); end != len(body) {
		return scanError(^end)
	}
	return nil
}

func scanError(code int) error {
	if code == tooDeep {
		return fmt.Errorf("%w: more than %d levels", ErrTooDeep, MaxDepth)
	}
	return fmt.Errorf("%w: unexpected input at byte %d", ErrMalformed, ^code)
}

// object walks the members of the object at b[i], whose own depth is depth.
func (f *facts) object(b []byte, i, depth int, member func(b, key []byte, v span) error) (int, error) {
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		return i + 1, nil
	}
	for {
		if i >= len(b) || b[i] != '"' {
			return 0, scanError(^i)
		}
		keyEnd := skipString(b, i)
		if keyEnd < 0 {
			return 0, scanError(keyEnd)
		}
		key := b[i+1 : keyEnd-1]
		i = skipSpace(b, keyEnd)
		if i >= len(b) || b[i] != ':' {
			return 0, scanError(^i)
		}
		i = skipSpace(b, i+1)
		end := skipNoting(b, i, depth, &f.long)
		if end < 0 {
			return 0, scanError(end)
		}
		if err := member(b, plainKey(key), span{i, end}); err != nil {
			return 0, err
		}
		i = skipSpace(b, end)
		if i >= len(b) {
			return 0, scanError(^i)
		}
		switch b[i] {
		case ',':
			i = skipSpace(b, i+1)
		case '}':
			return i + 1, nil
		default:
			return 0, scanError(^i)
		}
	}
}

// maxKeyBytes is the longest escaped member name that is decoded; no name the
// router looks for comes near it even with every byte as \u00XX.
const maxKeyBytes = 256

// plainKey undoes escapes in a member name, so that "\u006dodel" cannot pass
// for something other than model.
func plainKey(key []byte) []byte {
	for _, c := range key {
		if c == '\\' {
			if len(key) > maxKeyBytes {
				return nil
			}
			return []byte(decodeString(key))
		}
	}
	return key
}

// decodeString undoes the escapes of a scanned string's inner bytes.
func decodeString(inner []byte) string {
	quoted := make([]byte, 0, len(inner)+2)
	quoted = append(append(append(quoted, '"'), inner...), '"')
	var s string
	if json.Unmarshal(quoted, &s) != nil {
		return ""
	}
	return s
}

// text is the value of a string span, "" for anything else.
func text(b []byte, s span) string {
	if !s.is(b, '"') {
		return ""
	}
	inner := b[s.off+1 : s.end-1]
	if bytes.IndexByte(inner, '\\') >= 0 {
		return decodeString(inner)
	}
	return string(inner)
}

func (f *facts) member(b, key []byte, v span) error {
	switch string(key) {
	case "model":
		if f.model.present() {
			return ErrDuplicateModel
		}
		if b[v.off] != '"' {
			return ErrModelType
		}
		f.model = v
	case "stream":
		f.stream = b[v.off] == 't'
	case "stream_options":
		f.streamOptions = v
		f.includeUsage, f.continuousUsage = span{}, span{}
		f.wantsUsage, f.wantsContinuous = false, false
		if b[v.off] != '{' {
			return nil
		}
		f.optionsOpen = v.off + 1
		f.optionsEmpty = true
		_, err := f.object(b, v.off, 2, f.streamOption)
		return err
	case "max_tokens":
		if !f.sawMaxCompletionForm {
			f.maxTokens = count(v.of(b))
		}
	case "max_completion_tokens", "max_output_tokens":
		if n := count(v.of(b)); n > 0 {
			f.sawMaxCompletionForm = true
			f.maxTokens = n
		}
	case "messages":
		f.messages = v
	case "prompt":
		f.prompt = v
	case "input":
		f.input = v
	case "instructions":
		f.instructions = v
	case "tools":
		f.tools = v
	case "cache_salt":
		f.cacheSalt = v
	case "lora_path", "lora":
		f.adapter = v
	case "previous_response_id":
		f.previousResponse = v
	case "tool_choice":
		f.toolChoice = v
	case "response_format":
		f.responseFormat = v
	default:
		if len(key) == len("model") && bytes.EqualFold(key, modelName) {
			return ErrModelSpelling
		}
	}
	return nil
}

var modelName = []byte("model")

func (f *facts) streamOption(b, key []byte, v span) error {
	f.optionsEmpty = false
	switch string(key) {
	case "include_usage":
		f.includeUsage = v
		f.wantsUsage = b[v.off] == 't'
	case "continuous_usage_stats":
		f.continuousUsage = v
		f.wantsContinuous = b[v.off] == 't'
	}
	return nil
}

// count reads a JSON number as a non-negative int; anything else, or more than
// fits, is 0: the engine judges it.
func count(raw []byte) int {
	if len(raw) == 0 || len(raw) > 18 {
		return 0
	}
	if n, err := strconv.Atoi(string(raw)); err == nil {
		return max(n, 0)
	}
	if x, err := strconv.ParseFloat(string(raw), 64); err == nil && x > 0 && x < 1e15 {
		return int(x)
	}
	return 0
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

const (
	ones   = 0x0101010101010101
	highs  = 0x8080808080808080
	slants = '\\' * ones
)

// skipString gives the offset past the string that begins at b[i], or ^offset
// of what is wrong.
func skipString(b []byte, i int) int {
	end, _ := skipText(b, i)
	return end
}

// skipText is skipString that counts what longString.escapes is. It looks at
// eight bytes at a time for a quote, a backslash or a control character; the
// lowest marked byte is always a true one.
func skipText(b []byte, i int) (end, escapes int) {
	i++
	for {
		for i+32 <= len(b) {
			// Four words at a time while nothing stands out.
			p := (*[32]byte)(b[i:])
			m0 := special(binary.LittleEndian.Uint64(p[0:8]))
			m1 := special(binary.LittleEndian.Uint64(p[8:16]))
			m2 := special(binary.LittleEndian.Uint64(p[16:24]))
			m3 := special(binary.LittleEndian.Uint64(p[24:32]))
			if (m0|m1|m2|m3)&highs == 0 {
				i += 32
				continue
			}
			switch {
			case m0&highs != 0:
				i += bits.TrailingZeros64(m0&highs) >> 3
			case m1&highs != 0:
				i += 8 + bits.TrailingZeros64(m1&highs)>>3
			case m2&highs != 0:
				i += 16 + bits.TrailingZeros64(m2&highs)>>3
			default:
				i += 24 + bits.TrailingZeros64(m3&highs)>>3
			}
			break
		}
		for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= ' ' {
			i++
		}
		if i >= len(b) {
			return ^i, 0
		}
		switch b[i] {
		case '"':
			return i + 1, escapes
		case '\\':
			if i++; i >= len(b) {
				return ^i, 0
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i++
				escapes++
			case 'u':
				for range 4 {
					if i++; i >= len(b) || !isHex(b[i]) {
						return ^i, 0
					}
				}
				i++
				escapes += len(`\u0000`) - utf8Bytes(b[i-4:i])
			default:
				return ^i, 0
			}
		default:
			return ^i, 0
		}
	}
}

// utf8Bytes is how many bytes a code point of four hex digits takes. A surrogate
// is half of a pair that takes four.
func utf8Bytes(hex []byte) int {
	switch {
	case string(hex[:2]) == "00" && hex[2] < '8':
		return 1
	case hex[0] == '0' && hex[1] < '8', (hex[0] == 'd' || hex[0] == 'D') && hex[1] >= '8':
		return 2
	}
	return 3
}

// special marks, in its high bits, the bytes of w that end a run of plain text.
// The quote and the control characters are one range once a bit is flipped.
func special(w uint64) uint64 {
	q, s := w^(2*ones), w^slants
	return (q-0x21*ones)&^q | (s-ones)&^s
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func skipNumber(b []byte, i int) int {
	if i < len(b) && b[i] == '-' {
		i++
	}
	digits := func() bool {
		from := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		return i > from
	}
	switch {
	case i < len(b) && b[i] == '0':
		i++
	case !digits():
		return ^i
	}
	if i < len(b) && b[i] == '.' {
		if i++; !digits() {
			return ^i
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if !digits() {
			return ^i
		}
	}
	return i
}

func skipLiteral(b []byte, i int, word string) int {
	if len(b)-i >= len(word) && string(b[i:i+len(word)]) == word {
		return i + len(word)
	}
	return ^i
}

// skipValue gives the offset past the value at b[i], which lies depth levels
// deep, or ^offset of what is wrong, or tooDeep. It keeps one bit per level
// (set: object) and does not recurse.
func skipValue(b []byte, i, depth int) int { return skipNoting(b, i, depth, nil) }

// skipNoting is skipValue that notes long strings, where long is not nil.
func skipNoting(b []byte, i, depth int, long *longStrings) int {
	var object [MaxDepth/64 + 1]uint64
	base := depth
value:
	if i >= len(b) {
		return ^i
	}
	switch b[i] {
	case '"':
		s := longString{span: span{off: i}}
		i, s.escapes = skipText(b, i)
		if s.end = i; long != nil {
			long.note(s)
		}
	case '{', '[':
		if depth++; depth > MaxDepth {
			return tooDeep
		}
		bit := uint64(1) << (depth & 63)
		closer := byte(']')
		if b[i] == '{' {
			closer = '}'
			object[depth>>6] |= bit
		} else {
			object[depth>>6] &^= bit
		}
		i = skipSpace(b, i+1)
		if i < len(b) && b[i] == closer {
			i++
			depth--
			goto after
		}
		if closer == '}' {
			goto key
		}
		goto value
	case 't':
		i = skipLiteral(b, i, "true")
	case 'f':
		i = skipLiteral(b, i, "false")
	case 'n':
		i = skipLiteral(b, i, "null")
	default:
		i = skipNumber(b, i)
	}
	if i < 0 {
		return i
	}
after:
	if depth == base {
		return i
	}
	i = skipSpace(b, i)
	if i >= len(b) {
		return ^i
	}
	if object[depth>>6]>>(depth&63)&1 == 1 {
		switch b[i] {
		case ',':
			i = skipSpace(b, i+1)
			goto key
		case '}':
			i++
			depth--
			goto after
		}
		return ^i
	}
	switch b[i] {
	case ',':
		i = skipSpace(b, i+1)
		goto value
	case ']':
		i++
		depth--
		goto after
	}
	return ^i
key:
	if i >= len(b) || b[i] != '"' {
		return ^i
	}
	if i = skipString(b, i); i < 0 {
		return i
	}
	i = skipSpace(b, i)
	if i >= len(b) || b[i] != ':' {
		return ^i
	}
	i = skipSpace(b, i+1)
	goto value
}
