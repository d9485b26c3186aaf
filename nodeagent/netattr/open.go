package netattr

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/cgroups"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// errOff says that nobody wants programs in the kernel.
var errOff = errors.New("network.enabled is false")

// probe makes the programs of this node.
func (c *Collector) probe() (Source, error) {
	if c.opts.Off {
		return nil, errOff
	}
	options := bpf.Options{MarkBase: c.opts.Mark, Pins: c.opts.Pins, Log: c.log}
	if c.tree != nil {
		options.Cgroups = c.tree.root
		// The true root has the id 1; below another there is a part of the machine.
		if c.tree.id != cgroups.TrueRoot {
			options.Scope = c.tree.id
		}
		if c.opts.Datagrams {
			options.Datagrams = c.tree.root
		}
	} else if c.opts.Datagrams {
		options.Datagrams = "no cgroup2" // it fails, and says so
	}
	probe, err := bpf.Open(options)
	if err != nil {
		return nil, err
	}
	return probe, nil
}

// open makes the source where there is none. The caller has the turn.
func (c *Collector) open() {
	if c.tree == nil && !c.opts.Off {
		tree, err := openTree(c.opts)
		if err != nil {
			c.books.blind = err.Error()
		} else {
			c.tree, c.books.blind, c.books.tree = tree, "", tree
		}
	}
	source, err := c.opts.Source()
	if err == nil {
		err = source.SetPorts(c.opts.Ports)
		if err == nil {
			err = source.SetRanges(c.opts.Ranges)
		}
		if err != nil {
			_ = source.Close()
		}
	}
	var decided map[uint64]traffic.Class
	if err == nil && source.Kept() {
		if decided, err = source.Decided(); err != nil {
			_ = source.Close()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		if text := err.Error(); text != c.failed {
			c.failed = text
			if !errors.Is(err, errOff) {
				c.log.Warn("network use has no owners", slog.Any("error", err))
			}
		}
		return
	}
	if !source.Kept() {
		c.books.restart()
	}
	if c.books.decided = decided; decided == nil {
		c.books.decided = map[uint64]traffic.Class{}
	}
	c.source, c.failed = source, ""
	for _, sensor := range source.Sensors() {
		if sensor.Wanted && !sensor.On {
			c.log.Warn("a sensor of the network accounting is off", slog.String("sensor", sensor.Name), slog.String("reason", sensor.Reason),
				slog.String("verifier", sensor.VerifierLog))
		}
	}
}

// lose gives up a source that cannot be read any more; it is made again later.
func (c *Collector) lose(source Source, err error) {
	c.log.Warn("network accounting lost, it is tried again", slog.Any("error", err))
	_ = source.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.source == source {
		c.source, c.failed = nil, fmt.Sprintf("lost while it ran: %v", err)
		c.retryAt = time.Now().Add(retryEvery)
	}
}

// hierarchy is the tree of cgroups that the agent sees.
type hierarchy struct {
	*cgroups.Tree
	root string
	id   uint64 // of its root
}

// openTree finds the hierarchy of cgroups.
func openTree(opts Options) (t *hierarchy, err error) {
	root := opts.Cgroups
	if root == "" {
		mounts, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			return nil, fmt.Errorf("find cgroups: %w", err)
		}
		defer func() { _ = mounts.Close() }()
		if root, err = cgroups.FindRoot(opts.Sys, mounts); err != nil {
			return nil, err
		}
	}
	// A scope that is no cgroup's id hides every socket.
	if root, err = cgroups.Root(root); err != nil {
		return nil, err
	}
	t = &hierarchy{Tree: cgroups.New(cgroups.Options{Root: root}), root: root}
	if t.id, err = t.RootID(); err != nil {
		return nil, err
	}
	return t, nil
}
