package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// restartSize is the size of the blocks that a store starts with, restartKill how
// many of them are written before each kill.
const (
	restartSize = 2 * units.MiB
	restartKill = 16
)

// restartStore opens the store of the rows below. It has room for what all kills
// write.
func restartStore(ctx context.Context, dir string, set units.Bytes) (*kvStore, error) {
	return openStore(ctx, dir, 256*units.MiB, set+units.GiB, nil)
}

// restartRows are the start of a store that has blocks on its drive: after kills
// amid its writes, after a clean end, and after one without its checkpoint.
func restartRows(ctx context.Context, dir string, o options) ([]Row, error) {
	set := 2 * units.GiB
	if o.full {
		set = 10 * units.GiB
	}
	path := filepath.Join(dir, "kv")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	n := int(set / restartSize)
	var blocks int64
	open := func() (float64, error) {
		s, err := restartStore(ctx, path, set)
		if err != nil {
			return 0, err
		}
		defer s.end()
		st := s.tenant.Stats()
		blocks = st.Recovered
		return st.Recovery.Seconds() * float64(10*units.GiB) / float64(blocks*int64(restartSize)), nil
	}
	killed, lost, written := 0, int64(0), int64(0)
	kill := func() (float64, error) {
		count := restartKill
		if killed == 0 {
			count = n
		}
		killed++
		told, err := killWriter(ctx, path, set, int(written)+killed*n, count)
		if err != nil {
			return 0, err
		}
		took, err := open()
		written, lost = blocks, max(lost, written+told-blocks)
		return took, err
	}
	unmarked := func() (float64, error) {
		names, _ := filepath.Glob(filepath.Join(path, "tenants", "*", "checkpoint"))
		for _, name := range names {
			if err := os.Remove(name); err != nil {
				return 0, fmt.Errorf("remove checkpoint: %w", err)
			}
		}
		return open()
	}
	var rows []Row
	for _, r := range []struct {
		name, note string
		measure    func() (float64, error)
	}{
		{"restart_10GiB_killed", "the process killed amid its writes", kill},
		{"restart_10GiB", "from the checkpoint", open},
		{"restart_10GiB_no_checkpoint", "from the segments' footers", unmarked},
	} {
		row, err := alone(Row{Name: r.name, Unit: "s", Better: lower, Aim: 1, Note: r.note}, o.pairs, r.measure)
		if err != nil {
			return nil, err
		}
		row.Note += fmt.Sprintf(": %d blocks of 2 MiB, the time for as many as 10 GiB are; must 1 s, goal 0.5", blocks)
		if r.name == "restart_10GiB_killed" {
			row.Note += fmt.Sprintf("; of those known to be written at most %d were lost", max(0, lost))
		}
		o.progress(describe(row))
		rows = append(rows, row)
	}
	return rows, nil
}

// killWriter runs a store in a process of its own that stores blocks, the first of
// that number, and kills it once count of them are written. It says how many the
// process knew to be written.
func killWriter(ctx context.Context, dir string, set units.Bytes, first, count int) (told int64, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("find own program: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, "bench", "child-kvwrite", "--dir", dir, "--set", strconv.FormatInt(int64(set), 10), "--first", strconv.Itoa(first))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return 0, fmt.Errorf("start the process that is killed: %w", err)
	}
	lines := bufio.NewScanner(out)
	for told < int64(count) && err == nil && lines.Scan() {
		told, err = strconv.ParseInt(lines.Text(), 10, 64)
	}
	_ = cmd.Process.Kill()
	for err == nil && lines.Scan() { // what it told before it was dead
		if more, err := strconv.ParseInt(lines.Text(), 10, 64); err == nil {
			told = more
		}
	}
	if ended := cmd.Wait(); err == nil && told < int64(count) {
		err = fmt.Errorf("the process that is killed ended with %d of %d blocks: %w", told, count, errors.Join(ended, lines.Err()))
	}
	return told, err
}

// writeCommand is the hidden child that stores blocks until it is killed.
func writeCommand() *cobra.Command {
	var dir string
	var set int64
	var first int
	cmd := &cobra.Command{Use: "child-kvwrite", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return writeOn(cmd.Context(), dir, units.Bytes(set), first, cmd.OutOrStdout())
	}}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the store")
	cmd.Flags().Int64Var(&set, "set", 0, "bytes of blocks")
	cmd.Flags().IntVar(&first, "first", 0, "number of the first block")
	return cmd
}

func writeOn(ctx context.Context, dir string, set units.Bytes, first int, out io.Writer) error {
	data, free, err := anonymous(int(restartSize))
	if err != nil {
		return err
	}
	defer free()
	s, err := restartStore(ctx, dir, set)
	if err != nil {
		return err
	}
	defer s.end()
	for i := first; ctx.Err() == nil; i++ {
		var written int64
		s.until(func(st kvtier.TenantStats) bool {
			written = st.Written
			return int(st.Waiting) <= 8*len(data)
		})
		if _, err := fmt.Fprintln(out, written); err != nil {
			return fmt.Errorf("tell what is written: %w", err)
		}
		binary.LittleEndian.PutUint64(data, uint64(i))
		if _, err := s.store(ctx, i, data); err != nil {
			return err
		}
	}
	return nil
}
