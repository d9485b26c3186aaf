package identity

import (
	"net"
	"net/netip"
)

// IsLoopback tells whether only this node can reach a "host:port" address. A
// name is not loopback, whatever it resolves to, save localhost; neither is
// what is no host:port.
func IsLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
