// Package bench measures Hearth's speed and memory as rows of own and reference,
// in turn, in one run: `hearth bench router`, `weights`, `dra`, `kv` and `net`. The
// parts under test are real processes started from this same program, or programs in
// the kernel; nothing here is imported by them.
package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
)

type options struct {
	json, full bool
	peers      bool
	pairs      int
	dir        string
	kubeconfig string
	only       []string
	progress   func(string)
}

// Command is `hearth bench`.
func Command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure speed and memory beside a reference",
		Long: "Measure speed and memory as rows of own and reference in turn, in one run.\n" +
			"Each bench stays under 10 minutes unless --full is given.",
	}
	cmd.PersistentFlags().BoolVar(&o.json, "json", false, "print one JSON object (schema "+Schema+") on standard output")
	cmd.PersistentFlags().BoolVar(&o.full, "full", false, "measure longer, and the sizes that take minutes")
	cmd.PersistentFlags().IntVar(&o.pairs, "pairs", 5, "interleaved pairs per row")
	cmd.PersistentFlags().StringVar(&o.dir, "dir", "", "directory for the files it writes (default: a new temporary one)")
	for _, b := range []struct {
		name, short string
		run         func(*cobra.Command, string, options) ([]Row, error)
	}{
		{"router", "CPU and memory per request against httputil.ReverseProxy", runRouter},
		{"weights", "Landing rate and mirror against the disk, the hash and a file server", runWeights},
		{"dra", "Prepare, Unprepare and publishing beside their fsyncs and a plain API call", runDRA},
		{"kv", "The KV store beside memory, drive, redis and valkey", runKV},
		{"net", "What network accounting costs: programs, walks, the agent, and traffic with it and without", runNet},
	} {
		one := &cobra.Command{Use: b.name, Short: b.short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			return runBench(cmd, b.name, o, b.run)
		}}
		if b.name == "router" {
			one.Flags().BoolVar(&o.peers, "peers", false, "measure nginx, vllm-router and smg too (found in PATH; see make bench-peers)")
		}
		if b.name == "dra" {
			one.Flags().StringVar(&o.kubeconfig, "kubeconfig", "", "publish the slices of many nodes at this cluster, and remove them (default: an API server of its own, where make lab has built one)")
		}
		if b.name == "kv" {
			one.Flags().StringSliceVar(&o.only, "only", nil, "measure these parts alone, of "+strings.Join(kvPartNames(), ", "))
		}
		if b.name == "net" {
			one.Flags().StringSliceVar(&o.only, "only", nil, "measure these parts alone, of "+strings.Join(netPartNames(), ", "))
		}
		cmd.AddCommand(one)
	}
	cmd.AddCommand(childCommands()...)
	cmd.AddCommand(originCommand(), manyCommand(), driverCommand(), loadCommand(), writeCommand(), accountantCommand(), packetsCommand())
	cmd.AddCommand(renderCommand())
	return cmd
}

func runBench(cmd *cobra.Command, name string, o options, run func(*cobra.Command, string, options) ([]Row, error)) error {
	if o.pairs < 1 {
		return terminal.Usagef("--pairs is %d, want at least 1", o.pairs)
	}
	dir := o.dir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "hearth-bench-"); err != nil {
			return fmt.Errorf("make bench directory: %w", err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
	}
	o.progress = func(line string) { _, _ = fmt.Fprintln(cmd.ErrOrStderr(), line) }
	rows, err := run(cmd, dir, o)
	if err != nil {
		return err
	}
	report := Report{Schema: Schema, Bench: name, Commit: commit(), Machine: thisMachine(dir), Rows: rows}
	if o.json {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
	}
	return printTable(cmd.OutOrStdout(), report)
}

func printTable(w io.Writer, r Report) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(t, "%s on %s, %d cores, kernel %s, %s\n", r.Bench, r.Machine.CPU, r.Machine.Cores, r.Machine.Kernel, r.Machine.Go)
	_, _ = fmt.Fprintln(t, "ROW\tVALUE\tUNIT\tREFERENCE\tRATIO\tAIM\tMET\tNOTE")
	for _, row := range r.Rows {
		ref := "-"
		if len(row.References) > 0 {
			ref = fmt.Sprintf("%s %.4g", row.References[0].Name, row.References[0].Value)
		}
		_, _ = fmt.Fprintf(t, "%s\t%.4g\t%s\t%s\t%.2f\t%.3g\t%t\t%s\n", row.Name, row.Value, row.Unit, ref, ratioOf(row), row.Aim, row.Met, row.Note)
		for _, further := range furtherOf(row) {
			_, _ = fmt.Fprintf(t, "\t\t\t%s %.4g\t%.2f\t\t\t\n", further.Name, further.Value, further.Ratio)
		}
	}
	return t.Flush()
}

// ratioOf is a row's ratio to its first reference, also where the aim is on the
// value; 0 without one.
func ratioOf(r Row) float64 {
	if len(r.References) == 0 {
		return 0
	}
	return r.References[0].Ratio
}

// furtherOf are a row's references after the first.
func furtherOf(r Row) []Reference { return r.References[min(1, len(r.References)):] }

func describe(r Row) string {
	s := fmt.Sprintf("%-24s %10.4g %s", r.Name, r.Value, r.Unit)
	if len(r.References) > 0 {
		s += fmt.Sprintf("   %s %.4g, ratio %.2f", r.References[0].Name, r.References[0].Value, ratioOf(r))
	}
	if !r.Met {
		s += "   (aim missed)"
	}
	return s
}

func runRouter(cmd *cobra.Command, dir string, o options) ([]Row, error) {
	b, err := startRouterBench(cmd.Context(), dir, o)
	if err != nil {
		return nil, err
	}
	defer b.stop()
	return b.rows(cmd.Context())
}

// childCommands are the hidden commands by which the bench starts its references.
func childCommands() []*cobra.Command {
	var addr, to, dir string
	engine := &cobra.Command{Use: "child-engine", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return newFixedEngine().serve(cmd.Context(), addr)
	}}
	reverse := &cobra.Command{Use: "child-reverseproxy", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to})
		// One setting is not the default: with two idle connections a host the
		// reference would mostly measure dialling.
		proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
		return serve(cmd, addr, proxy)
	}}
	files := &cobra.Command{Use: "child-fileserver", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return serve(cmd, addr, http.FileServer(http.Dir(dir)))
	}}
	for _, c := range []*cobra.Command{engine, reverse, files} {
		c.Flags().StringVar(&addr, "addr", "", "where to listen")
	}
	reverse.Flags().StringVar(&to, "to", "", "where to send requests")
	files.Flags().StringVar(&dir, "root", "", "directory to serve")
	return []*cobra.Command{engine, reverse, files}
}

func serve(cmd *cobra.Command, addr string, h http.Handler) error {
	listener, err := identity.ListenTCP(cmd.Context(), addr, 0)
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { <-cmd.Context().Done(); _ = server.Close() }()
	if err := server.Serve(listener); err != nil && cmd.Context().Err() == nil {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}
