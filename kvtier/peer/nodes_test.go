package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

const kib = 1 << 10

// patientWait stands for the waits of lookups and pins where a test is not about
// them: they end with the answer.
const patientWait = time.Minute

func keyOf(n int) block.Key {
	return block.Key{Hash: block.HashOf([]byte{byte(n), byte(n >> 8)}), Group: uint32(n)}
}

// content is what the block of a key has in tests.
func content(key, size int) []byte {
	var seed [32]byte
	seed[0], seed[1] = byte(key), byte(key>>8)
	data := make([]byte, size)
	_, _ = rand.NewChaCha8(seed).Read(data)
	return data
}

func newCache(t testing.TB, memory units.Bytes) *kvtier.Cache {
	t.Helper()
	c, err := kvtier.OpenCache(kvtier.CacheOptions{Dir: t.TempDir(), Memory: memory, VerifyEvery: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func addTenant(t testing.TB, c *kvtier.Cache, spec kvtier.TenantSpec) *kvtier.Namespace {
	t.Helper()
	if spec.Kind == "" {
		spec.Kind = kvtier.TenantCredential
	}
	tenant, err := c.AddTenant(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	n, err := tenant.Namespace(context.Background(), block.Identity{Format: "test", BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func store(t testing.TB, n *kvtier.Namespace, key block.Key, data []byte) {
	t.Helper()
	p, err := n.Put(key, len(data), kvtier.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	copy(p.Bytes(), data)
	p.Fill(len(data))
	if err := p.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// gotten gives a copy of a block, nil for a miss.
func gotten(t testing.TB, b *Blocks, key block.Key) []byte {
	t.Helper()
	got, err := b.Get(context.Background(), key)
	if errors.Is(err, kvtier.ErrMiss) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	defer got.Release()
	return bytes.Clone(got.Bytes())
}

// comes gives a copy of a block that a peer has, however slow this machine is: a
// peer that seems not to answer is left alone for a while and asked again.
func comes(t testing.TB, b *Blocks, key block.Key) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		if got := gotten(t, b, key); got != nil {
			return got
		}
		again := time.NewTimer(20 * time.Millisecond)
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("block %v did not come within a minute", key)
		}
	}
}

// local gives a copy of a block that is on this node, nil where it is not.
func local(t testing.TB, b *Blocks, key block.Key) []byte {
	t.Helper()
	got, err := b.Namespace.Get(context.Background(), key)
	if err != nil {
		return nil
	}
	defer got.Release()
	return bytes.Clone(got.Bytes())
}

// authority issues certificates for nodes.
type authority struct {
	t  testing.TB
	ca *identity.CA
}

func newAuthority(t testing.TB) authority {
	t.Helper()
	ca, err := identity.NewCA(identity.Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return authority{t, ca}
}

func (a authority) files(role identity.Role, name string) identity.Files {
	a.t.Helper()
	dir := a.t.TempDir()
	files := identity.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	pair, err := a.ca.Issue(role, name, identity.IssueOptions{})
	if err == nil {
		err = errors.Join(identity.WritePair(files.Cert, files.Key, pair), os.WriteFile(files.CA, a.ca.Cert(), 0o600))
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return files
}

func (a authority) server(role identity.Role) *tls.Config {
	a.t.Helper()
	config, err := identity.ServerTLS(a.files(role, "node"), identity.RoleAgent)
	if err != nil {
		a.t.Fatal(err)
	}
	return config
}

func (a authority) client(role identity.Role) *tls.Config {
	a.t.Helper()
	config, err := identity.ClientTLS(a.files(role, "node"), identity.RoleAgent)
	if err != nil {
		a.t.Fatal(err)
	}
	return config
}

// serve runs a server on a listener until the test ends, or end is called.
func serve(t testing.TB, s *Server, l net.Listener) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return end
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := identity.ListenTCP(context.Background(), "127.0.0.1:0", identity.StalledTimeout)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// giver is a node that gives blocks.
type giver struct {
	*kvtier.Namespace
	server *Server
	addr   string
	end    func()
}

// newGiver makes a node that shares tenant "a".
func newGiver(t testing.TB, opts ServerOptions) *giver {
	t.Helper()
	g := &giver{Namespace: addTenant(t, newCache(t, 64*units.MiB), kvtier.TenantSpec{Name: "a", Memory: 64 * units.MiB}), server: NewServer(opts)}
	g.server.Share(g.Tenant())
	l := listen(t)
	g.addr = l.Addr().String()
	g.end = serve(t, g.server, l)
	return g
}

// newTaker makes a node that gets blocks of tenant "a", and runs it until the
// test ends.
func newTaker(t testing.TB, opts Options, change ...func(*kvtier.TenantSpec)) *Blocks {
	t.Helper()
	// Computing takes so long that a Get waits for a block however slow the test is.
	spec := kvtier.TenantSpec{Name: "a", Memory: 64 * units.MiB, PrefillRate: 0.001}
	for _, c := range change {
		c(&spec)
	}
	n := addTenant(t, newCache(t, 64*units.MiB), spec)
	orElse(&opts.LookupWait, patientWait)
	orElse(&opts.PinWait, patientWait)
	p := New(opts)
	run(t, p)
	return p.Blocks(n)
}

// run runs a Peers until the test ends.
func run(t testing.TB, p *Peers) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	p.waitRunning()
}

// waitRunning waits until questions are taken.
func (p *Peers) waitRunning() {
	for {
		p.mu.Lock()
		running := p.running
		p.mu.Unlock()
		if running {
			return
		}
		runtime.Gosched()
	}
}
