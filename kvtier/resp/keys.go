package resp

import (
	"bytes"
	"hash/maphash"
)

// keyForm says whose key it is.
type keyForm uint8

const (
	formOther        keyForm = iota
	formMultiprocess         // of LMCache's multiprocess server, which checks each GET
	formInProcess            // of LMCache within the engine
)

// keyInfo is what a client's key says. Its slices are parts of the key.
type keyInfo struct {
	form  keyForm
	model []byte
	rank  []byte // kv_rank in hexadecimal, or the worker's number
	salt  []byte // multiprocess alone
	part  []byte // "kv_bytes" or "metadata" where redis:// glued it behind
	// head and tail are the key without its chunk hash, cache salt and tags:
	// values of one such family have one size.
	head, tail []byte
}

var (
	partBytes    = []byte("kv_bytes")
	partMetadata = []byte("metadata")
)

// maxFields is more than any key of LMCache has before its tags.
const maxFields = 8

// parseKey reads a key of LMCache. Any other key has formOther and nothing else.
func parseKey(key []byte) keyInfo {
	var starts [maxFields + 1]int
	fields := 1
	for at := 0; fields < maxFields; fields++ {
		next := bytes.IndexByte(key[at:], '@')
		if next < 0 {
			break
		}
		at += next + 1
		starts[fields] = at
	}
	field := func(i int) []byte {
		if i+1 < fields {
			return key[starts[i] : starts[i+1]-1]
		}
		if end := bytes.IndexByte(key[starts[i]:], '@'); end >= 0 {
			return key[starts[i] : starts[i]+end]
		}
		return key[starts[i]:]
	}
	// A prefix may stand before the model of the multiprocess form.
	for skip := 0; skip <= 1 && fields >= skip+4; skip++ {
		model, rank, group, hash := field(skip), field(skip+1), field(skip+2), field(skip+3)
		if len(model) == 0 || len(rank) != 8 || !isHex(rank) || len(group) > 8 || !isHex(group) || len(hash) < 16 || !isHex(hash) {
			continue
		}
		switch fields - skip {
		case 4:
		case 5:
			if bytes.IndexByte(key[starts[skip+4]:], '@') >= 0 {
				continue
			}
		default:
			continue
		}
		info := keyInfo{form: formMultiprocess, model: model, rank: rank, head: key[:starts[skip+3]]}
		if fields-skip == 5 {
			info.salt = field(skip + 4)
		}
		return info
	}
	if fields >= 5 {
		return parseInProcess(key, field, starts[:fields])
	}
	return keyInfo{}
}

func parseInProcess(key []byte, field func(int) []byte, starts []int) keyInfo {
	model, world, worker, hash := field(0), field(1), field(2), field(3)
	if len(hash) > 0 && hash[0] == '-' {
		hash = hash[1:]
	}
	if len(model) == 0 || len(world) > 6 || !isDecimal(world) || len(worker) > 6 || !isDecimal(worker) || len(hash) > 128 || !isHex(hash) {
		return keyInfo{}
	}
	info := keyInfo{form: formInProcess, model: model, rank: worker, head: key[:starts[3]]}
	rest := key[starts[4]:]
	switch {
	case bytes.HasSuffix(rest, partBytes):
		info.part = partBytes
	case bytes.HasSuffix(rest, partMetadata):
		info.part = partMetadata
	}
	rest = rest[:len(rest)-len(info.part)]
	// Tags end the key; what is before them, dtype and layer, decides the size.
	if tag := bytes.IndexByte(rest, '%'); tag >= 0 {
		before := bytes.LastIndexByte(rest[:tag], '@')
		if before < 0 {
			return keyInfo{}
		}
		rest = rest[:before]
	}
	if len(rest) == 0 {
		return keyInfo{}
	}
	info.tail = rest
	return info
}

func isHex(text []byte) bool {
	for _, c := range text {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(text) > 0
}

func isDecimal(text []byte) bool {
	for _, c := range text {
		if c < '0' || c > '9' {
			return false
		}
	}
	return len(text) > 0
}

// family names a family of keys by a hash; 0 is none.
type family uint64

var familySeed = maphash.MakeSeed()

func (k *keyInfo) family() family {
	if k.form == formOther {
		return 0
	}
	head, tail := maphash.Bytes(familySeed, k.head), maphash.Bytes(familySeed, k.tail)
	part := uint64(len(k.part)) << 1
	if bytes.Equal(k.part, partMetadata) {
		part++
	}
	// The two hashes are mixed so that head and tail cannot change places.
	mixed := head ^ (tail*0x9e3779b97f4a7c15+part)*0xc2b2ae3d27d4eb4f ^ uint64(k.form)
	return family(mixed | 1)
}
