package peer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// Version is the version of the protocol, see PROTOCOL.md. Older ones are spoken
// with those who know no newer.
const Version = 2

// lowest is the oldest version that is spoken.
const lowest = 1

// ErrProtocol is wrapped by errors about bytes that are not of the protocol.
var ErrProtocol = errors.New("not the protocol of KV peers")

const magic = "HRTHKVP1"

// Lengths in bytes.
const (
	helloSize   = 24
	requestSize = 32
	entrySize   = 40
	hasSize     = 16
	blockSize   = 72
	parentSize  = 48
)

// withParents is the version from which on blocks are told with their parents.
const withParents = 2

// MaxKeys bounds the entries of a request.
const MaxKeys = 512

// kind is what a frame is.
type kind uint8

const (
	kindHas    kind = 1
	kindGet    kind = 2
	kindSizes  kind = 129
	kindBlock  kind = 130
	kindAbsent kind = 131
	kindChild  kind = 132 // a block, whose parent follows the header
)

var order = binary.LittleEndian

// hello opens a connection: the versions that a side speaks.
type hello struct{ lowest, highest uint16 }

func (h hello) append(to []byte) []byte {
	at := len(to)
	to = append(to, magic...)
	to = order.AppendUint16(to, h.lowest)
	to = order.AppendUint16(to, h.highest)
	to = append(to, 0, 0, 0, 0)
	return order.AppendUint64(to, xxh3.Hash(to[at:]))
}

// parseHello reads helloSize bytes.
func parseHello(data []byte) (h hello, err error) {
	if string(data[:8]) != magic || order.Uint32(data[12:]) != 0 || order.Uint64(data[16:]) != xxh3.Hash(data[:16]) {
		return h, fmt.Errorf("%w: the hello is not right", ErrProtocol)
	}
	return hello{order.Uint16(data[8:]), order.Uint16(data[10:])}, nil
}

// common is the version that both sides speak, 0 for none.
func (h hello) common() uint16 {
	version := min(h.highest, Version)
	if version < lowest || version < h.lowest {
		return 0
	}
	return version
}

// entry is a block that is asked for: size is 0 where it is not known.
type entry struct {
	key  block.Key
	size uint32
}

// request asks for blocks of a namespace.
type request struct {
	kind    kind
	number  uint32
	space   block.Namespace
	entries []entry
}

func (r request) keys() []block.Key {
	keys := make([]block.Key, len(r.entries))
	for i, e := range r.entries {
		keys[i] = e.key
	}
	return keys
}

func (r request) append(to []byte) []byte {
	at := len(to)
	to = append(to, byte(r.kind), 0)
	to = order.AppendUint16(to, uint16(len(r.entries)))
	to = order.AppendUint32(to, r.number)
	to = append(to, r.space[:]...)
	to = append(to, 0, 0, 0, 0, 0, 0, 0, 0)
	for _, e := range r.entries {
		to = append(to, e.key.Hash[:]...)
		to = order.AppendUint32(to, e.key.Group)
		to = order.AppendUint32(to, e.size)
	}
	order.PutUint64(to[at+24:], summed(to[at:at+24], to[at+requestSize:]))
	return to
}

// entriesOf is the number of entries that follow the header of a request.
func entriesOf(header []byte) (int, error) {
	n := int(order.Uint16(header[2:]))
	known := kind(header[0]) == kindHas || kind(header[0]) == kindGet
	if !known || header[1] != 0 || n == 0 || n > MaxKeys {
		return 0, fmt.Errorf("%w: a request of kind %d with %d entries", ErrProtocol, header[0], n)
	}
	return n, nil
}

// parseRequest reads a request of entriesOf entries, into those given.
func parseRequest(data []byte, entries []entry) (r request, err error) {
	n, err := entriesOf(data)
	if err != nil {
		return r, err
	}
	if len(data) != requestSize+n*entrySize || order.Uint64(data[24:]) != summed(data[:24], data[requestSize:]) {
		return r, fmt.Errorf("%w: a request has another checksum", ErrProtocol)
	}
	r = request{kind: kind(data[0]), number: order.Uint32(data[4:]), space: block.Namespace(data[8:24]), entries: entries[:0]}
	for at := requestSize; at < len(data); at += entrySize {
		e := entry{block.Key{Hash: block.Hash(data[at : at+32]), Group: order.Uint32(data[at+32:])}, order.Uint32(data[at+36:])}
		if (r.kind == kindGet) != (e.size > 0) || e.size > block.MaxSize {
			return r, fmt.Errorf("%w: a block of %d bytes is asked for", ErrProtocol, e.size)
		}
		r.entries = append(r.entries, e)
	}
	return r, nil
}

// appendSizes answers a has.
func appendSizes(to []byte, number uint32, sizes []int) []byte {
	at := len(to)
	to = append(to, byte(kindSizes), 0)
	to = order.AppendUint16(to, uint16(len(sizes)))
	to = order.AppendUint32(to, number)
	to = append(to, 0, 0, 0, 0, 0, 0, 0, 0)
	for _, size := range sizes {
		to = order.AppendUint32(to, uint32(size))
	}
	order.PutUint64(to[at+8:], summed(to[at:at+8], to[at+hasSize:]))
	return to
}

// parseSizes reads the answer to a has of that number with len(sizes) entries.
func parseSizes(data []byte, number uint32, sizes []int) error {
	if len(data) != hasSize+4*len(sizes) || kind(data[0]) != kindSizes || data[1] != 0 || int(order.Uint16(data[2:])) != len(sizes) ||
		order.Uint32(data[4:]) != number || order.Uint64(data[8:]) != summed(data[:8], data[hasSize:]) {
		return fmt.Errorf("%w: another answer than one to request %d about %d blocks", ErrProtocol, number, len(sizes))
	}
	for i := range sizes {
		size := order.Uint32(data[hasSize+4*i:])
		if size > block.MaxSize {
			return fmt.Errorf("%w: a block of %d bytes is told", ErrProtocol, size)
		}
		sizes[i] = int(size)
	}
	return nil
}

// head goes before a block's bytes, or stands for one that is absent.
type head struct {
	kind   kind
	place  uint16
	number uint32
	key    block.Key
	size   uint32
	sum    [16]byte
}

func (h head) append(to []byte) []byte {
	at := len(to)
	to = append(to, byte(h.kind), 0)
	to = order.AppendUint16(to, h.place)
	to = order.AppendUint32(to, h.number)
	to = append(to, h.key.Hash[:]...)
	to = order.AppendUint32(to, h.key.Group)
	to = order.AppendUint32(to, h.size)
	to = append(to, h.sum[:]...)
	return order.AppendUint64(to, xxh3.Hash(to[at:]))
}

// parseHead reads blockSize bytes.
func parseHead(data []byte) (h head, err error) {
	if order.Uint64(data[64:]) != xxh3.Hash(data[:64]) || data[1] != 0 {
		return h, fmt.Errorf("%w: the header of a block has another checksum", ErrProtocol)
	}
	h = head{
		kind: kind(data[0]), place: order.Uint16(data[2:]), number: order.Uint32(data[4:]),
		key:  block.Key{Hash: block.Hash(data[8:40]), Group: order.Uint32(data[40:])},
		size: order.Uint32(data[44:]), sum: [16]byte(data[48:64]),
	}
	switch {
	case (h.kind == kindBlock || h.kind == kindChild) && h.size >= block.MinSize && h.size <= block.MaxSize:
	case h.kind == kindAbsent && h.size == 0 && h.sum == [16]byte{}:
	default:
		return h, fmt.Errorf("%w: an answer of kind %d with %d bytes", ErrProtocol, h.kind, h.size)
	}
	return h, nil
}

// appendParent is what follows the header of a block of kindChild.
func appendParent(to []byte, parent block.Key) []byte {
	at := len(to)
	to = append(to, parent.Hash[:]...)
	to = order.AppendUint32(to, parent.Group)
	to = append(to, 0, 0, 0, 0)
	return order.AppendUint64(to, xxh3.Hash(to[at:]))
}

// parseParent reads parentSize bytes.
func parseParent(data []byte) (block.Key, error) {
	if order.Uint64(data[40:]) != xxh3.Hash(data[:40]) || order.Uint32(data[36:]) != 0 {
		return block.Key{}, fmt.Errorf("%w: the parent of a block has another checksum", ErrProtocol)
	}
	return block.Key{Hash: block.Hash(data[:32]), Group: order.Uint32(data[32:])}, nil
}

// answers says whether the header is the answer to an entry.
func (h head) answers(number uint32, place int, e entry) bool {
	return h.number == number && int(h.place) == place && h.key == e.key && (h.kind == kindAbsent || h.size == e.size)
}

// summed is the XXH3-64 of two pieces that follow each other.
func summed(a, b []byte) uint64 {
	hash := xxh3.New()
	_, _ = hash.Write(a)
	_, _ = hash.Write(b)
	return hash.Sum64()
}
