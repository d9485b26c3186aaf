// Package block names blocks of KV: a fixed run of tokens' keys and values. The
// KV tier, its clients' protocols and the report use it; it keeps nothing and
// does no I/O.
package block

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
)

// Sizes of a block, in bytes.
const (
	MinSize = 1
	MaxSize = 64 << 20
)

// ErrInvalid is wrapped by errors about names that cannot be.
var ErrInvalid = errors.New("invalid block name")

// Hash names the content of a block's tokens and of all before them: 32 bytes,
// as the engine's chain of hashes gives it, or the SHA-256 of a client's key.
type Hash [32]byte

// String is the hash in hexadecimal.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// HashOf is the hash of a client's key that is no hash itself.
func HashOf(key []byte) Hash { return sha256.Sum256(key) }

// ParseHash reads 64 hexadecimal digits.
func ParseHash(text string) (h Hash, err error) {
	if len(text) != 2*len(h) {
		return h, fmt.Errorf("%w: a hash has %d hexadecimal digits, not %d", ErrInvalid, 2*len(h), len(text))
	}
	if _, err := hex.Decode(h[:], []byte(text)); err != nil {
		return Hash{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return h, nil
}

// Key names a block within a namespace.
type Key struct {
	Hash  Hash
	Group uint32 // of layers that share a block table; 0 where there is one
}

// String is the hash, and the group behind a colon where it is not 0.
func (k Key) String() string {
	if k.Group == 0 {
		return k.Hash.String()
	}
	return fmt.Sprintf("%s:%d", k.Hash, k.Group)
}

// Namespace is the identifier of an Identity: blocks of two namespaces have
// nothing to do with each other, whatever their keys.
type Namespace [16]byte

// String is the identifier in hexadecimal.
func (n Namespace) String() string { return hex.EncodeToString(n[:]) }

// ParseNamespace reads 32 hexadecimal digits.
func ParseNamespace(text string) (n Namespace, err error) {
	if len(text) != 2*len(n) {
		return n, fmt.Errorf("%w: a namespace has %d hexadecimal digits, not %d", ErrInvalid, 2*len(n), len(text))
	}
	if _, err := hex.Decode(n[:], []byte(text)); err != nil {
		return Namespace{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return n, nil
}

// Identity is all that must be equal for the bytes of one engine to be of use
// to another. Every field counts; a field that an engine does not tell is empty.
type Identity struct {
	// Tenant is whose the blocks are. It comes from the socket or the
	// credential, and never from what a client says.
	Tenant string `json:"tenant"`
	// Artifact is the digest of the weights, DType and Format what the bytes are:
	// Format names the layout, and its version.
	Artifact string `json:"artifact"`
	DType    string `json:"dtype"`
	Format   string `json:"format"`
	// Engine is the engine and its version line, for example "vllm 0.33".
	Engine string `json:"engine"`
	// BlockTokens is the number of tokens in a block, 0 where it is not told.
	BlockTokens int `json:"blockTokens"`
	// Groups describes the groups of layers, in the order of Key.Group.
	Groups []string `json:"groups"`
	// Parallel are the parallel sizes, for example "tp8 pp1", or "canonical" where
	// the bytes do not depend on them.
	Parallel string `json:"parallel"`
	// Hash is the algorithm of the keys, Seed a digest of its seed.
	Hash string `json:"hash"`
	Seed string `json:"seed"`
}

// maxIdentity bounds the canonical form, in bytes.
const maxIdentity = 4 << 10

// Canonical is the JSON whose digest is the identifier: all fields, in the order
// of their names, without white space, no HTML escapes, an absent list as [].
// Errors wrap ErrInvalid.
func (i Identity) Canonical() ([]byte, error) {
	if i.Tenant == "" || i.BlockTokens < 0 {
		return nil, fmt.Errorf("%w: an identity has a tenant and no negative number", ErrInvalid)
	}
	if i.Groups == nil {
		i.Groups = []string{}
	}
	// A map is written in the order of its keys.
	text, err := marshal(map[string]any{
		"tenant": i.Tenant, "artifact": i.Artifact, "dtype": i.DType, "format": i.Format, "engine": i.Engine,
		"blockTokens": i.BlockTokens, "groups": i.Groups, "parallel": i.Parallel, "hash": i.Hash, "seed": i.Seed,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if len(text) > maxIdentity {
		return nil, fmt.Errorf("%w: the identity has %d bytes, at most %d are allowed", ErrInvalid, len(text), maxIdentity)
	}
	return text, nil
}

// ID is the identifier: the first 16 bytes of the SHA-256 of Canonical.
func (i Identity) ID() (Namespace, error) {
	text, err := i.Canonical()
	if err != nil {
		return Namespace{}, err
	}
	sum := sha256.Sum256(text)
	return Namespace(sum[:len(Namespace{})]), nil
}

func marshal(v any) ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}
