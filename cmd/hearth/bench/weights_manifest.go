package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

const (
	// manyFiles is the most files an artifact may have, manyPage what the hub
	// puts on a page of a tree.
	manyFiles = 100_000
	manyPage  = 1000
	// manyAim is how long such a listing may take to become a manifest, in seconds.
	manyAim  = 2
	manyRepo = "bench/many"
)

// manifest measures how long a ref of 100,000 files, whose SHA-256 the source
// gives, takes from the first question to the durable manifest, beside reading
// and decoding the same pages. Each run asks for a ref of its own.
func (w *weightsBench) manifest(ctx context.Context, n int) (Row, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return Row{}, err
	}
	many := &weightsBench{dir: w.dir, runs: 1000}
	if many.origin, err = start(ctx, -1, addr, "bench", "child-many", "--addr", addr); err != nil {
		return Row{}, err
	}
	defer many.origin.stop()
	node, err := many.node(ctx)
	if err != nil {
		return Row{}, err
	}
	defer node.end()
	asked := 0
	own := func() (float64, error) {
		asked++
		begin := time.Now()
		request, err := http.NewRequestWithContext(ctx, http.MethodHead, fmt.Sprintf("http://%s/%s/resolve/r%d/%s", node.mirror, manyRepo, asked, manyPath(0)), nil)
		if err != nil {
			return 0, fmt.Errorf("make request: %w", err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, fmt.Errorf("resolve: %w", err)
		}
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return 0, fmt.Errorf("resolve: status %d", response.StatusCode)
		}
		return time.Since(begin).Seconds(), nil
	}
	row, err := rounds(Row{
		Name: "resolve_100k_files", Unit: "s", Better: lower,
		Note: "listing of 100,000 files with SHA-256, from the question to the durable manifest",
	}, n, own, contender{"the same pages read and decoded", func() (float64, error) { return readPages(ctx, "http://"+addr) }})
	return onValue(row, manyAim), err
}

// readPages reads and decodes every page of the tree and gives the seconds.
func readPages(ctx context.Context, origin string) (float64, error) {
	begin := time.Now()
	files := 0
	for at := origin + "/api/models/" + manyRepo + "/tree/" + manyCommit; at != ""; {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
		if err != nil {
			return 0, fmt.Errorf("make request: %w", err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, fmt.Errorf("read page: %w", err)
		}
		body, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil {
			return 0, fmt.Errorf("read page: %w", err)
		}
		var page []struct {
			Type string `json:"type"`
			OID  string `json:"oid"`
			Size int64  `json:"size"`
			Path string `json:"path"`
			LFS  *struct {
				OID  string `json:"oid"`
				Size int64  `json:"size"`
			} `json:"lfs"`
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return 0, fmt.Errorf("decode page: %w", err)
		}
		files += len(page)
		at, _, _ = strings.Cut(strings.TrimPrefix(response.Header.Get("Link"), "<"), ">")
	}
	if files != manyFiles {
		return 0, errors.New("read pages: not every file was listed")
	}
	return time.Since(begin).Seconds(), nil
}

const manyCommit = "0123456789abcdef0123456789abcdef01234567"

func manyPath(i int) string { return fmt.Sprintf("shards/%03d/part-%06d.bin", i/manyPage, i) }

// manyHub serves the listing of one repository, made once.
func manyHub() http.Handler {
	pages := make([]string, manyFiles/manyPage)
	for p := range pages {
		entries := make([]string, manyPage)
		for i := range entries {
			n := p*manyPage + i
			entries[i] = fmt.Sprintf(`{"type":"file","oid":"%040x","size":%d,"path":%q,"lfs":{"oid":"%064x","size":%d,"pointerSize":134}}`, n, n+1, manyPath(n), n+1, n+1)
		}
		pages[p] = "[" + strings.Join(entries, ",") + "]"
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/models/"+manyRepo+"/revision/{rev}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"id":%q,"sha":%q,"private":false,"gated":false}`, manyRepo, manyCommit)
	})
	mux.HandleFunc("GET /api/models/"+manyRepo+"/tree/{rev}", func(w http.ResponseWriter, r *http.Request) {
		p, err := strconv.Atoi(r.URL.Query().Get("cursor"))
		if err != nil || p < 0 || p >= len(pages) {
			p = 0
		}
		w.Header().Set("Content-Type", "application/json")
		if p+1 < len(pages) {
			w.Header().Set("Link", fmt.Sprintf(`<http://%s%s?recursive=true&cursor=%d>; rel="next"`, r.Host, r.URL.Path, p+1))
		}
		_, _ = io.WriteString(w, pages[p])
	})
	return mux
}

// manyCommand is the hidden child that serves that listing.
func manyCommand() *cobra.Command {
	var addr string
	cmd := &cobra.Command{Use: "child-many", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serve(cmd, addr, manyHub())
	}}
	cmd.Flags().StringVar(&addr, "addr", "", "where to listen")
	return cmd
}
