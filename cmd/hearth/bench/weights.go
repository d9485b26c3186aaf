package bench

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// weightsBench measures the agent's landing rate and its mirror. Origin and agent
// are processes of their own.
type weightsBench struct {
	dir    string
	root   string // the origin's repositories
	origin *process
	runs   int
}

const gib = float64(units.GiB)

// landingSize is the GiB that a landing row pulls, in files of 1 GiB: enough that
// a drive's and a page cache's first burst is not the whole story.
const landingSize = 4

// originRepo is the repository of size GiB at the bench's origin.
func originRepo(size int) string { return fmt.Sprintf("bench/%dGiB", size) }

func runWeights(cmd *cobra.Command, dir string, o options) ([]Row, error) {
	ctx := cmd.Context()
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	root := filepath.Join(dir, "origin")
	// Only what a row reads is written before it: gigabytes of dirty pages would be
	// written back in the middle of the landing rows.
	if err := makeRepos(root, 1, landingSize); err != nil {
		return nil, err
	}
	w := &weightsBench{dir: dir, root: root}
	if w.origin, err = start(ctx, -1, addr, "bench", "child-origin", "--addr", addr, "--root", root); err != nil {
		return nil, err
	}
	defer w.origin.stop()

	if err := w.hashAtOrigin(ctx, 1, landingSize); err != nil {
		return nil, err
	}
	var rows []Row
	add := func(row Row, err error) error {
		if err == nil {
			o.progress(describe(row))
			rows = append(rows, row)
		}
		return err
	}
	landing, err := w.landing(ctx, o.pairs)
	if err := add(landing, err); err != nil {
		return nil, err
	}
	if err := add(w.manifest(ctx, o.pairs)); err != nil {
		return nil, err
	}
	mirror, memory, err := w.mirrorAndMemory(ctx, o.pairs)
	if err != nil {
		return nil, err
	}
	for _, row := range append([]Row{mirror}, memory...) {
		if err := add(row, nil); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

func makeRepos(root string, sizes ...int) error {
	for _, size := range sizes {
		repo := filepath.Join(root, originRepo(size))
		if err := os.MkdirAll(repo, 0o755); err != nil {
			return fmt.Errorf("make origin: %w", err)
		}
		if err := writeShards(repo, size); err != nil {
			return err
		}
	}
	return nil
}

// writeShards makes a repository of size files of 1 GiB each (hard links of one
// another would be one blob, so each differs in its first bytes).
func writeShards(repo string, size int) error {
	if err := os.WriteFile(filepath.Join(repo, "config.json"), []byte(`{"model_type":"bench"}`), 0o644); err != nil {
		return fmt.Errorf("make origin: %w", err)
	}
	piece := make([]byte, 1<<20)
	for i := range piece {
		piece[i] = byte(i * 2654435761 >> 13)
	}
	for i := range size {
		f, err := os.Create(filepath.Join(repo, fmt.Sprintf("weights-%02d.bin", i)))
		if err != nil {
			return fmt.Errorf("make origin: %w", err)
		}
		copy(piece, fmt.Sprintf("%d of %d", i, size))
		for range 1 << 10 {
			if _, err := f.Write(piece); err != nil {
				return fmt.Errorf("make origin: %w", err)
			}
		}
		if err := f.Close(); err != nil {
			return fmt.Errorf("make origin: %w", err)
		}
	}
	return nil
}

// hashAtOrigin lets the origin hash its files before they are pulled: a hub knows
// its digests long before anyone asks.
func (w *weightsBench) hashAtOrigin(ctx context.Context, sizes ...int) error {
	for _, size := range sizes {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+w.origin.addr+"/api/models/"+originRepo(size)+"/tree/main", nil)
		if err != nil {
			return fmt.Errorf("make request: %w", err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return fmt.Errorf("list origin: %w", err)
		}
		_, err = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		if err != nil {
			return fmt.Errorf("list origin: %w", err)
		}
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("list origin: status %d", response.StatusCode)
		}
	}
	return nil
}

// node is one agent process with an empty store.
type node struct {
	*process
	dir, mirror string
	client      *admin.Client
}

func (w *weightsBench) node(ctx context.Context) (*node, error) {
	w.runs++
	n := &node{dir: filepath.Join(w.dir, fmt.Sprintf("node-%d", w.runs))}
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make node directory: %w", err)
	}
	var addrs [3]string
	for i := range addrs {
		addr, err := freeAddr(ctx)
		if err != nil {
			return nil, err
		}
		addrs[i] = addr
	}
	config, socket := filepath.Join(n.dir, "agent.yaml"), filepath.Join(n.dir, "agent.sock")
	if err := os.WriteFile(config, agentConfig(n.dir, socket, addrs[0], addrs[1], addrs[2], "http://"+w.origin.addr), 0o600); err != nil {
		return nil, fmt.Errorf("write agent configuration: %w", err)
	}
	var err error
	if n.process, err = start(ctx, -1, addrs[0], "agent", "--config", config, "--node", "bench"); err != nil {
		return nil, err
	}
	n.mirror = addrs[0]
	if n.client, err = admin.NewClient(socket); err != nil {
		n.stop()
		return nil, fmt.Errorf("reach agent: %w", err)
	}
	return n, nil
}

func (n *node) end() {
	n.client.Close()
	n.stop()
	_ = os.RemoveAll(n.dir)
}

// pull lands a repository of size GiB and returns its rate in bytes per second.
func (n *node) pull(ctx context.Context, size int) (float64, error) {
	begin := time.Now()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: originRepo(size), Revision: artifact.DefaultRevision}
	if _, err := n.client.Pull(ctx, admin.PullRequest{Ref: ref.String()}, func(admin.Progress) {}); err != nil {
		return 0, fmt.Errorf("pull %s: %w", ref, err)
	}
	return float64(size) * gib / time.Since(begin).Seconds(), nil
}

func (w *weightsBench) landing(ctx context.Context, n int) (Row, error) {
	var bounds [3][]float64
	own := func() (float64, error) {
		node, err := w.node(ctx)
		if err != nil {
			return 0, err
		}
		defer node.end()
		return node.pull(ctx, landingSize)
	}
	limit := func() (float64, error) {
		parts, err := w.limits(ctx)
		if err != nil {
			return 0, err
		}
		for i, v := range parts {
			bounds[i] = append(bounds[i], v)
		}
		return min(parts[0], parts[1], parts[2]), nil
	}
	row, err := rounds(Row{
		Name: fmt.Sprintf("landing_rate_%dGiB", landingSize), Unit: "B/s", Better: higher, Aim: 0.9,
		Note: "pull of files of 1 GiB to Ready (resolved, received, hashed, synced, published)",
	}, n, own, contender{"slowest of the limits", limit})
	if err != nil {
		return row, err
	}
	for i, name := range []string{"raw write + fsync", "sha256, one stream", "cores / CPU of origin, receive, hash, write"} {
		v := median(bounds[i])
		row.References = append(row.References, Reference{Name: name, Value: v, Ratio: row.Value / v})
	}
	return row, nil
}

// limits measures writing as much as a landing row with one fsync, hashing one
// stream, and what the cores could do if they did nothing but origin, receive, hash and write.
func (w *weightsBench) limits(ctx context.Context) ([3]float64, error) {
	var out [3]float64
	buffer := make([]byte, 1<<20)
	for i := range buffer {
		buffer[i] = byte(i * 31)
	}
	path := filepath.Join(w.dir, "raw")
	cpu0, begin := ownCPU(), time.Now()
	f, err := os.Create(path)
	if err != nil {
		return out, fmt.Errorf("write raw file: %w", err)
	}
	defer func() { _ = os.Remove(path) }()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, landingSize*int64(units.GiB)); err != nil {
		return out, fmt.Errorf("allocate raw file: %w", err)
	}
	for range landingSize << 10 {
		if _, err := f.Write(buffer); err != nil {
			return out, fmt.Errorf("write raw file: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return out, fmt.Errorf("sync raw file: %w", err)
	}
	if err := f.Close(); err != nil {
		return out, fmt.Errorf("close raw file: %w", err)
	}
	out[0] = landingSize * gib / time.Since(begin).Seconds()
	writeCPU := (ownCPU() - cpu0) / landingSize

	cpu0, begin = ownCPU(), time.Now()
	h := sha256.New()
	for range 1 << 10 {
		h.Write(buffer)
	}
	out[1] = gib / time.Since(begin).Seconds()
	hashCPU := ownCPU() - cpu0

	cpu0 = ownCPU()
	origin0, err := w.origin.cpu()
	if err != nil {
		return out, err
	}
	if _, err := drain(ctx, "http://"+w.origin.addr+"/"+originRepo(1)+"/resolve/main/weights-00.bin", 8); err != nil {
		return out, err
	}
	origin1, err := w.origin.cpu()
	if err != nil {
		return out, err
	}
	sum := writeCPU + hashCPU + (ownCPU() - cpu0) + (origin1 - origin0)
	out[2] = float64(runtime.NumCPU()) * gib / sum.Seconds()
	return out, nil
}

// drain reads a file of 1 GiB over HTTP in so many ranged streams and returns the rate.
func drain(ctx context.Context, url string, streams int) (float64, error) {
	begin := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	part := int64(units.GiB) / int64(streams)
	for i := range streams {
		group.Go(func() error {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			if streams > 1 {
				request.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", int64(i)*part, int64(i+1)*part-1))
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				return fmt.Errorf("get: %w", err)
			}
			defer func() { _ = response.Body.Close() }()
			if response.StatusCode >= 300 {
				return fmt.Errorf("get %s: status %d", url, response.StatusCode)
			}
			n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, response.Body, make([]byte, 256<<10))
			if err != nil {
				return fmt.Errorf("get %s: %w", url, err)
			}
			if n != part {
				return fmt.Errorf("get %s: %d of %d bytes", url, n, part)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	return gib / time.Since(begin).Seconds(), nil
}

// mirrorAndMemory pulls 1, 4 and 16 GiB on fresh agents for their peak memory, and
// reads the 1 GiB file back through the first one's mirror. The 16 GiB are written
// when that row is over: their write-back would take turns with it.
func (w *weightsBench) mirrorAndMemory(ctx context.Context, n int) (Row, []Row, error) {
	var mirror Row
	var peaks []float64
	var memory []Row
	sizes := []int{1, 4, 16}
	for _, size := range sizes {
		if err := func() error {
			if size > landingSize {
				if err := makeRepos(w.root, size); err != nil {
					return err
				}
				if err := w.hashAtOrigin(ctx, size); err != nil {
					return err
				}
			}
			node, err := w.node(ctx)
			if err != nil {
				return err
			}
			defer node.end()
			if _, err := node.pull(ctx, size); err != nil {
				return err
			}
			peak, err := node.rss("VmHWM")
			if err != nil {
				return err
			}
			peaks = append(peaks, float64(peak)/(1<<20))
			row, err := alone(Row{Name: fmt.Sprintf("pull_rss_%dGiB", size), Unit: "MiB", Better: lower, Aim: 150, Note: "peak resident memory of the agent"}, 1,
				func() (float64, error) { return peaks[len(peaks)-1], nil })
			if err != nil {
				return err
			}
			memory = append(memory, row)
			if size != 1 {
				return nil
			}
			mirror, err = w.mirror(ctx, node, n)
			return err
		}(); err != nil {
			return mirror, nil, err
		}
	}
	last := len(sizes) - 1
	slope := (peaks[last] - peaks[0]) / float64(sizes[last]-sizes[0])
	memory = append(memory, Row{
		Name: "pull_rss_slope", Value: slope, Unit: "MiB/GiB", Better: lower, Pairs: 1, Spread: [2]float64{slope, slope}, Aim: 1, Met: slope < 1,
		Note: "growth of the peak from 1 to 16 GiB",
	})
	return mirror, memory, nil
}

func (w *weightsBench) mirror(ctx context.Context, node *node, n int) (Row, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return Row{}, err
	}
	files, err := start(ctx, -1, addr, "bench", "child-fileserver", "--addr", addr, "--root", filepath.Join(w.root, originRepo(1)))
	if err != nil {
		return Row{}, err
	}
	defer files.stop()
	through := func() (float64, error) {
		return drain(ctx, "http://"+node.mirror+"/"+originRepo(1)+"/resolve/main/weights-00.bin", 1)
	}
	plain := func() (float64, error) { return drain(ctx, "http://"+addr+"/weights-00.bin", 1) }
	for _, warm := range []func() (float64, error){through, plain} {
		if _, err := warm(); err != nil {
			return Row{}, err
		}
	}
	return rounds(Row{Name: "mirror_rate", Unit: "B/s", Better: higher, Aim: 0.95, Note: "1 GiB from the page cache, one stream"},
		max(n, 9), through, contender{"http.FileServer", plain})
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// originCommand is the hidden child that serves the generated repositories.
func originCommand() *cobra.Command {
	var addr, root string
	cmd := &cobra.Command{Use: "child-origin", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serve(cmd, addr, hub.New(hub.Options{Dir: root}))
	}}
	cmd.Flags().StringVar(&addr, "addr", "", "where to listen")
	cmd.Flags().StringVar(&root, "root", "", "directory of the repositories")
	return cmd
}
