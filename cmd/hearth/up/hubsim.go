package up

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// maxRepos bounds the generated models of one hub.
const maxRepos = 64

type hubSimFlags struct {
	dir, host, size, rate string
	repos                 []string
	port                  int
	seed                  uint64
	makeOnly              bool
}

// HubSimCommand is `hearth hub-sim`: a small hub that serves generated models
// until it is told to stop.
func HubSimCommand() *cobra.Command {
	var f hubSimFlags
	c := &cobra.Command{
		Use:   "hub-sim --dir DIR --repo ORG/NAME",
		Short: "Run a small hub with generated models",
		Long: `hub-sim serves the part of the model hub's API that pulls use, over the folders
ORG/NAME below --dir. A repository of --repo that is not there yet is made: a small
model with made-up weights, as 'hearth up' has it. It is for trying a fabric
where no hub is within reach; a real hub is a source of type hub all the same.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	flags := c.Flags()
	flags.StringVar(&f.dir, "dir", "", "folder of the repositories (required)")
	flags.StringArrayVar(&f.repos, "repo", nil, "repository to make where it is not there; may be repeated")
	flags.StringVar(&f.size, "size", "64MiB", "size of each generated model")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of the first generated model; the others follow")
	flags.StringVar(&f.rate, "rate", "unlimited", "of all file bodies together")
	flags.StringVar(&f.host, "host", "127.0.0.1", "address to listen on")
	flags.IntVar(&f.port, "port", 8400, "port to listen on; 0 takes a free one")
	flags.BoolVar(&f.makeOnly, "make-only", false, "make the repositories and end")
	_ = c.MarkFlagRequired("dir") // the flag exists
	return c
}

func (f *hubSimFlags) run(c *cobra.Command) error {
	size, err := units.ParseBytes(f.size)
	if err != nil || size < minSize || size > maxSize {
		return terminal.Fail(terminal.ExitUsage, fmt.Errorf("--size is %q", f.size), fmt.Sprintf("want %s to %s", minSize, maxSize))
	}
	limit, err := units.ParseRate(f.rate)
	if err != nil {
		return terminal.Fail(terminal.ExitUsage, fmt.Errorf("--rate: %w", err), "")
	}
	if len(f.repos) > maxRepos {
		return terminal.Usagef("%d repositories, want at most %d", len(f.repos), maxRepos)
	}
	log := terminal.Logger(c.ErrOrStderr(), "info")
	for i, repo := range f.repos {
		if err := makeRepo(f.dir, repo, size, f.seed+uint64(i)); err != nil {
			return err
		}
	}
	if f.makeOnly {
		return nil
	}
	listener, err := identity.ListenTCP(c.Context(), net.JoinHostPort(f.host, strconv.Itoa(f.port)), 0)
	if err != nil {
		return fmt.Errorf("listen for hub-sim: %w", err)
	}
	log.Info("hub-sim serves", slog.String("address", listener.Addr().String()), slog.String("dir", f.dir), slog.Any("made", f.repos))
	return serve(c.Context(), &http.Server{Handler: hub.New(hub.Options{Dir: f.dir, Rate: limit}), ReadHeaderTimeout: 10 * time.Second}, listener)
}

// makeRepo generates a model below dir, where it is not there. One that is
// found is whole: it gets its name last.
func makeRepo(dir, repo string, size units.Bytes, seed uint64) error {
	org, name, found := strings.Cut(repo, "/")
	if !found || !plainName(org) || !plainName(name) {
		return terminal.Usagef("--repo is %q, want ORG/NAME", repo)
	}
	at := filepath.Join(dir, org, name)
	if _, err := os.Stat(at); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return fmt.Errorf("make repository %s: %w", repo, err)
	}
	fresh, err := os.MkdirTemp(dir, ".new-")
	if err != nil {
		return fmt.Errorf("make repository %s: %w", repo, err)
	}
	defer func() { _ = os.RemoveAll(fresh) }()
	if err := hub.WriteModel(fresh, hub.ModelOptions{Size: size, Seed: seed}); err != nil {
		return fmt.Errorf("make repository %s: %w", repo, err)
	}
	// Other accounts read it too.
	if err := errors.Join(os.Chmod(fresh, 0o755), os.Rename(fresh, at)); err != nil {
		return fmt.Errorf("make repository %s: %w", repo, err)
	}
	return nil
}

// plainName reports whether a part of a repository's name is a folder's name
// and nothing else.
func plainName(s string) bool {
	return s != "" && s[0] != '.' && !strings.ContainsAny(s, "/\\@%") && filepath.IsLocal(s)
}
