package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// Addresses are the same in every lab: a lab's network reaches nothing but the
// lab. The control plane has the bridge and its first address; node N has one
// more than firstNode+N and a pod subnet that its number is part of.
const (
	controlAddress = "10.99.0.1"
	apiPort        = 6443
	podNetwork     = "10.244.0.0/16"
	serviceNetwork = "10.96.0.0/16"
	serviceFirst   = "10.96.0.1" // of the service "kubernetes"
	dnsAddress     = controlAddress
	clusterDomain  = "cluster.local"
	firstNode      = 10
)

func apiURL() string { return "https://" + net.JoinHostPort(controlAddress, strconv.Itoa(apiPort)) }

func nodeAddress(index int) string { return fmt.Sprintf("10.99.0.%d", firstNode+index) }

func podSubnet(index int) string { return fmt.Sprintf("10.244.%d.0/24", index) }

// layBridge makes the network between machines, in the control plane's.
func layBridge(ctx context.Context, control *machine.Machine) error {
	lines := []string{
		"link add br0 type bridge",
		"addr add " + controlAddress + "/24 dev br0",
		"link set br0 up",
	}
	return ip(ctx, control, append(lines, podRoutes(-1)...))
}

// plug lays a cable from a node's machine to the bridge.
func plug(ctx context.Context, control, node *machine.Machine, index int) error {
	cable := fmt.Sprintf("node-%d", index)
	// The cable of the same node's last boot goes with that boot's network,
	// which takes the kernel a moment.
	_ = ip(ctx, control, []string{"link del " + cable})
	err := ip(ctx, control, []string{
		fmt.Sprintf("link add %s type veth peer name eth0 netns %d", cable, node.PID),
		fmt.Sprintf("link set %s master br0 up", cable),
	})
	if err != nil {
		return err
	}
	return ip(ctx, node, append([]string{
		"addr add " + nodeAddress(index) + "/24 dev eth0",
		"link set eth0 up",
		"route add default via " + controlAddress,
	}, podRoutes(index)...))
}

// podRoutes are the ways to the pods of all nodes that can be, except the one given.
func podRoutes(except int) []string {
	var lines []string
	for i := range MaxNodes {
		if i != except {
			lines = append(lines, "route add "+podSubnet(i)+" via "+nodeAddress(i))
		}
	}
	return lines
}

// ip runs lines of iproute2 in a machine's network. Process numbers in them are
// those of this system.
func ip(ctx context.Context, m *machine.Machine, lines []string) error {
	cmd := m.InNetwork(ctx, "ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if output, err := cmd.CombinedOutput(); err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); ok {
			err = errors.New(strings.TrimSpace(string(output)))
		}
		return fmt.Errorf("lay network: %w", err)
	}
	return nil
}
