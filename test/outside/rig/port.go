package rig

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Ports that FreeAddr gives lie from lowestPort to below those that the kernel
// takes by itself: else any outgoing connection could take the port of a program
// that is not up yet, or is being restarted.
const (
	lowestPort  = 10_000
	kernelPorts = 32_768 // where the kernel's own begin, if it does not say
	portTries   = 10_000
)

// given holds the ports that this process was given; none is given twice.
var given struct {
	sync.Mutex
	ports map[int]bool
}

// FreeAddr is a loopback host:port that was free a moment ago, that is given
// once, and that no outgoing connection takes.
func FreeAddr(ctx context.Context) (string, error) {
	given.Lock()
	defer given.Unlock()
	if given.ports == nil {
		given.ports = map[int]bool{}
	}
	var lc net.ListenConfig
	end := max(lowestPort+1, firstKernelPort())
	for range portTries {
		port := lowestPort + rand.N(end-lowestPort)
		if given.ports[port] {
			continue
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		ln, err := lc.Listen(ctx, "tcp", addr)
		if err != nil {
			continue
		}
		given.ports[port] = true
		return addr, ln.Close()
	}
	return "", errors.New("find a free port: none in " + strconv.Itoa(portTries) + " tries")
}

// firstKernelPort is the first of the ports that the kernel gives to outgoing
// connections and to listeners that name none.
func firstKernelPort() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 2 {
		if first, err := strconv.Atoi(fields[0]); err == nil {
			return first
		}
	}
	return kernelPorts
}
