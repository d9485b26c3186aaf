package kvload

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"
)

// Sizes of what kvtier's FORMAT.md says of a segment, in bytes.
const (
	trailerBytes = 64
	entryBytes   = 96
	headerBytes  = 64
)

// Sealed is a value in a segment that has its footer.
type Sealed struct {
	Key         int
	Path        string
	Incarnation uint64 // of the segment
}

// Reused says whether the segment is another by now.
func (s Sealed) Reused() bool {
	f, err := os.Open(s.Path)
	if err != nil {
		return true
	}
	defer func() { _ = f.Close() }()
	var head [headerBytes]byte
	_, err = f.ReadAt(head[:], 0)
	return err != nil || binary.LittleEndian.Uint64(head[40:]) != s.Incarnation
}

// Sealed lists the keys whose value of now, as far as that is known, lies in a
// segment of the tenant that has its footer: these outlive whatever happens to the
// agent. dir is the KV space's. It reads the files by itself.
func (t *Tenant) Sealed(dir string) ([]Sealed, error) {
	folder := sha256.Sum256([]byte("credential\x00" + t.Name))
	paths, err := filepath.Glob(filepath.Join(dir, "blocks", hex.EncodeToString(folder[:16]), "*.seg"))
	if err != nil {
		return nil, err
	}
	there := map[[48]byte]Sealed{} // by hash and checksum
	for _, path := range paths {
		if err := readSealed(path, there); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
	}
	var list []Sealed
	for key := range t.Keys {
		version := t.Oracle.sure(key)
		if version <= 0 {
			continue
		}
		hash, sum := sha256.Sum256([]byte(Name(key))), xxh3.Hash128(Value(key, version)).Bytes()
		if found, ok := there[[48]byte(append(hash[:], sum[:]...))]; ok {
			found.Key = key
			list = append(list, found)
		}
	}
	return list, nil
}

// readSealed adds the blocks of a segment, none where it has no footer of its
// incarnation.
func readSealed(path string, there map[[48]byte]Sealed) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	if len(data) < headerBytes+trailerBytes || !bytes.Equal(data[:8], []byte("HRTHKVS1")) || xxh3.Hash(data[:56]) != le.Uint64(data[56:]) {
		return nil
	}
	end := data[len(data)-trailerBytes:]
	count, from := uint64(le.Uint32(end[4:])), le.Uint64(end[16:])
	if !bytes.Equal(end[:4], []byte("KVF1")) || xxh3.Hash(end[:56]) != le.Uint64(end[56:]) || le.Uint64(end[8:]) != le.Uint64(data[40:]) ||
		from+count*entryBytes > uint64(len(data)) {
		return nil
	}
	for entry := data[from:]; count > 0; count-- {
		if entry[4] == 1 && le.Uint32(entry[64:]) == 0 {
			var k [48]byte
			copy(k[:32], entry[32:64])
			copy(k[32:], entry[72:88])
			there[k] = Sealed{Path: path, Incarnation: le.Uint64(data[40:])}
		}
		entry = entry[entryBytes:]
	}
	return nil
}
