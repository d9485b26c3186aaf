package resp

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Format and HashName are the fields of the block.Identity of all values of a tenant.
const (
	Format   = "resp 1"
	HashName = "sha256"
)

// Blocks is the namespace of one tenant, as the KV tier gives it.
type Blocks interface {
	// Lookup tells whether Get would find the block, and its size in bytes, without I/O.
	Lookup(key block.Key) (size int, ok bool)
	// Pin is Lookup that holds the block for Get until it is released.
	Pin(key block.Key) (Pin, bool)
	// Get gives the block's verified bytes; any error is a miss.
	Get(ctx context.Context, key block.Key) (Block, error)
	// Put begins to store a block of size bytes; any error is a drop. Parent is
	// the block before it, where hasParent says that there is a guess.
	Put(key block.Key, size int, parent block.Key, hasParent bool) (Put, error)
	// Delete ends keys and tells how many were there.
	Delete(ctx context.Context, keys ...block.Key) (removed int, err error)
}

// Pin holds a block.
type Pin interface {
	Size() int
	Release()
}

// Block is a block's bytes, which stay as they are until Release.
type Block interface {
	Bytes() []byte
	// Tier is where the block was, Tokens how many are in it, 0 where that is not known.
	Tier() kvtier.Tier
	Tokens() int
	Release()
}

// Put is a block that is being stored; it is invisible before Commit.
type Put interface {
	Bytes() []byte
	Fill(n int)
	Commit(ctx context.Context) error
	Abort()
}

// TenantOptions say whose blocks a Tenant serves.
type TenantOptions struct {
	Name   string
	Blocks Blocks
	// PinBytes bounds the blocks that EXISTS pins for native connections; nil pins none.
	PinBytes func() int64
	// HoldBytes bounds the blocks that are held because replies wait for clients that
	// do not read yet; beyond it, and with nil, each connection holds one.
	HoldBytes func() int64
	// Count tells the number of blocks, for DBSIZE; nil is refused.
	Count func() int64
	// Flush removes all blocks, for FLUSHDB and FLUSHALL; nil is refused.
	Flush func(ctx context.Context) error
}

// Tenant is one tenant as this protocol sees it: its blocks, what is pinned and
// known of them, and its figures. All its connections share it.
type Tenant struct {
	options   TenantOptions
	blocks    Blocks
	pins      pins
	sizes     sizes
	figures   figures
	models    models
	connected connected
	// held is bytes of blocks that wait to be written, of HoldBytes.
	held atomic.Int64
	// conditional lets one SET with NX or XX decide at a time.
	conditional chan struct{}
}

// NewTenant makes a tenant. It holds pins until its connections have ended.
func NewTenant(options TenantOptions) *Tenant {
	if options.PinBytes == nil {
		options.PinBytes = func() int64 { return 0 }
	}
	if options.HoldBytes == nil {
		options.HoldBytes = func() int64 { return 0 }
	}
	return &Tenant{
		options: options, blocks: options.Blocks, pins: pins{limit: options.PinBytes}, conditional: make(chan struct{}, 1),
	}
}

// Name is the tenant's name.
func (t *Tenant) Name() string { return t.options.Name }

// End closes the tenant's connections, and those at once that become its own
// later: nobody serves it any more. What is being answered has Options.Drain for it.
func (t *Tenant) End() { t.connected.end() }

// connected are the connections of a tenant.
type connected struct {
	mu    sync.Mutex
	all   map[*conn]struct{}
	ended bool
}

// add takes a connection, unless there is to be none any more.
func (o *connected) add(c *conn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return false
	}
	if o.all == nil {
		o.all = map[*conn]struct{}{}
	}
	o.all[c] = struct{}{}
	return true
}

func (o *connected) remove(c *conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.all, c)
}

func (o *connected) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	for c := range o.all {
		c.finish(time.Now().Add(c.server.options.Drain))
	}
}

// Credentials are tenants and their passwords.
type Credentials struct {
	names     [][sha256.Size]byte
	passwords [][sha256.Size]byte
	tenants   []*Tenant
}

// Add gives a tenant a password; a tenant may have several, while one is
// replaced. A password that is empty or another's is refused, since the
// password alone may decide.
func (c *Credentials) Add(tenant *Tenant, password string) error {
	if password == "" {
		return fmt.Errorf("add credential of %s: %w", tenant.Name(), errors.New("the password is empty"))
	}
	sum := sha256.Sum256([]byte(password))
	for i, known := range c.passwords {
		if known == sum && c.tenants[i] != tenant {
			return fmt.Errorf("add credential of %s: %w", tenant.Name(), errors.New("another tenant has the same password"))
		}
	}
	c.names = append(c.names, sha256.Sum256([]byte(tenant.Name())))
	c.passwords = append(c.passwords, sum)
	c.tenants = append(c.tenants, tenant)
	return nil
}

// Authenticate finds the tenant of a credential. User is empty, "default" or the
// tenant's name. It takes as long for a wrong one as for a right one.
func (c *Credentials) Authenticate(user, password []byte) (*Tenant, bool) {
	name, sum := sha256.Sum256(user), sha256.Sum256(password)
	anyUser := len(user) == 0 || string(user) == "default"
	var found *Tenant
	for i := range c.tenants {
		right := subtle.ConstantTimeCompare(sum[:], c.passwords[i][:])
		named := subtle.ConstantTimeCompare(name[:], c.names[i][:])
		if anyUser {
			named = 1
		}
		if right&named == 1 {
			found = c.tenants[i]
		}
	}
	return found, found != nil
}
