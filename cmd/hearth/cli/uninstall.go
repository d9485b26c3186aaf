package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/weightcache"
)

// uninstallFlags are what `hearth uninstall` is told.
type uninstallFlags struct {
	file, node     string
	check, weights bool
}

func (a *app) uninstall() *cobra.Command {
	var f uninstallFlags
	command := &cobra.Command{
		Use:   "uninstall --config FILE",
		Short: "Remove what the agent keeps on this node, unless claims are prepared",
		Long: `Uninstall refuses while a claim is prepared on the node: without its driver no
pod that uses one can end. --check stops there, and works beside a running agent:
run it on every node before you delete the DaemonSet. Without --check the agent
must have ended; then the driver's sockets, CDI files, the ledger, the health
state and what counts the network in the kernel go, and with --weights the models
and the KV space too.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			config, err := load[*nodeagent.Config](f.file, "agent", f.node)
			if err != nil {
				return err
			}
			if err := a.noClaims(command.Context(), config); err != nil || f.check {
				return err
			}
			removed, err := uninstall(command.Context(), config, f.weights)
			for _, path := range removed {
				fmt.Fprintf(a.Out, "removed %s\n", path)
			}
			return err
		},
	}
	configFlag(command, &f.file)
	command.Flags().StringVar(&f.node, "node", "", "this node's name, as 'hearth agent --node' has it")
	command.Flags().BoolVar(&f.check, "check", false, "remove nothing: only say whether claims are prepared")
	command.Flags().BoolVar(&f.weights, "weights", false, "remove the models and the KV space too")
	return command
}

// noClaims refuses where the node has claims: as its agent says, or where none
// runs as its ledger does.
func (a *app) noClaims(ctx context.Context, config *nodeagent.Config) error {
	claims, err := preparedClaims(ctx, config)
	if err != nil {
		return err
	}
	if len(claims) == 0 {
		fmt.Fprintln(a.Out, "no claim is prepared on this node")
		return nil
	}
	return terminal.Fail(terminal.ExitRefused,
		fmt.Errorf("uninstall: this node has claims prepared: %s", strings.Join(claims, ", ")),
		"delete the pods that use them and wait until they have ended; 'hearth claims' shows what is left")
}

// preparedClaims names the claims that have something on the node.
func preparedClaims(ctx context.Context, config *nodeagent.Config) ([]string, error) {
	dir := config.Kubernetes.ClaimsDir
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	book, err := ledger.Open(ledger.Options{Dir: dir})
	if errors.Is(err, durable.ErrLocked) {
		return askedClaims(ctx, config)
	}
	if err != nil {
		return nil, fmt.Errorf("uninstall: %w", err)
	}
	var names []string
	for _, entry := range book.Entries() {
		var pods []string
		for _, pod := range entry.Pods {
			pods = append(pods, pod.Name)
		}
		names = append(names, claimName(entry.Namespace, entry.Name, pods))
	}
	for _, uid := range book.Unsettled() {
		names = append(names, "one of UID "+uid+" whose file is damaged")
	}
	if err := book.Close(); err != nil {
		return nil, fmt.Errorf("uninstall: %w", err)
	}
	return names, nil
}

// askedClaims asks the agent that has the ledger.
func askedClaims(ctx context.Context, config *nodeagent.Config) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	claims, err := onAgent(ctx, place{socket: config.Listen.Socket}, func(ctx context.Context, c *admin.Client) ([]admin.Claim, error) { return c.Claims(ctx) })
	if err != nil {
		return nil, err
	}
	var names []string
	for _, c := range claims {
		if c.State != dradriver.ClaimOwing && c.State != dradriver.ClaimRefused {
			names = append(names, claimName(c.Namespace, c.Name, c.Pods))
		}
	}
	return names, nil
}

func claimName(namespace, name string, pods []string) string {
	text := namespace + "/" + name
	if len(pods) > 0 {
		text += " (of " + strings.Join(pods, ", ") + ")"
	}
	return text
}

// uninstall removes what the agent keeps on the node and names what it removed.
// The locks of ledger and stores keep an agent from starting meanwhile.
func uninstall(ctx context.Context, config *nodeagent.Config, weights bool) (removed []string, err error) {
	k := config.Kubernetes
	free, err := alone(ctx, config)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	if _, err := os.Stat(k.ClaimsDir); err == nil {
		book, err := ledger.Open(ledger.Options{Dir: k.ClaimsDir})
		if errors.Is(err, durable.ErrLocked) {
			return nil, agentRuns()
		}
		if err != nil {
			return nil, fmt.Errorf("uninstall: %w", err)
		}
		defer func() { err = errors.Join(err, book.Close()) }()
		if entries := book.Entries(); len(entries) > 0 {
			return nil, terminal.Fail(terminal.ExitRefused, errors.New("uninstall: a claim was prepared meanwhile"), "")
		}
	}
	specs, err := cdi.New(cdi.Options{Dir: k.CDIDir}).Sweep(func(string) bool { return false })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("uninstall: %w", err)
	}
	for _, uid := range specs {
		removed = append(removed, "CDI file of claim "+uid)
	}
	for _, path := range []string{
		filepath.Join(k.RegistrarDir, identity.Driver+"-reg.sock"), config.Listen.Socket, config.Listen.DataSocket,
	} {
		if path == "" || os.Remove(path) != nil {
			continue // it is not there, which is what is wanted
		}
		removed = append(removed, path)
	}
	folders := []folder{
		{filepath.Join(k.PluginsDir, identity.Driver), []string{"dra.sock", "serialize.lock", "dra-device-metadata"}},
		{config.Health.StateDir, []string{"health.json*"}},
		{k.ClaimsDir, []string{"*.json", "bad", "journal", "lock"}},
	}
	if pins := config.Network.Pins; pins != "" {
		_, err := os.Stat(pins)
		if err := bpf.Unpin(pins); err != nil {
			return removed, fmt.Errorf("uninstall: %w", err)
		}
		if err == nil {
			removed = append(removed, "programs and maps in "+pins)
		}
	}
	if weights {
		views := config.Weights.ViewsDir
		if views == "" {
			views = config.Weights.Dir + "-views"
		}
		folders = append(folders,
			folder{views, []string{"*"}},
			folder{config.Weights.Dir, weightcache.Names()},
			folder{config.KV.Dir, kvtier.Names()},
		)
		for _, drive := range config.KV.Drives {
			folders = append(folders, folder{drive, kvtier.Names()})
		}
	}
	for _, f := range folders {
		gone, err := f.remove()
		if err != nil {
			return removed, fmt.Errorf("uninstall: %w", err)
		}
		if gone {
			removed = append(removed, f.dir)
		}
	}
	return removed, nil
}

func agentRuns() error {
	return terminal.Fail(terminal.ExitRefused, errors.New("uninstall: the agent runs"), "stop it first, all its roles, or use --check")
}

// alone refuses where a role of the agent runs, whichever, and takes the locks
// of its stores, which free gives back.
func alone(ctx context.Context, config *nodeagent.Config) (free func() error, err error) {
	dialer := net.Dialer{Timeout: askTimeout}
	for _, socket := range []string{config.Listen.Socket, config.Listen.DataSocket} {
		if conn, err := dialer.DialContext(ctx, "unix", socket); err == nil {
			return nil, errors.Join(agentRuns(), conn.Close())
		}
	}
	var locks []io.Closer
	free = func() (err error) {
		for _, lock := range locks {
			err = errors.Join(err, lock.Close())
		}
		return err
	}
	for _, dir := range append([]string{config.Weights.Dir, config.KV.Dir}, config.KV.Drives...) {
		path := filepath.Join(dir, "lock")
		if _, err := os.Stat(path); err != nil {
			continue // nothing was ever kept there
		}
		lock, err := durable.Lock(path)
		if errors.Is(err, durable.ErrLocked) {
			return nil, errors.Join(agentRuns(), free())
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("uninstall: %w", err), free())
		}
		locks = append(locks, lock)
	}
	return free, nil
}

// folder is one of the agent's, with the names that it puts there. Others,
// which somebody else must have put there, stay, and then the folder does.
type folder struct {
	dir   string
	names []string // patterns
}

// remove tells whether anything was there to be removed.
func (f folder) remove() (bool, error) {
	if f.dir == "" {
		return false, nil
	}
	had := false
	for _, pattern := range f.names {
		found, err := fs.Glob(os.DirFS(f.dir), pattern)
		if err != nil {
			return had, fmt.Errorf("list %s: %w", f.dir, err)
		}
		for _, name := range found {
			had = true
			if err := os.RemoveAll(filepath.Join(f.dir, name)); err != nil {
				return had, err
			}
		}
	}
	// It stays where it is a mount of its own, or holds what is not ours.
	return os.Remove(f.dir) == nil || had, nil
}
