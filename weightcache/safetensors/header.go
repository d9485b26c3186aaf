// Package safetensors reads the header of a safetensors file and a sharded
// checkpoint's index, and judges them as the safetensors library 0.8.0 does:
// what this package refuses, engines refuse to load. The weight cache calls it
// before an artifact becomes Ready. It never reads tensor data.
package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"
)

// MaxHeaderBytes is the library's limit on the JSON header's length.
const MaxHeaderBytes = 100_000_000

// Classes of refusal. Every error of ReadHeader wraps exactly one.
var (
	ErrHeaderTooSmall  = errors.New("file is shorter than the header's length field")
	ErrHeaderTooLarge  = errors.New("header is longer than 100,000,000 bytes")
	ErrHeaderBeyond    = errors.New("header reaches beyond the file")
	ErrHeaderUTF8      = errors.New("header is not UTF-8")
	ErrHeaderJSON      = errors.New("header is not the JSON the format wants")
	ErrTensorSize      = errors.New("a tensor's shape and byte range differ")
	ErrNotContiguous   = errors.New("tensors leave a hole, overlap or run backwards")
	ErrFileSize        = errors.New("file is not as long as the header says")
	ErrSizeOverflow    = errors.New("a tensor's size overflows")
	ErrSubByteAlign    = errors.New("a tensor of a sub-byte type does not fill whole bytes")
	errUnexpectedToken = errors.New("unexpected token")
)

// Tensor is one entry of the header.
type Tensor struct {
	DType      string
	Shape      []uint64
	Begin, End uint64 // bytes, relative to the end of the header
}

// Header is a file's table of contents.
type Header struct {
	Tensors map[string]Tensor
	// DataOffset is where tensor data begins, in bytes from the file's start.
	DataOffset int64
}

// bitsOf gives the bits of one element of each type the library knows.
var bitsOf = map[string]uint64{
	"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
	"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
	"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

// ReadHeader reads and checks the header of a file of size bytes. As in the
// library, a tensor named twice means its last entry, and leading and trailing
// white space is allowed. The header is decoded as a stream, so padding costs
// no memory.
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	if size < 8 {
		return nil, fmt.Errorf("read safetensors header: %w: %d bytes", ErrHeaderTooSmall, size)
	}
	var prefix [8]byte
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return nil, fmt.Errorf("read safetensors header: %w", err)
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n > MaxHeaderBytes {
		return nil, fmt.Errorf("read safetensors header: %w: %d", ErrHeaderTooLarge, n)
	}
	if int64(n) > size-8 {
		return nil, fmt.Errorf("read safetensors header: %w: %d bytes in a file of %d", ErrHeaderBeyond, n, size)
	}
	tensors, err := parse(io.NewSectionReader(r, 8, int64(n)))
	if err != nil {
		return nil, fmt.Errorf("read safetensors header: %w", err)
	}
	end, err := checkLayout(tensors)
	if err != nil {
		return nil, fmt.Errorf("read safetensors header: %w", err)
	}
	if have := uint64(size) - 8 - n; have != end {
		return nil, fmt.Errorf("read safetensors header: %w: %d bytes of data, want %d", ErrFileSize, have, end)
	}
	return &Header{Tensors: tensors, DataOffset: 8 + int64(n)}, nil
}

// checkLayout checks that the tensors cover one run of bytes from 0 without
// hole or overlap, and gives its length.
func checkLayout(tensors map[string]Tensor) (uint64, error) {
	names := make([]string, 0, len(tensors))
	for name := range tensors {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(tensors[a].Begin, tensors[b].Begin), cmp.Compare(tensors[a].End, tensors[b].End), cmp.Compare(a, b))
	})
	var at uint64
	for _, name := range names {
		t := tensors[name]
		if t.Begin != at || t.End < t.Begin {
			return 0, fmt.Errorf("%w: tensor %.80q at [%d, %d), want it at %d", ErrNotContiguous, name, t.Begin, t.End, at)
		}
		at = t.End
		count := uint64(1)
		for _, d := range t.Shape {
			over, product := bits.Mul64(count, d)
			if over != 0 {
				return 0, fmt.Errorf("%w: tensor %.80q", ErrSizeOverflow, name)
			}
			count = product
		}
		over, total := bits.Mul64(count, bitsOf[t.DType])
		if over != 0 {
			return 0, fmt.Errorf("%w: tensor %.80q", ErrSizeOverflow, name)
		}
		if total%8 != 0 {
			return 0, fmt.Errorf("%w: tensor %.80q", ErrSubByteAlign, name)
		}
		if total/8 != t.End-t.Begin {
			return 0, fmt.Errorf("%w: tensor %.80q has shape for %d bytes and a range of %d", ErrTensorSize, name, total/8, t.End-t.Begin)
		}
	}
	return at, nil
}

// parse decodes the header's JSON token by token.
func parse(r io.Reader) (map[string]Tensor, error) {
	text := &utf8Reader{r: r}
	d := json.NewDecoder(text)
	d.UseNumber()
	tensors, err := parseObject(d)
	if err == nil {
		var extra json.Token
		if extra, err = d.Token(); err == nil {
			err = fmt.Errorf("%w after the header: %v", errUnexpectedToken, extra)
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	switch {
	case text.bad:
		return nil, ErrHeaderUTF8
	case text.err != nil:
		return nil, text.err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrHeaderJSON, err)
	}
	return tensors, nil
}

func parseObject(d *json.Decoder) (map[string]Tensor, error) {
	tensors := map[string]Tensor{}
	metadata := false
	err := eachField(d, func(name string) error {
		if name != "__metadata__" {
			t, err := parseTensor(d)
			tensors[name] = t
			return err
		}
		if metadata {
			return errors.New("__metadata__ is there twice")
		}
		metadata = true
		var values map[string]*string
		if err := d.Decode(&values); err != nil {
			return err
		}
		for key, value := range values {
			if value == nil {
				return fmt.Errorf("__metadata__ %.80q is no string", key)
			}
		}
		return nil
	})
	return tensors, err
}

// eachField reads one object and calls value at each of its values.
func eachField(d *json.Decoder, value func(name string) error) error {
	open, err := d.Token()
	if err != nil {
		return err
	}
	if open != json.Delim('{') {
		return fmt.Errorf("%w %v, want an object", errUnexpectedToken, open)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		name, ok := key.(string)
		if !ok {
			return fmt.Errorf("%w %v, want a name", errUnexpectedToken, key)
		}
		if err := value(name); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}

func parseTensor(d *json.Decoder) (Tensor, error) {
	var t Tensor
	seen := map[string]bool{}
	err := eachField(d, func(name string) error {
		switch name {
		case "dtype", "shape", "data_offsets":
			if seen[name] {
				return fmt.Errorf("field %s is there twice", name)
			}
			seen[name] = true
		}
		switch name {
		case "dtype":
			token, err := d.Token()
			if err != nil {
				return err
			}
			t.DType, _ = token.(string)
			if bitsOf[t.DType] == 0 {
				return fmt.Errorf("unknown dtype %.40v", token)
			}
			return nil
		case "shape":
			var err error
			t.Shape, err = parseNumbers(d)
			return err
		case "data_offsets":
			offsets, err := parseNumbers(d)
			if err != nil {
				return err
			}
			if len(offsets) != 2 {
				return fmt.Errorf("%d data_offsets, want 2", len(offsets))
			}
			t.Begin, t.End = offsets[0], offsets[1]
			return nil
		}
		return skipValue(d)
	})
	if err == nil && len(seen) != 3 {
		err = errors.New("a tensor lacks dtype, shape or data_offsets")
	}
	return t, err
}

// maxIgnoredDepth is how deep a value may nest that nobody reads: the library
// follows 127 levels, of which the header and the tensor are two.
const maxIgnoredDepth = 125

// skipValue reads over one value of any type, with the library's limits on
// nesting and on the size of numbers.
func skipValue(d *json.Decoder) error {
	depth := 0
	for {
		token, err := d.Token()
		if err != nil {
			return err
		}
		if n, ok := token.(json.Number); ok {
			if _, err := n.Float64(); err != nil {
				return fmt.Errorf("a number is out of range: %.40s", n)
			}
		}
		switch token {
		case json.Delim('['), json.Delim('{'):
			depth++
		case json.Delim(']'), json.Delim('}'):
			depth--
		}
		if depth > maxIgnoredDepth {
			return fmt.Errorf("a value nests deeper than %d levels", maxIgnoredDepth)
		}
		if depth == 0 {
			return nil
		}
	}
}

// parseNumbers reads an array of non-negative integers.
func parseNumbers(d *json.Decoder) ([]uint64, error) {
	open, err := d.Token()
	if err != nil {
		return nil, err
	}
	if open != json.Delim('[') {
		return nil, fmt.Errorf("%w %.40v, want an array", errUnexpectedToken, open)
	}
	numbers := []uint64{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		number, ok := token.(json.Number)
		if !ok {
			return nil, fmt.Errorf("%w %.40v, want a number", errUnexpectedToken, token)
		}
		n, err := strconv.ParseUint(number.String(), 10, 64)
		if err != nil {
			return nil, err
		}
		numbers = append(numbers, n)
	}
	_, err = d.Token()
	return numbers, err
}

// utf8Reader passes bytes on and notes whether they are UTF-8, which the JSON
// decoder would mend silently.
type utf8Reader struct {
	r    io.Reader
	tail []byte // the beginning of a rune
	bad  bool
	err  error // of r, other than io.EOF
}

func (u *utf8Reader) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	text := p[:n]
	for len(u.tail) > 0 && len(text) > 0 {
		u.tail = append(u.tail, text[0])
		text = text[1:]
		if utf8.FullRune(u.tail) {
			if r, size := utf8.DecodeRune(u.tail); r == utf8.RuneError && size < 2 {
				u.bad = true
			}
			u.tail = nil
		}
	}
	for cut := 1; cut < utf8.UTFMax && cut <= len(text); cut++ {
		if last := text[len(text)-cut:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				u.tail = bytes.Clone(last)
				text = text[:len(text)-cut]
			}
			break
		}
	}
	if !utf8.Valid(text) {
		u.bad = true
	}
	if errors.Is(err, io.EOF) {
		u.bad = u.bad || len(u.tail) > 0
	} else if err != nil {
		u.err = err
	}
	if u.bad {
		return 0, ErrHeaderUTF8
	}
	return n, err
}
