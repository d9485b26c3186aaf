package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// KindTenant is what people call tenants of kvtier.TenantCredential, which are those
// of kv.tenants, with a credential or without; calls take both names.
const KindTenant = "tenant"

// KV is what a node says of its KV store. Sizes are bytes; counts began with the
// process that keeps it.
type KV struct {
	Dir string `json:"dir"`
	// Memory and NVMe are what there is and who has it.
	Memory KVBudget `json:"memory"`
	NVMe   KVBudget `json:"nvme"`
	// NamespaceMemory and NamespaceNVMe bound the claims of one namespace; 0 is no
	// bound.
	NamespaceMemory int64      `json:"namespaceMemory,omitempty"`
	NamespaceNVMe   int64      `json:"namespaceNVMe,omitempty"`
	Drives          []KVDrive  `json:"drives"`
	Wear            KVWear     `json:"wear"`
	Tenants         []KVTenant `json:"tenants"`
	// Left are tenants on the drives that nobody serves.
	Left     []KVLeft   `json:"left,omitempty"`
	Recovery KVRecovery `json:"recovery"`
	RESP     KVServer   `json:"resp"`
	Problems []string   `json:"problems,omitempty"`
}

// KVBudget is the bytes of one tier.
type KVBudget struct {
	Configured int64 `json:"configured"`
	// Offered is what of it the node has.
	Offered int64 `json:"offered"`
	// Tenants is what tenants of the configuration have of that, Claims what claims
	// may have and Reserved what they do.
	Tenants  int64 `json:"tenants"`
	Claims   int64 `json:"claims"`
	Reserved int64 `json:"reserved"`
}

// KVDrive is a directory that has blocks.
type KVDrive struct {
	Dir   string `json:"dir"`
	Size  int64  `json:"size"` // of its file system
	Free  int64  `json:"free"`
	Error string `json:"error,omitempty"` // why size and free are not known
}

// KVWear is what is written to the drives.
type KVWear struct {
	// Bounded says that the configuration bounds it; else all is 0.
	Bounded bool    `json:"bounded"`
	Written int64   `json:"written"` // ever, at most
	Rate    int64   `json:"rate"`    // bytes a second that may be written on average
	Level   float64 `json:"level"`   // of what may be written now, 0 to 1
	Refused int64   `json:"refused"` // writes
	// DaysLeft is for how long the drives last at that rate; absent where their
	// endurance is not known.
	DaysLeft *float64 `json:"daysLeft,omitempty"`
}

// KVRecovery is what the start took in from the drives.
type KVRecovery struct {
	Seconds float64 `json:"seconds"` // of the tenant that took longest
	Blocks  int64   `json:"blocks"`
}

// KVTenant is a tenant, what it has and what happened to it.
type KVTenant struct {
	Kind       string `json:"kind"` // "claim" or "credential"
	Name       string `json:"name"` // UID of a claim
	Namespace  string `json:"namespace,omitempty"`
	Own        int64  `json:"own"` // RAM that nobody takes from it
	RAM        KVTier `json:"ram"`
	NVMe       KVTier `json:"nvme"`
	Blocks     int64  `json:"blocks"`     // one that is on both tiers counts once
	Namespaces int    `json:"namespaces"` // of blocks
	Index      int64  `json:"index"`      // bytes
	Waiting    int64  `json:"waiting"`    // bytes to be written
	// Pinned are the keys that people pinned, Pins what clients hold now.
	Pinned      int   `json:"pinned"`
	PinnedBytes int64 `json:"pinnedBytes"`
	Pins        int64 `json:"pins"`
	LookupHits  int64 `json:"lookupHits"`
	// LookupMisses are all lookups that found nothing; Gated those of them that
	// found a block whose load was not worth it.
	LookupMisses int64            `json:"lookupMisses"`
	Gated        int64            `json:"gated"`
	Misses       int64            `json:"misses"`
	Stored       int64            `json:"stored"`
	StoredBytes  int64            `json:"storedBytes"`
	Dropped      map[string]int64 `json:"dropped,omitempty"` // by reason
	Evicted      int64            `json:"evicted"`           // left RAM and are nowhere
	Written      int64            `json:"written"`           // blocks put on drives
	WrittenBytes int64            `json:"writtenBytes"`
	// Wasted are blocks that were stored in vain: evicted from RAM, and gone from
	// drives, without a read.
	Wasted      int64              `json:"wasted"`
	Connections int64              `json:"connections"`
	Models      map[string]KVModel `json:"models,omitempty"`
}

// KVTier is what a tenant has on a tier.
type KVTier struct {
	Used        int64 `json:"used"`
	Budget      int64 `json:"budget"`
	Blocks      int64 `json:"blocks"`
	Bytes       int64 `json:"bytes"` // of blocks
	Hits        int64 `json:"hits"`
	HitBytes    int64 `json:"hitBytes"`
	SavedTokens int64 `json:"savedTokens"`
	Damaged     int64 `json:"damaged"`
}

// KVModel is what clients asked of one model.
type KVModel struct {
	Hits        int64 `json:"hits"`
	Misses      int64 `json:"misses"`
	Stored      int64 `json:"stored"`
	Dropped     int64 `json:"dropped"`
	SavedTokens int64 `json:"savedTokens"`
}

// KVLeft is a tenant that was served before and whose blocks are on the drives.
type KVLeft struct {
	Kind  string `json:"kind,omitempty"`
	Name  string `json:"name,omitempty"` // empty where nothing says whose they are
	Bytes int64  `json:"bytes"`
}

// KVServer is what the server of the clients' protocol counted.
type KVServer struct {
	Address        string           `json:"address,omitempty"` // of clients with passwords
	Connections    int64            `json:"connections"`       // now
	Native         int64            `json:"native"`            // of these, LMCache's native ones
	Accepted       int64            `json:"accepted"`
	Refused        int64            `json:"refused"` // beyond the bound
	AuthFailures   int64            `json:"authFailures"`
	ProtocolErrors int64            `json:"protocolErrors"`
	SlowReaders    int64            `json:"slowReaders"`
	Commands       map[string]int64 `json:"commands,omitempty"`
}

// KVPinRequest pins blocks of a tenant, or lets them go.
type KVPinRequest struct {
	// Tenant is "name", or "kind/name" where two have the name.
	Tenant string `json:"tenant"`
	// Keys are clients' keys as they are, or the 64 hexadecimal digits of a hash.
	Keys []string `json:"keys"`
	Pin  bool     `json:"pin"`
}

// KVPinned says how many blocks a call pinned or let go, and what is pinned now.
type KVPinned struct {
	Changed int   `json:"changed"`
	Pinned  int   `json:"pinned"`
	Bytes   int64 `json:"bytes"`
}

// KVDropRequest ends blocks of a tenant: those of keys, or with All every one.
type KVDropRequest struct {
	Tenant string   `json:"tenant"`
	Keys   []string `json:"keys,omitempty"`
	All    bool     `json:"all,omitempty"`
}

// KVDropped says how many blocks a call ended; -1 is not known, of a tenant that
// was not served.
type KVDropped struct {
	Dropped int64 `json:"dropped"`
}

// KVFill is the fill of a node's KV store at a glance.
type KVFill struct {
	MemoryUsed   int64 `json:"memoryUsed"`
	MemoryBudget int64 `json:"memoryBudget"`
	NVMeUsed     int64 `json:"nvmeUsed"`
	NVMeBudget   int64 `json:"nvmeBudget"`
	Blocks       int64 `json:"blocks"`
}

// KVStore is what the handlers ask of the KV store. Errors wrap those of package
// kvtier.
type KVStore interface {
	Describe(ctx context.Context) (KV, error)
	Pin(ctx context.Context, tenant string, keys []block.Key, pin bool) (KVPinned, error)
	Drop(ctx context.Context, tenant string, keys []block.Key) (KVDropped, error)
	DropAll(ctx context.Context, tenant string) (KVDropped, error)
}

// MaxKVKeys bounds the keys of one call.
const MaxKVKeys = 256

// KeyOf is the block's key that a text names: a hash of 64 hexadecimal digits, or
// a client's key.
func KeyOf(text string) block.Key {
	if hash, err := block.ParseHash(text); err == nil {
		return block.Key{Hash: hash}
	}
	return block.Key{Hash: block.HashOf([]byte(text))}
}

func keysOf(texts []string) ([]block.Key, error) {
	if len(texts) == 0 || len(texts) > MaxKVKeys {
		return nil, fmt.Errorf("%w: %d keys, want 1 to %d", errBody, len(texts), MaxKVKeys)
	}
	keys := make([]block.Key, len(texts))
	for i, text := range texts {
		if text == "" {
			return nil, fmt.Errorf("%w: a key is empty", errBody)
		}
		keys[i] = KeyOf(text)
	}
	return keys, nil
}

// kvWithin bounds how long a description may take: drives are asked for their
// room.
const kvWithin = 2 * time.Second

// ofKV is a call about the KV store: this process answers it where it has it.
func (a *api) ofKV(call http.HandlerFunc) http.Handler {
	switch {
	case a.opts.KV != nil:
		return call
	case a.opts.Pass != nil && a.opts.Weights == nil:
		return a.opts.Pass
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fail(w, &Error{Code: CodeNotFound, Status: http.StatusNotFound, Message: "this agent keeps no KV store"})
	})
}

func (a *api) kv(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), kvWithin)
	defer cancel()
	kv, err := a.opts.KV.Describe(ctx)
	if err != nil {
		fail(w, errorOf(err))
		return
	}
	answer(w, kv)
}

func (a *api) kvPin(w http.ResponseWriter, r *http.Request) {
	var request KVPinRequest
	err := readBody(r, &request)
	if err == nil && request.Tenant == "" {
		err = fmt.Errorf("%w: no tenant", errBody)
	}
	var keys []block.Key
	if err == nil {
		keys, err = keysOf(request.Keys)
	}
	var pinned KVPinned
	if err == nil {
		pinned, err = a.opts.KV.Pin(r.Context(), request.Tenant, keys, request.Pin)
	}
	if err != nil {
		fail(w, kvErrorOf(err))
		return
	}
	answer(w, pinned)
}

func (a *api) kvDrop(w http.ResponseWriter, r *http.Request) {
	var request KVDropRequest
	err := readBody(r, &request)
	if err == nil && (request.Tenant == "" || request.All != (len(request.Keys) == 0)) {
		err = fmt.Errorf("%w: want a tenant and either keys or all", errBody)
	}
	var dropped KVDropped
	switch {
	case err != nil:
	case request.All:
		dropped, err = a.opts.KV.DropAll(r.Context(), request.Tenant)
	default:
		var keys []block.Key
		if keys, err = keysOf(request.Keys); err == nil {
			dropped, err = a.opts.KV.Drop(r.Context(), request.Tenant, keys)
		}
	}
	if err != nil {
		fail(w, kvErrorOf(err))
		return
	}
	answer(w, dropped)
}

// kvErrorOf maps an error of the KV store to one of the API.
func kvErrorOf(err error) *Error {
	for _, known := range []struct {
		is     error
		code   string
		status int
		hint   string
	}{
		{kvtier.ErrUnknown, CodeUnknownTenant, http.StatusNotFound, "hearth kv stat shows the tenants"},
		{kvtier.ErrMiss, CodeUnknownBlock, http.StatusNotFound, "only a block that is there can be pinned"},
		{kvtier.ErrNoSpace, CodeNoSpace, http.StatusInsufficientStorage, "unpin others, or give the tenant more"},
		{kvtier.ErrRemoved, CodeUnknownTenant, http.StatusNotFound, "it ended meanwhile"},
		{kvtier.ErrInvalid, CodeBadRequest, http.StatusBadRequest, ""},
	} {
		if errors.Is(err, known.is) {
			return &Error{Code: known.code, Status: known.status, Message: err.Error(), Hint: known.hint}
		}
	}
	return errorOf(err)
}

// KV asks for the state of the KV store.
func (c *Client) KV(ctx context.Context) (KV, error) { return get[KV](ctx, c, "/v1/kv") }

// KVPin pins blocks of a tenant, or lets them go.
func (c *Client) KVPin(ctx context.Context, request KVPinRequest) (KVPinned, error) {
	return post[KVPinned](ctx, c, "/v1/kv/pin", request)
}

// KVDrop ends blocks of a tenant.
func (c *Client) KVDrop(ctx context.Context, request KVDropRequest) (KVDropped, error) {
	return post[KVDropped](ctx, c, "/v1/kv/drop", request)
}
