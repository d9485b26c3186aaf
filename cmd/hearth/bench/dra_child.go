package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// draGPUs is how many GPUs the node has: enough for 8 claims of 8 devices.
const draGPUs = 64

// draDevices are the node's GPUs, by ID.
var draDevices = sync.OnceValue(func() []device.Device {
	devices, err := simgpu.Parse("bench", []byte(fmt.Sprintf("apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\ndeviceNodes: [/dev/null]\ngpus: [{product: h200, count: %d}]\n", draGPUs)), draNode)
	if err != nil {
		slog.Error("the bench's inventory is none", slog.Any("error", err))
	}
	return devices
})

// draArtifact is the artifact that is warm on the node.
func draArtifact() stock.Artifact {
	return stock.Artifact{
		Ref:    artifact.Ref{Scheme: artifact.SchemeHub, Name: "bench/model", Revision: artifact.DefaultRevision},
		Digest: artifact.Digest{1, 2, 3, 4}, Commit: "0123456789abcdef0123456789abcdef01234567", Model: "model", Format: "safetensors", Size: 16 * units.GiB,
	}
}

// draStats is what the child tells of its ledger, and settled of its memory.
type draStats struct {
	Entries  int           `json:"entries"`
	Syncs    int64         `json:"syncs"`
	SyncTime time.Duration `json:"syncTime"`
	// Where it was asked to settle:
	Heap       uint64 `json:"heap"` // live bytes
	Goroutines int    `json:"goroutines"`
}

// driverCommand is the hidden child that is the driver: with the ledger and
// its sockets below dir, against an API server.
func driverCommand() *cobra.Command {
	var addr, dir, cdi, api string
	cmd := &cobra.Command{Use: "child-driver", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serveDriver(cmd, addr, dir, cdi, api)
	}}
	cmd.Flags().StringVar(&addr, "addr", "", "socket on which it tells of its ledger")
	cmd.Flags().StringVar(&dir, "dir", "", "directory of its files")
	cmd.Flags().StringVar(&cdi, "cdi", "", "directory of CDI files")
	cmd.Flags().StringVar(&api, "api", "", "URL of the API server")
	return cmd
}

func serveDriver(cmd *cobra.Command, addr, dir, cdiDir, api string) (err error) {
	slog.SetLogLoggerLevel(slog.LevelWarn) // what it says of every claim is not for a bench's reader
	// No limit of its own: a rate limit of the client would be what is measured.
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api, QPS: -1})
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	drive := stock.Drive{Tier: "nvme", Free: units.TiB}
	cache, err := simstock.OpenCache(filepath.Join(dir, "stock"), drive)
	if err != nil {
		return err
	}
	if err := cache.Add(draArtifact()); err != nil {
		return err
	}
	kv, err := simstock.OpenKV(filepath.Join(dir, "kv"), stock.Space{Memory: units.TiB})
	if err != nil {
		return err
	}
	books, err := ledger.Open(ledger.Options{Dir: filepath.Join(dir, "claims"), BootID: "bench"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, books.Close()) }()
	driver, err := dradriver.New(dradriver.Options{
		Node: draNode, Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true}, Kube: client,
		Ledger: books, CDI: cdi.New(cdi.Options{Dir: cdiDir}), Cache: cache, KV: kv, Devices: dradriver.StaticInventory(draDevices()),
		PluginDir: filepath.Join(dir, "plugin"), RegistrarDir: filepath.Join(dir, "registry"), CDIDir: cdiDir,
	})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(cmd.Context())
	group.Go(func() error { return driver.Run(ctx) })
	group.Go(func() error {
		if err := waitFor(ctx, filepath.Join(dir, "plugin", "dra.sock")); err != nil {
			return err
		}
		return serveSocket(ctx, addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s := books.Stats()
			stats := draStats{Entries: s.Entries, Syncs: s.Syncs, SyncTime: s.SyncTime}
			if r.URL.Path == settlePath {
				stats.Heap, stats.Goroutines = settle(r.Context(), driver), runtime.NumGoroutine()
			}
			_ = json.NewEncoder(w).Encode(stats)
		}))
	})
	return group.Wait()
}

// serveSocket serves on a unix socket until ctx ends.
func serveSocket(ctx context.Context, path string, h http.Handler) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

// settlePath asks the child to do what it does every few minutes, and to give
// back the memory that nothing needs.
const settlePath = "/settle"

func settle(ctx context.Context, driver *dradriver.Driver) uint64 {
	if err := driver.Recover(ctx); err != nil {
		slog.Warn("recovery failed", slog.Any("error", err))
	}
	runtime.GC() // pools let go of what they keep at the second collection
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// waitFor waits until a file is there.
func waitFor(ctx context.Context, path string) error {
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
