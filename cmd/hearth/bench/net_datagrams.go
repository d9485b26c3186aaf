package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/cgroups"
)

// packetsCommand is the hidden child whose packets are counted: it sends to
// itself and ends.
func packetsCommand() *cobra.Command {
	var datagrams, stream int
	cmd := &cobra.Command{Use: "child-packets", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		r, err := newRoom()
		if err != nil {
			return err
		}
		defer r.end()
		if err := r.datagrams(datagrams); err != nil || stream == 0 {
			return err
		}
		s, err := r.listen()
		if err != nil {
			return err
		}
		defer s.end()
		_, err = s.stream(cmd.Context(), upTo(stream))
		return err
	}}
	cmd.Flags().IntVar(&datagrams, "datagrams", 0, "how many of UDP to send, of 1,200 bytes each")
	cmd.Flags().IntVar(&stream, "stream", 0, "how many bytes of TCP to send")
	return cmd
}

// datagrams sends and receives so many, one after another.
func (r *room) datagrams(n int) error {
	return r.do(func() error {
		var ends [2]int
		for i, address := range [][4]byte{roomServer, roomClient} {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("make socket: %w", err)
			}
			defer func() { _ = unix.Close(fd) }()
			if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: address}); err != nil {
				return fmt.Errorf("bind: %w", err)
			}
			ends[i] = fd
		}
		at, err := unix.Getsockname(ends[0])
		if err == nil {
			err = unix.Connect(ends[1], at)
		}
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		buf := make([]byte, 1200)
		for range n {
			if _, err := unix.Write(ends[1], buf); err != nil {
				return fmt.Errorf("send: %w", err)
			}
			if _, err := unix.Read(ends[0], buf); err != nil {
				return fmt.Errorf("receive: %w", err)
			}
		}
		return nil
	})
}

// newCgroup makes a cgroup for the bench's children.
func newCgroup() (string, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroups: %w", err)
	}
	defer func() { _ = mounts.Close() }()
	root, err := cgroups.FindRoot("/sys", mounts)
	if err != nil {
		return "", cannot{err}
	}
	dir, err := os.MkdirTemp(root, "hearth-bench-")
	if err != nil {
		return "", cannot{fmt.Errorf("make cgroup: %w", err)}
	}
	return dir, nil
}

// packetsIn runs the child in a cgroup to its end.
func packetsIn(ctx context.Context, cgroup string, datagrams, stream int) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	dir, err := os.Open(cgroup)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer func() { _ = dir.Close() }()
	cmd := exec.CommandContext(ctx, self, "bench", "child-packets", "--datagrams", strconv.Itoa(datagrams), "--stream", strconv.Itoa(stream))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("send packets in a cgroup: %w", err)
	}
	return nil
}

// datagramRows are what each packet costs where network.datagrams is on.
func (b *netBench) datagramRows(ctx context.Context) (rows []Row, err error) {
	cgroup, err := newCgroup()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.Remove(cgroup)) }()
	probe, err := openProbe(bpf.Options{Datagrams: cgroup}, bpf.SensorDatagrams)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	nothing, err := emptyOnPackets(cgroup)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, nothing.end()) }()
	err = withStatistics(func() error {
		for _, of := range []struct {
			name, note        string
			datagrams, stream int
		}{
			{"datagram_udp_ns", "a datagram that is counted", b.sizes.datagrams, 0},
			{"datagram_tcp_ns", "a packet of TCP, which is let pass at once", 0, b.sizes.stream},
		} {
			row, err := b.datagramRow(ctx, probe, nothing, netRow(of.name), func() error { return packetsIn(ctx, cgroup, of.datagrams, of.stream) })
			if err != nil {
				return err
			}
			row.Note = of.note + " (network.datagrams, off by default), by the kernel's statistics, which cost what the empty program has; " + row.Note
			rows = append(rows, row)
		}
		return nil
	})
	return rows, err
}

func (b *netBench) datagramRow(ctx context.Context, probe *bpf.Probe, nothing *empty, row Row, send func() error) (Row, error) {
	var own, base, out, in []float64
	for range b.pairs {
		before, err := probe.Usage()
		if err != nil {
			return row, err
		}
		was, err := nothing.usage()
		if err != nil {
			return row, err
		}
		if err := errors.Join(send(), ctx.Err()); err != nil {
			return row, err
		}
		after, err := probe.Usage()
		if err != nil {
			return row, err
		}
		is, err := nothing.usage()
		if err != nil {
			return row, err
		}
		own = append(own, perRun(usage(before, after, programOut, programIn)))
		out, in = append(out, perRun(usage(before, after, programOut))), append(in, perRun(usage(before, after, programIn)))
		base = append(base, perRun(bpf.ProgramUsage{Runs: is.Runs - was.Runs, Time: is.Time - was.Time}))
	}
	row, err := rounds(row, b.pairs, replay(own), contender{"an empty program on the packets sent", replay(base)})
	row.Note = fmt.Sprintf("sent %.0f, received %.0f", median(out), median(in))
	return row, err
}
