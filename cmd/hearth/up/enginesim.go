package up

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/test/sim/engine"
)

type engineSimFlags struct {
	model, digest, host string
	port                int
	idle                time.Duration
	work                string
	decode, slope       float64
	options             engine.Options
}

// EngineSimCommand is `hearth engine-sim`: one simulated engine that answers
// until it is told to stop.
func EngineSimCommand() *cobra.Command {
	var f engineSimFlags
	c := &cobra.Command{
		Use:   "engine-sim --model DIR",
		Short: "Run a simulated OpenAI-compatible engine",
		Long: `engine-sim answers the OpenAI-compatible API with made-up text, at the pace of a
prefill rate and a decode step model, with an LRU prefix cache and vLLM's metric
names. It reads every byte of the model directory first; a missing or damaged
file stops it. A token is four bytes. Its speed says nothing about an engine's.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runEngineSim(c, f) },
	}
	flags := c.Flags()
	flags.StringVar(&f.model, "model", "", "model directory to read (required)")
	flags.StringVar(&f.digest, "expect-digest", "", "artifact digest that the directory must have")
	flags.StringVar(&f.host, "host", "127.0.0.1", "address to listen on")
	flags.IntVar(&f.port, "port", 8000, "port to listen on; 0 takes a free one")
	flags.StringVar(&f.options.ServedModel, "served-model", "sim", "model name to answer to")
	flags.Float64Var(&f.options.PrefillRate, "prefill-rate", 8000, "prompt tokens computed per second")
	flags.Float64Var(&f.decode, "decode-ms", 10, "milliseconds of one decode step of a lone request")
	flags.Float64Var(&f.slope, "decode-slope-ms", 0.5, "milliseconds that each further running request adds to a step")
	flags.IntVar(&f.options.KVTokens, "kv-tokens", 65536, "capacity of the block cache in tokens")
	flags.IntVar(&f.options.BlockTokens, "block-tokens", 16, "tokens of one block")
	flags.IntVar(&f.options.MaxRunning, "max-running", 16, "requests computed at once; further ones queue")
	flags.Uint64Var(&f.options.Seed, "seed", 0, "seed of the text")
	flags.Float64Var(&f.options.Speedup, "speedup", 1, "divide every simulated duration by this")
	flags.BoolVar(&f.options.AllowFaults, "allow-faults", false, "open POST /sim/fault")
	flags.DurationVar(&f.idle, "idle-timeout", 0, "close connections idle for so long; 0 never")
	flags.StringVar(&f.work, "work-log", "", "append one JSON line as each request begins and ends to this file")
	_ = c.MarkFlagRequired("model") // the flag exists
	return c
}

func runEngineSim(c *cobra.Command, f engineSimFlags) error {
	log := terminal.Logger(c.ErrOrStderr(), "info")
	f.options.DecodeStep = time.Duration(f.decode * float64(time.Millisecond))
	f.options.DecodeSlope = time.Duration(f.slope * float64(time.Millisecond))
	f.options.Log = log
	f.options.Die = func() { _ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL) }
	if f.work != "" {
		file, err := os.OpenFile(f.work, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return fmt.Errorf("open work log: %w", err)
		}
		defer func() { _ = file.Close() }()
		f.options.Worked = workLog(file, log)
	}
	e, err := engine.New(f.options)
	if err != nil {
		return terminal.Fail(terminal.ExitUsage, err, "")
	}
	began := time.Now()
	w, err := engine.LoadWeights(c.Context(), f.model, f.digest)
	if err != nil {
		return err
	}
	address := net.JoinHostPort(f.host, strconv.Itoa(f.port))
	listener, err := identity.ListenTCP(c.Context(), address, 0)
	if err != nil {
		return fmt.Errorf("listen for engine-sim: %w", err)
	}
	log.Info("engine-sim serves", slog.String("model", f.options.ServedModel), slog.String("address", listener.Addr().String()),
		slog.Int("files", w.Files), slog.Int64("bytes", w.Bytes), slog.Int("tensors", w.Tensors),
		slog.String("artifact", w.Digest), slog.Duration("loaded_in", time.Since(began)))
	server := &http.Server{Handler: e, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: f.idle}
	return serve(c.Context(), server, listener)
}

// workLog writes each line at once and whole, so that a killed engine leaves
// what it had told.
func workLog(out io.Writer, log *slog.Logger) func(engine.Work) {
	return func(w engine.Work) {
		line, err := json.Marshal(w)
		if err == nil {
			_, err = out.Write(append(line, '\n'))
		}
		if err != nil {
			log.Error("write work log", slog.Any("error", err))
		}
	}
}

// serve runs an HTTP server until ctx ends, then lets what is in flight finish
// for up to 5 s.
func serve(ctx context.Context, server *http.Server, listener net.Listener) error {
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := server.Shutdown(grace); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("stop %s: %w", listener.Addr(), err)
	}
	_ = server.Close()
	return nil
}
