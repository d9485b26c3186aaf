//go:build outside

package outside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// lmcacheCommand runs a script of testdata/lmcache in the Python that has LMCache.
func lmcacheCommand(ctx context.Context, t *testing.T, r *rig.Rig, name, script string, args ...string) rig.Command {
	t.Helper()
	path := filepath.Join(r.Root, "test", "outside", "testdata", "lmcache", script+".py")
	return rig.Command{
		Name: name, Path: filepath.Join(partOnce(ctx, t, r, "lmcache"), "python"), Args: append([]string{path}, args...),
		// The engine's keys are made by Python's own hash. Nothing may be asked of a hub.
		Env: []string{"PYTHONHASHSEED=0", "PYTHONDONTWRITEBYTECODE=1", "LMCACHE_DISABLE_BANNER=1", "HF_HUB_OFFLINE=1", "LMCACHE_TRACK_USAGE=false"},
	}
}

// engineResult is what testdata/lmcache/engine.py prints.
type engineResult struct {
	Tokens, Puts, Found, Retrieved int
	SHA256, Wanted                 string
}

// engineChunks is how many full chunks an engine stores.
const engineChunks = 12

func engineCommand(ctx context.Context, t *testing.T, r *rig.Rig, mode, url string, extra map[string]any) rig.Command {
	t.Helper()
	if extra == nil {
		extra = map[string]any{}
	}
	text, err := json.Marshal(extra)
	if err != nil {
		t.Fatal(err)
	}
	return lmcacheCommand(ctx, t, r, "engine-"+mode, "engine", mode, url, "11", strconv.Itoa(engineChunks), string(text))
}

// wantStored fails where the engine did not store and find all.
func wantStored(t *testing.T, got engineResult) {
	t.Helper()
	if got.Puts < engineChunks || got.Found != got.Tokens || got.Tokens == 0 {
		t.Fatalf("stored: %+v", got)
	}
}

// wantLoaded fails where the engine did not load all, byte for byte.
func wantLoaded(t *testing.T, got, stored engineResult) {
	t.Helper()
	if got.Found != stored.Tokens || got.Retrieved != stored.Tokens || got.SHA256 != stored.SHA256 || got.Wanted != stored.SHA256 {
		t.Errorf("loaded: %+v, stored: %+v", got, stored)
	}
}

// startAnew ends the agent as a service manager does and starts it again.
func startAnew(ctx context.Context, t *testing.T, kv *rig.KVServer) {
	t.Helper()
	kv.End(30 * time.Second)
	if err := kv.Err(); err != nil {
		t.Fatalf("the agent ended with %v: %s", err, kv.LogTail())
	}
	if err := kv.Restart(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestFullAnLMCacheEngineLoadsWhatAnotherStoredBeforeTheAgentWasStartedAnew(t *testing.T) {
	t.Parallel()
	for _, url := range []struct{ name, form string }{
		{"redis", "redis://%s"}, {"redis in RESP2", "redis://%s/0?protocol=2"}, {"unix", "unix://%s"}, {"valkey", "valkey://%s"},
	} {
		t.Run(url.name, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			kv := startKV(ctx, t, r, openTenant)
			at := kv.Addr
			if url.name == "unix" {
				at = kv.Socket(openTenant.Name)
			}
			var stored, loaded, again engineResult
			runJSON(ctx, t, r, engineCommand(ctx, t, r, "store", fmt.Sprintf(url.form, at), nil), &stored)
			wantStored(t, stored)
			runJSON(ctx, t, r, engineCommand(ctx, t, r, "load", fmt.Sprintf(url.form, at), nil), &loaded)
			wantLoaded(t, loaded, stored)
			startAnew(ctx, t, kv)
			runJSON(ctx, t, r, engineCommand(ctx, t, r, "load", fmt.Sprintf(url.form, at), nil), &again)
			wantLoaded(t, again, stored)
		})
	}
}

// An engine with a password: valkey:// hands its client user and password the
// wrong way round, so they are written so.
func TestFullAnLMCacheEngineShowsItsTenantsPassword(t *testing.T) {
	t.Parallel()
	tenant := openTenant
	tenant.Password = "s3cret"
	for name, extra := range map[string]map[string]any{
		"redis://default:s3cret@%s": nil,
		"valkey://%s":               {"valkey_username": "s3cret", "valkey_password": "default"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			kv := startKV(ctx, t, r, tenant)
			var stored, loaded engineResult
			runJSON(ctx, t, r, engineCommand(ctx, t, r, "store", fmt.Sprintf(name, kv.Addr), extra), &stored)
			wantStored(t, stored)
			runJSON(ctx, t, r, engineCommand(ctx, t, r, "load", fmt.Sprintf(name, kv.Addr), extra), &loaded)
			wantLoaded(t, loaded, stored)
		})
	}
}

// The engine's resp:// asks for a key and only then notes that it waits for the
// answer: one that comes at once is lost and the engine waits for ever, at
// whichever server. So its server is put behind a watch that holds each answer
// back a little, and that knows what is owed: an engine that hangs although it
// was answered is run again, one that was not answered is the server's fault.
func TestFullAnLMCacheEngineOfRespLoadsWhatAnotherStored(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv := startKV(ctx, t, r, openTenant)
	run := func(mode string) engineResult {
		t.Helper()
		const tries = 5
		for try := range tries {
			watch := startWatch(ctx, t, kv.Addr)
			c := engineCommand(ctx, t, r, mode, "resp://"+watch.addr, nil)
			c.Name += strconv.Itoa(try)
			limited, cancel := watch.untilStuck(ctx)
			out, err := r.Run(limited, c)
			stuck := limited.Err() != nil && ctx.Err() == nil
			cancel()
			asked, owed := watch.end()
			if stuck && asked > 0 && owed == 0 {
				t.Logf("%s, try %d: the engine waits although all its %d commands were answered", mode, try, asked)
				continue
			}
			var got engineResult
			if err = errors.Join(err, json.Unmarshal(out, &got)); err != nil || owed != 0 {
				t.Fatalf("%s: %v: %d commands, %d not answered", mode, err, asked, owed)
			}
			return got
		}
		t.Fatalf("%s: the engine lost an answer in each of %d tries", mode, tries)
		return engineResult{}
	}
	stored := run("store")
	wantStored(t, stored)
	wantLoaded(t, run("load"), stored)
	startAnew(ctx, t, kv)
	wantLoaded(t, run("load"), stored)
}

// l2 is how LMCache's server is told of a store behind it.
func l2(kind string, s *rig.KVServer) string {
	if kind == "valkey" {
		return fmt.Sprintf(`{"type":"valkey","startup_nodes":%q,"num_workers":4}`, s.Addr)
	}
	return fmt.Sprintf(`{"type":"resp","host":%q,"port":%d,"num_workers":8,"max_capacity_gb":0}`, s.Host(), s.Port())
}

var (
	checksumLine = regexp.MustCompile(`\[seq (\d+)/warm\] CHECKSUM: ([0-9a-f]+)`)
	coldLine     = regexp.MustCompile(`\[seq \d+/cold\] LOOKUP: (\d+)/(\d+) chunks hit`)
)

func TestFullLMCachesServerFindsItsChunksAfterItAndTheAgentWereStartedAnew(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"resp", "valkey"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			kv := startKV(ctx, t, r, openTenant)
			const requests, chunks = 6, 8
			// bench starts the server with nothing in its memory, has it store and
			// fetch, and gives the checksums of what was fetched.
			bench := func(name string) (sums [][]string, cold []int) {
				t.Helper()
				rpc, http := freeAddrs(ctx, t)
				server, err := r.Start(lmcacheCommand(ctx, t, r, name+"-server", "command", "server",
					"--host", rpc.host, "--port", rpc.port, "--http-host", http.host, "--http-port", http.port, "--chunk-size", "64",
					"--supported-transfer-mode", "auto", "--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--no-l1-use-lazy",
					"--disable-observability", "--l2-adapter", l2(kind, kv)))
				if err != nil {
					t.Fatal(err)
				}
				if err := rig.Until(ctx, "LMCache's server", func(ctx context.Context) (bool, error) {
					return rig.Answers(ctx, "http://"+http.String()+"/healthcheck")
				}, server); err != nil {
					t.Fatal(err)
				}
				out, err := r.Run(ctx, lmcacheCommand(ctx, t, r, name, "command", "bench", "server",
					"--rpc-url", "tcp://"+rpc.String(), "--url", "http://"+http.String(), "--mode", "cpu", "--num-tokens", strconv.Itoa(64*chunks),
					"--kvcache-shape-spec", "(2,128,16,8,64):bfloat16:4", "--start", "0", "--end", strconv.Itoa(requests), "--interval", "0.1"))
				if err != nil {
					t.Fatalf("%v: %s", err, server.LogTail())
				}
				for _, found := range checksumLine.FindAllStringSubmatch(string(out), -1) {
					sums = append(sums, found[1:])
				}
				for _, found := range coldLine.FindAllStringSubmatch(string(out), -1) {
					hit, _ := strconv.Atoi(found[1])
					cold = append(cold, hit)
				}
				if len(sums) != requests || len(cold) != requests {
					t.Fatalf("%s printed %d checksums of %d: %s", name, len(sums), requests, out)
				}
				server.End(30 * time.Second)
				return sums, cold
			}
			first, cold := bench("first")
			if slices.Max(cold) != 0 {
				t.Errorf("the first requests found %v chunks", cold)
			}
			startAnew(ctx, t, kv)
			second, found := bench("second")
			if !slices.EqualFunc(first, second, slices.Equal) {
				t.Errorf("checksums are %v, want %v", second, first)
			}
			if slices.Min(found) != chunks {
				t.Errorf("after the restart requests found %v chunks of %d", found, chunks)
			}
		})
	}
}

// hostPort is an address in its two halves.
type hostPort struct{ host, port string }

func (h hostPort) String() string { return net.JoinHostPort(h.host, h.port) }

func freeAddrs(ctx context.Context, t *testing.T) (a, b hostPort) {
	t.Helper()
	for _, into := range []*hostPort{&a, &b} {
		addr, err := rig.FreeAddr(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if into.host, into.port, err = net.SplitHostPort(addr); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

func TestFullLMCachesOwnTestOfAStoreFindsEveryByte(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"resp", "valkey"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			kv := startKV(ctx, t, r, openTenant)
			for i, load := range []struct {
				keys, kib int
				hits      string
			}{{16, 64, "0"}, {32, 2048, "0.5"}, {4, 32 << 10, "1"}} {
				out, err := r.Run(ctx, lmcacheCommand(ctx, t, r, fmt.Sprint("bench-l2-", i), "command", "bench", "l2", "--l2-adapter", l2(kind, kv),
					"--num-keys", strconv.Itoa(load.keys), "--data-size-kb", strconv.Itoa(load.kib), "--rounds", "3", "--no-skip-verify", "--lookup-max-hit-rate", load.hits))
				if err != nil {
					t.Fatal(err)
				}
				for _, want := range []string{
					fmt.Sprintf("success_keys=%d/%d", load.keys, load.keys), fmt.Sprintf("loaded=%d/%d", load.keys, load.keys),
				} {
					if n := bytes.Count(out, []byte(want)); n != 4 {
						t.Errorf("%d of 4 rounds say %s: %s", n, want, out)
					}
				}
				if want := fmt.Sprintf("All %d keys data verified OK", load.keys); !bytes.Contains(out, []byte(want)) {
					t.Errorf("the data is not verified: %s", out)
				}
			}
		})
	}
}
