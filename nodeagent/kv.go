package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/units"
)

// kvSpace is the data role's KV: the space that claims reserve, the blocks of
// claims and tenants, and the listeners that serve them. Reserve and Release are
// those of the space, with the blocks.
type kvSpace struct {
	*kvtier.Space
	capacity kvCapacity
	log      *slog.Logger
	cache    *kvtier.Cache // nil where no space is configured
	server   *resp.Server
	peering  kvPeering
	// changing is taken to take another configuration; capacity 1.
	changing chan struct{}
	fill     fillKeeper
	serving  sync.WaitGroup
	// offers is called when what claims may take is another; nil calls nobody. It
	// is set before anybody else has the space.
	offers func()

	mu       sync.Mutex
	config   KV                       // as it was taken last
	problems []string                 // that it has on this node
	lacks    []string                 // of them, what the node lacks
	refused  map[string]*refusal      // tenants that could not be opened, by kind and name
	busy     map[string]chan struct{} // tenants being opened or ended, the same
	left     units.Bytes              // on the drives, of tenants that nobody serves
	served   map[string]*kvServed     // by kind and name
	open     *kvServed                // of clients without a password on listen.resp; nil is none
	creds    *resp.Credentials
	running  context.Context // of run; nil while it does not run
	tcp      net.Addr        // of listen.resp; nil while nothing listens there
	labels   kvLabels
	past     map[string]*kvSum // of tenants that ended, by label
}

// kvServed is a tenant and how it is served.
type kvServed struct {
	tenant   *kvtier.Tenant
	resp     *resp.Tenant
	listener net.Listener // its own; nil is none
	end      context.CancelFunc
	ended    chan struct{}
	password string // empty is none
	fault    string // of its credentialFile, empty for none
}

// settings is the configuration as it was taken last.
func (k *kvSpace) settings() KV {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.config
}

// openKV opens the space and takes the blocks of all claims and tenants in,
// before anybody is served.
func openKV(config KV, capacity kvCapacity, peering kvPeering, log *slog.Logger) (_ *kvSpace, err error) {
	k := &kvSpace{
		capacity: capacity, peering: peering, config: config, log: log, server: resp.New(resp.Options{Log: log}), changing: make(chan struct{}, 1),
		served: map[string]*kvServed{}, creds: &resp.Credentials{}, labels: kvLabels{}, past: map[string]*kvSum{},
		refused: map[string]*refusal{}, busy: map[string]chan struct{}{},
	}
	offered, _ := config.within(capacity, 0)
	k.Space, err = kvtier.Open(kvtier.Options{Dir: config.Dir, Budget: offered.claims(0), Make: config.set(), Log: log})
	if err != nil {
		return nil, err
	}
	if !config.set() {
		return k, nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Close())
		}
	}()
	k.cache, err = kvtier.OpenCache(kvtier.CacheOptions{
		Dir: config.Dir, Drives: config.Drives, Memory: offered.Memory, VerifyEvery: config.VerifyEvery, Log: log,
		Wear: kvtier.WearOptions{WritesPerDay: config.DriveWritesPerDay, Capacity: config.DriveCapacity, Endurance: config.DriveEndurance},
	})
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	var group errgroup.Group
	group.SetLimit(8)
	for _, r := range k.Reservations() {
		if r.Namespace == "" {
			continue // its record was lost: it has a directory and no sizes
		}
		group.Go(func() error {
			k.orRefuse(ctx, kvtier.TenantClaim, r.Claim, func() error { return k.addClaim(ctx, r) })
			return nil
		})
	}
	for _, t := range config.Tenants {
		group.Go(func() error {
			k.orRefuse(ctx, kvtier.TenantCredential, t.Name, func() error { return k.addTenant(ctx, t) })
			return nil
		})
	}
	_ = group.Wait() // what one tenant lacks is a problem, and no reason not to start
	k.offer(context.Background(), config)
	k.fill.look(k.figures())
	return k, nil
}

// offer gives claims what the node has for them and tells of what it lacks.
func (k *kvSpace) offer(ctx context.Context, config KV) {
	left := k.leftBytes()
	offered, problems := config.within(k.capacity, left)
	if err := k.SetBudget(ctx, offered.claims(left)); err != nil {
		problems = append(problems, "claims keep what they have: "+err.Error())
	}
	k.mu.Lock()
	k.lacks, k.left = problems, left
	k.mu.Unlock()
	k.lookAtTenants()
	if k.offers != nil {
		k.offers()
	}
}

// addClaim serves a claim's blocks on the socket in its directory.
func (k *kvSpace) addClaim(ctx context.Context, r kvtier.Reservation) error {
	done, err := k.alone(ctx, kvtier.TenantClaim, r.Claim)
	if err != nil {
		return err
	}
	defer done()
	if !k.reserves(r.Claim) {
		return errReleased
	}
	served, err := k.serve(ctx, k.settings().claimSpec(r), false)
	if err != nil {
		return err
	}
	k.mu.Lock()
	has := served.listener != nil
	k.mu.Unlock()
	if has {
		return nil
	}
	l, err := k.Listen(context.WithoutCancel(ctx), r.Claim)
	if err != nil {
		return err
	}
	k.listen(served, l)
	return nil
}

// errReleased says that a claim has no space any more.
var errReleased = errors.New("the claim was released meanwhile")

// reserves says whether a claim has space.
func (k *kvSpace) reserves(claim string) bool {
	return slices.ContainsFunc(k.Reservations(), func(r kvtier.Reservation) bool { return r.Claim == claim })
}

// addTenant serves the blocks of a tenant of the configuration.
func (k *kvSpace) addTenant(ctx context.Context, t KVTenant) error {
	done, err := k.alone(ctx, kvtier.TenantCredential, t.Name)
	if err != nil {
		return err
	}
	defer done()
	spec, err := k.settings().spec(t)
	if err != nil {
		return err
	}
	password, err := t.password()
	if err == nil {
		err = k.unique(t, password)
	}
	if err != nil {
		return err
	}
	var l net.Listener
	if t.Socket != "" && !k.serves(kvtier.TenantCredential, t.Name) {
		if l, err = identity.ListenSocket(context.WithoutCancel(ctx), t.Socket); err != nil {
			return fmt.Errorf("listen for KV tenant %s: %w", t.Name, err)
		}
	}
	served, err := k.serve(ctx, spec, t.Peers)
	if err != nil {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
		return err
	}
	if l != nil {
		k.listen(served, l)
	}
	k.mu.Lock()
	if err = k.freeLocked(t, password); err == nil {
		if served.password = password; t.Anonymous {
			k.open = served
		}
		k.renewCredentialsLocked()
	}
	k.mu.Unlock()
	if err != nil {
		return errors.Join(err, k.detach(ctx, t.Name))
	}
	return nil
}

// renewCredentialsLocked makes the passwords those of the tenants that are served,
// each of which has its own.
func (k *kvSpace) renewCredentialsLocked() {
	creds := &resp.Credentials{}
	for _, name := range slices.Sorted(maps.Keys(k.served)) {
		if served := k.served[name]; served.password != "" {
			if err := creds.Add(served.resp, served.password); err != nil {
				k.log.Error("a KV tenant has no password", slog.String("tenant", served.tenant.Name()), slog.Any("error", err))
			}
		}
	}
	k.creds = creds
}

// authenticate finds the tenant of a password among those of now.
func (k *kvSpace) authenticate(user, password []byte) (*resp.Tenant, bool) {
	k.mu.Lock()
	creds := k.creds
	k.mu.Unlock()
	return creds.Authenticate(user, password)
}

// serve gives a tenant of the cache and its side of the protocol. share says that
// its blocks are those of other nodes, too.
func (k *kvSpace) serve(ctx context.Context, spec kvtier.TenantSpec, share bool) (*kvServed, error) {
	tenant, err := k.cache.AddTenant(ctx, spec)
	if err != nil {
		return nil, err
	}
	key := spec.Kind + " " + spec.Name
	k.mu.Lock()
	served := k.served[key]
	k.mu.Unlock()
	if served != nil && served.tenant == tenant {
		return served, nil
	}
	protocol, err := resp.Open(ctx, tenant, func(n *kvtier.Namespace) resp.Store { return k.peering.join(n, share) })
	if err != nil {
		return nil, err
	}
	served = &kvServed{tenant: tenant, resp: protocol}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.served[key] = served
	return served, nil
}

// listen serves a tenant on a listener of its own, at once where the agent runs.
func (k *kvSpace) listen(served *kvServed, l net.Listener) {
	k.mu.Lock()
	defer k.mu.Unlock()
	served.listener = l
	if k.running != nil {
		k.startLocked(served)
	}
}

func (k *kvSpace) startLocked(served *kvServed) {
	ctx, cancel := context.WithCancel(k.running)
	served.end, served.ended = cancel, make(chan struct{})
	k.serving.Go(func() {
		defer close(served.ended)
		if err := k.server.Serve(ctx, served.listener, resp.Access{Tenant: served.resp}); err != nil {
			k.log.Error("a KV socket is served no more", slog.String("tenant", served.tenant.Name()), slog.Any("error", err))
		}
	})
}

// anonymous is the tenant of clients on listen.resp without a password, nil for
// none.
func (k *kvSpace) anonymous() *resp.Tenant {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.open == nil {
		return nil
	}
	return k.open.resp
}

// hasClients says whether listen.resp has anybody to serve.
func (k *kvSpace) hasClients() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, served := range k.served {
		if served.password != "" {
			return true
		}
	}
	return k.open != nil
}

// serveTCP serves tenants by their passwords, until ctx ends.
func (k *kvSpace) serveTCP(ctx context.Context, l net.Listener) error {
	access := resp.Access{Authenticate: k.authenticate, TenantNow: k.anonymous}
	k.mu.Lock()
	k.tcp = l.Addr()
	k.mu.Unlock()
	if err := k.server.Serve(ctx, l, access); err != nil {
		return fmt.Errorf("serve resp: %w", err)
	}
	return nil
}

// run serves the sockets and writes blocks, until ctx ends.
func (k *kvSpace) run(ctx context.Context) error {
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return k.Run(running) })
	if k.cache == nil {
		return group.Wait()
	}
	k.mu.Lock()
	k.running = running
	for _, served := range k.served {
		if served.listener != nil {
			k.startLocked(served)
		}
	}
	k.mu.Unlock()
	group.Go(func() error { return k.cache.Run(running) })
	group.Go(func() error { return k.watchFill(running) })
	group.Go(func() error { return k.retryRefused(running) })
	group.Go(func() error { return k.watchCredentials(running) })
	group.Go(func() error { return k.peering.run(running) })
	err := group.Wait()
	k.mu.Lock()
	k.running = nil
	k.mu.Unlock()
	k.serving.Wait()
	return err
}

// Reserve gives a claim space, its directory, and blocks with a socket in it.
func (k *kvSpace) Reserve(ctx context.Context, r kvtier.Reservation) (string, error) {
	dir, err := k.Space.Reserve(ctx, r)
	if err != nil || k.cache == nil {
		return dir, err
	}
	if err := k.addClaim(ctx, r); err != nil {
		return "", fmt.Errorf("reserve KV space for claim %s: %w", r.Claim, err)
	}
	k.unrefuse(kvtier.TenantClaim, r.Claim)
	return dir, nil
}

// Release ends a claim's blocks and then its space.
func (k *kvSpace) Release(ctx context.Context, claim string) error {
	if k.cache == nil {
		return k.Space.Release(ctx, claim)
	}
	done, err := k.alone(ctx, kvtier.TenantClaim, claim)
	if err != nil {
		return fmt.Errorf("release KV space of claim %s: %w", claim, err)
	}
	defer done()
	key := kvtier.TenantClaim + " " + claim
	k.mu.Lock()
	served := k.served[key]
	k.mu.Unlock()
	if served != nil {
		if err := served.stop(ctx); err != nil {
			return fmt.Errorf("release KV space of claim %s: %w", claim, err)
		}
		k.forget(key)
	}
	if err := k.cache.RemoveTenant(ctx, kvtier.TenantClaim, claim); err != nil {
		return fmt.Errorf("release KV space of claim %s: %w", claim, err)
	}
	if err := k.Space.Release(ctx, claim); err != nil {
		return err
	}
	k.unrefuse(kvtier.TenantClaim, claim)
	return nil
}

// stop ends the listener of a tenant and waits for its connections.
func (s *kvServed) stop(ctx context.Context) error {
	if s.end == nil {
		if s.listener != nil {
			_ = s.listener.Close()
		}
		return nil
	}
	s.end()
	select {
	case <-s.ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close gives memory, files and the directory back.
func (k *kvSpace) Close() error {
	var err error
	k.mu.Lock()
	for _, served := range k.served {
		if served.listener != nil {
			if e := served.listener.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
				err = errors.Join(err, e)
			}
		}
	}
	k.mu.Unlock()
	if k.cache != nil {
		err = errors.Join(err, k.cache.Close())
	}
	return errors.Join(err, k.Space.Close())
}
