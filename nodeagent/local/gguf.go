package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// The layout read here is that of GGUF version 2 and 3: "GGUF", version,
// number of tensors, number of keys, then each key with its type and value,
// little-endian (ggml's docs/gguf.md).
const (
	ggufMagic     = "GGUF"
	ggufKey       = "general.file_type"
	ggufMaxKeys   = 1 << 16
	ggufMaxText   = 1 << 16 // bytes of a key
	ggufUint32    = 4
	ggufString    = 8
	ggufArray     = 9
	ggufLastKnown = 12
)

// ggufWidths are the bytes of a value by its type; 0 where they vary.
var ggufWidths = [ggufLastKnown + 1]int64{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

// readGGUF reads as far as the file type. What ends before it (the reader is
// bounded) has none.
func readGGUF(r io.Reader) (string, error) {
	var head struct {
		Magic   [4]byte
		Version uint32
		Tensors uint64
		Keys    uint64
	}
	if err := binary.Read(r, binary.LittleEndian, &head); err != nil {
		return "", fmt.Errorf("%w: %w", errGGUF, err)
	}
	if string(head.Magic[:]) != ggufMagic || head.Version < 2 || head.Version > 3 || head.Keys > ggufMaxKeys {
		return "", errGGUF
	}
	for range head.Keys {
		key, kind, err := ggufNext(r)
		if err == nil && key == ggufKey && kind == ggufUint32 {
			var value uint32
			err = binary.Read(r, binary.LittleEndian, &value)
			if err == nil {
				return ggufTypes[value], nil
			}
		}
		if err == nil {
			err = ggufSkip(r, kind, 0)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
	}
	return "", nil
}

// ggufNext reads a key and the type of its value.
func ggufNext(r io.Reader) (key string, kind uint32, err error) {
	var size uint64
	if err := binary.Read(r, binary.LittleEndian, &size); err != nil {
		return "", 0, err
	}
	if size > ggufMaxText {
		return "", 0, fmt.Errorf("%w: a key of %d bytes", errGGUF, size)
	}
	text := make([]byte, size)
	if _, err := io.ReadFull(r, text); err != nil {
		return "", 0, err
	}
	err = binary.Read(r, binary.LittleEndian, &kind)
	return string(text), kind, err
}

// ggufSkip passes over a value. The reader's bound is that of all it may pass.
func ggufSkip(r io.Reader, kind uint32, depth int) error {
	var size uint64
	switch {
	case kind > ggufLastKnown || depth > 4:
		return fmt.Errorf("%w: a value of type %d", errGGUF, kind)
	case kind == ggufString:
		if err := binary.Read(r, binary.LittleEndian, &size); err != nil {
			return err
		}
	case kind == ggufArray:
		return ggufSkipArray(r, depth)
	default:
		size = uint64(ggufWidths[kind])
	}
	return pass(r, size)
}

func ggufSkipArray(r io.Reader, depth int) error {
	var kind uint32
	var count uint64
	if err := errors.Join(binary.Read(r, binary.LittleEndian, &kind), binary.Read(r, binary.LittleEndian, &count)); err != nil {
		return err
	}
	if kind <= ggufLastKnown && ggufWidths[kind] > 0 {
		if count > maxHeaderBytes {
			return io.EOF
		}
		return pass(r, count*uint64(ggufWidths[kind]))
	}
	for range count {
		if err := ggufSkip(r, kind, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func pass(r io.Reader, n uint64) error {
	if n > maxHeaderBytes {
		return io.EOF // beyond what is read
	}
	_, err := io.CopyN(io.Discard, r, int64(n))
	return err
}
