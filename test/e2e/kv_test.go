package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// kvClient speaks as an engine's client does, to the socket that a container
// finds in its claim.
type kvClient struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

// kvOf connects to the socket in the view of a pod's container.
func (c cluster) kvOf(t *testing.T, p pod) *kvClient {
	t.Helper()
	path := filepath.Join("/proc", strconv.Itoa(c.processes(t, p, "engine-sim")[0]), "root", "hearth/kv/kv.sock")
	var k *kvClient
	eventually(t, "a connection to the KV socket of "+p.Metadata.Name, func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err != nil {
			return fmt.Errorf("%w: %w", errAgain, err)
		}
		k = &kvClient{t, conn, bufio.NewReader(conn)}
		return nil
	})
	t.Cleanup(func() { _ = k.conn.Close() })
	if answer := k.do("CLIENT", "SETNAME", "e2e"); string(answer) != "OK" {
		t.Fatalf("the KV socket answers %q", answer)
	}
	return k
}

// do gives the answer to a command; nil is none.
func (k *kvClient) do(words ...string) []byte {
	k.t.Helper()
	var command bytes.Buffer
	fmt.Fprintf(&command, "*%d\r\n", len(words))
	for _, word := range words {
		fmt.Fprintf(&command, "$%d\r\n%s\r\n", len(word), word)
	}
	if err := k.conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		k.t.Fatal(err)
	}
	if _, err := k.conn.Write(command.Bytes()); err != nil {
		k.t.Fatal(err)
	}
	line, err := k.in.ReadString('\n')
	if err != nil {
		k.t.Fatal(err)
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line[0] != '$' {
		return []byte(line[1:])
	}
	n, err := strconv.Atoi(line[1:])
	if err != nil || n < 0 {
		return nil
	}
	value := make([]byte, n+2)
	if _, err := io.ReadFull(k.in, value); err != nil {
		k.t.Fatal(err)
	}
	return value[:n]
}

const kvValue = 1 << 20

// kvBytes is the value of a key of a pod.
func kvBytes(owner string, n int) string {
	var seed [32]byte
	copy(seed[:], fmt.Sprint(owner, n))
	data := make([]byte, kvValue)
	_, _ = rand.NewChaCha8(seed).Read(data)
	return string(data)
}

// kvTenant is what `hearth kv stat --json` tells of a claim.
type kvTenant struct {
	Kind, Name string
	RAM, NVMe  struct{ Used, Budget, Blocks, Damaged int64 }
}

func (c cluster) kvTenant(ctx context.Context, node *lab.Node, claim string) (kvTenant, error) {
	out, err := c.hearth(ctx, node, "kv", "stat", "--json")
	if err != nil {
		return kvTenant{}, err
	}
	var told struct {
		Nodes []struct{ Tenants []kvTenant }
	}
	if err := json.Unmarshal([]byte(out), &told); err != nil {
		return kvTenant{}, fmt.Errorf("read kv stat: %w", err)
	}
	for _, stat := range told.Nodes {
		for _, tenant := range stat.Tenants {
			if tenant.Kind == "claim" && tenant.Name == claim {
				return tenant, nil
			}
		}
	}
	return kvTenant{}, fmt.Errorf("%w: %s has no blocks of claim %s", errAgain, node.Name(), claim)
}

// segments is the size of a node's segments.
func segments(t *testing.T, node *lab.Node) (sum int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(node.Root(), "var/lib/hearth/kv/blocks/*/*.seg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if info, err := os.Stat(file); err == nil {
			sum += info.Size()
		}
	}
	return sum
}

func TestCoreKVOfTwoClaimsStaysWithinItsBudgetsAndComesBackAfterAKill(t *testing.T) {
	c.begin(t)
	const kept, flood = 24, 200 // blocks of 1 MiB, in claims of 128 MiB RAM and as much NVMe
	node := c.Node(0)
	c.only(t, "demo/tiny", node)
	manifests := map[string]string{}
	for _, name := range []string{"kv-one", "kv-two"} {
		manifests[name] = strings.ReplaceAll(example(t, "one-gpu-sim"), "one-gpu", name)
		c.apply(t, manifests[name])
	}
	one, two := c.ready(t, "kv-one", 1)[0], c.ready(t, "kv-two", 1)[0]
	if one.Spec.NodeName != node.Name() || two.Spec.NodeName != node.Name() {
		t.Fatalf("the pods are on %s and %s, the weights on %s", one.Spec.NodeName, two.Spec.NodeName, node.Name())
	}
	claims := map[string]claim{"one": c.prepared(t, one), "two": c.prepared(t, two)}
	mine, other := c.kvOf(t, one), c.kvOf(t, two)
	for n := range kept {
		key := "model@1@0@" + strconv.Itoa(n)
		if answer := mine.do("SET", key, kvBytes("one", n)); string(answer) != "OK" {
			t.Fatalf("SET answers %q", answer)
		}
		if got := mine.do("GET", key); string(got) != kvBytes("one", n) {
			t.Fatalf("block %d comes back with %d bytes that differ", n, len(got))
		}
		if got := other.do("GET", key); got != nil {
			t.Fatalf("another claim reads block %d", n)
		}
	}
	// Used twice, they are worth the drive.
	eventually(t, "the blocks on NVMe", func(ctx context.Context) error {
		tenant, err := c.kvTenant(ctx, node, claims["one"].UID)
		if err == nil && tenant.NVMe.Blocks != kept {
			err = fmt.Errorf("%w: %+v", errAgain, tenant)
		}
		return err
	})
	for n := range flood {
		key := "flood@1@0@" + strconv.Itoa(n)
		if answer := other.do("SET", key, kvBytes("two", n)); string(answer) != "OK" {
			t.Fatalf("SET answers %q", answer)
		}
		other.do("GET", key)
	}
	for name, cl := range claims {
		tenant, err := c.kvTenant(t.Context(), node, cl.UID)
		if err != nil {
			t.Fatal(err)
		}
		if tenant.RAM.Used > 128<<20 || tenant.NVMe.Used > 128<<20 || tenant.RAM.Budget != 128<<20 || tenant.RAM.Damaged+tenant.NVMe.Damaged != 0 {
			t.Errorf("claim %s has %+v, it asked for 128Mi of each", name, tenant)
		}
	}
	if sum := segments(t, node); sum > 256<<20 || sum == 0 {
		t.Errorf("the segments of two claims of 128 MiB have %d bytes", sum)
	}
	for n := range kept {
		if got := mine.do("GET", "model@1@0@"+strconv.Itoa(n)); string(got) != kvBytes("one", n) {
			t.Fatalf("block %d is lost to another claim's load", n)
		}
	}
	pid := c.signal(t, node.Name(), "data", syscall.SIGKILL)
	c.roleBack(t, node.Name(), "data", pid)
	mine = c.kvOf(t, one)
	for n := range kept {
		if got := mine.do("GET", "model@1@0@"+strconv.Itoa(n)); string(got) != kvBytes("one", n) {
			t.Errorf("block %d is not back after a kill: %d bytes", n, len(got))
		}
	}
	for name, manifest := range manifests {
		c.remove(t, manifest)
		c.gone(t, name)
	}
	eventually(t, "the end of the claims' blocks", func(context.Context) error {
		if sum := segments(t, node); sum != 0 {
			return fmt.Errorf("%w: segments of %d bytes", errAgain, sum)
		}
		return nil
	})
}
