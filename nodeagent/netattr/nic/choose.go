package nic

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Types of devices, from the kernel's if_arp.h.
const (
	typeInfiniBand = 32
	typeLoopback   = 772
)

// Flags of routes, from the kernel's route.h.
const (
	routeUp     = 0x1
	routeReject = 0x200
)

// maxStack is how many devices may lie upon one another.
const maxStack = 8

// representor is the port's name of a device that stands for a virtual function
// in a switch of the card's own. It counts again what the function counts, or
// what the port does.
var representor = regexp.MustCompile(`^(c\d+)?pf\d+[vs]f\d+$`)

// choose gives the names of the devices that together count each byte once: the
// physical ones, or those that Names match.
func (r Reader) choose() ([]string, error) {
	all, err := os.ReadDir(filepath.Join(r.Sys, "class/net"))
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	var names []string
	for _, entry := range all {
		name := entry.Name()
		wanted := len(r.Names) == 0 && r.physical(name) && !representor.MatchString(text(filepath.Join(r.net(name), "phys_port_name")))
		for _, pattern := range r.Names {
			match, err := path.Match(pattern, name)
			if err != nil {
				return nil, fmt.Errorf("match network devices: %q: %w", pattern, err)
			}
			wanted = wanted || match
		}
		// A device has a type; bonding_masters, beside the devices, has not.
		if !wanted {
			continue
		}
		if kind, ok := number(filepath.Join(r.net(name), "type")); ok && kind != typeLoopback {
			names = append(names, name)
		}
	}
	return r.once(names), nil
}

// physical reports whether a device has hardware, or what a virtual machine has
// for it. Bonds, bridges, VLANs, tunnels and pairs have none.
func (r Reader) physical(name string) bool {
	_, err := os.Lstat(filepath.Join(r.net(name), "device"))
	return err == nil
}

// once drops devices of which another one counts the same bytes: a bond and all
// that lies upon devices that are counted. Where the device on top is physical
// itself, it is the way of a virtual machine to a function of a card: it counts
// for both, and stays while the function may go.
func (r Reader) once(names []string) []string {
	names = slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		master, err := os.Readlink(filepath.Join(r.net(name), "master"))
		master = filepath.Base(master)
		return err == nil && r.physical(master) && slices.Contains(names, master)
	})
	counted := slices.Clone(names)
	return slices.DeleteFunc(names, func(name string) bool { return r.liesUpon(name, counted, maxStack) })
}

// liesUpon reports whether a device lies upon one that is counted.
func (r Reader) liesUpon(name string, counted []string, depth int) bool {
	entries, err := os.ReadDir(r.net(name))
	if err != nil || depth == 0 {
		return false
	}
	for _, entry := range entries {
		lower, ok := strings.CutPrefix(entry.Name(), "lower_")
		if ok && lower != name && (slices.Contains(counted, lower) || r.liesUpon(lower, counted, depth-1)) {
			return true
		}
	}
	return false
}

// defaultRoutes gives the devices that carry a default route, by name.
func (r Reader) defaultRoutes() []string {
	names := append(
		routes4(text(filepath.Join(r.Proc, "net/route"))),
		routes6(text(filepath.Join(r.Proc, "net/ipv6_route")))...,
	)
	slices.Sort(names)
	return slices.Compact(names)
}

// routes4 reads the devices of default routes from /proc/net/route.
func routes4(table string) []string {
	var names []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) >= 8 && f[1] == "00000000" && f[7] == "00000000" && usable(f[3]) {
			names = append(names, f[0])
		}
	}
	return names
}

// routes6 reads the devices of default routes from /proc/net/ipv6_route, where
// every namespace has one that rejects, of its loopback device.
func routes6(table string) []string {
	var names []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) >= 10 && strings.Trim(f[0], "0") == "" && f[1] == "00" && usable(f[8]) && f[9] != "lo" {
			names = append(names, f[9])
		}
	}
	return names
}

// usable reports whether a route's flags say that packets go its way.
func usable(flags string) bool {
	n, err := strconv.ParseUint(flags, 16, 32)
	return err == nil && n&routeUp != 0 && n&routeReject == 0
}
