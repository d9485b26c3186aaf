package nodeagent

import (
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Network configures who is told to have moved which bytes over the network, of
// the role data.
type Network struct {
	// Enabled loads programs into the kernel; without it the devices alone are read.
	Enabled bool `yaml:"enabled"`
	// Sys is where the node's sysfs is, in a container often not at /sys.
	Sys string `yaml:"sys"`
	// Cgroups is the directory of the cgroup2 hierarchy; empty finds it below Sys.
	Cgroups string `yaml:"cgroups"`
	// Pins is a folder on a BPF file system; empty pins nothing.
	Pins string `yaml:"pins"`
	// Mark makes SO_MARK of Mark + class (1 weights to 5 other) set a class.
	Mark uint32 `yaml:"mark"`
	// Datagrams counts what is not TCP, at a cost for each packet.
	Datagrams bool `yaml:"datagrams"`
	// Devices are names of network devices with wildcards; none finds them.
	Devices []string      `yaml:"devices"`
	Ports   []NetPort     `yaml:"ports"`
	Ranges  []NetRange    `yaml:"ranges"`
	Classes []CgroupClass `yaml:"cgroupClasses"`
}

// NetPort gives connections to service ports a class.
type NetPort struct {
	Port  int    `yaml:"port"`
	To    int    `yaml:"to"` // the last of a range; 0: Port alone
	Class string `yaml:"class"`
}

// NetRange gives connections to addresses a class.
type NetRange struct {
	CIDR  string `yaml:"cidr"`
	Class string `yaml:"class"`
}

// CgroupClass gives the processes of cgroups a class.
type CgroupClass struct {
	Pattern string `yaml:"pattern"`
	Class   string `yaml:"class"`
}

func defaultNetwork() Network {
	return Network{Enabled: true, Sys: "/sys", Pins: "/sys/fs/bpf/" + identity.Name}
}

func (n Network) validate(v *configfile.Problems) {
	v.Check(filepath.IsAbs(n.Sys), "network.sys", "is %q, want an absolute path such as /sys", n.Sys)
	v.Check(n.Cgroups == "" || filepath.IsAbs(n.Cgroups), "network.cgroups", "is %q, want an absolute path such as /sys/fs/cgroup", n.Cgroups)
	v.Check(n.Pins == "" || filepath.IsAbs(n.Pins), "network.pins", "is %q, want an absolute path below a BPF file system, such as /sys/fs/bpf/hearth, or none", n.Pins)
	// Past this a socket without a mark would have one.
	v.Check(n.Mark <= math.MaxUint32-uint32(traffic.Other), "network.mark", "is %d, want at most %d", n.Mark, math.MaxUint32-uint32(traffic.Other))
	class := func(field, text string) {
		_, err := traffic.ParseClass(text)
		v.Check(err == nil, field, "is %q, want weights, kv, serving, image or other", text)
	}
	for i, d := range n.Devices {
		_, err := path.Match(d, "")
		v.Check(err == nil && d != "" && !strings.Contains(d, "/"), fmt.Sprintf("network.devices[%d]", i), "is %q, want a name such as eth0 or ens*", d)
	}
	ports := 0
	for i, p := range n.Ports {
		field := fmt.Sprintf("network.ports[%d]", i)
		last := max(p.Port, p.To)
		v.Check(p.Port >= 1 && last <= 65535 && (p.To == 0 || p.To >= p.Port), field, "are ports %d to %d, want 1 to 65535, and to not below port", p.Port, p.To)
		ports += max(0, last-p.Port+1)
		class(field+".class", p.Class)
	}
	v.Check(ports <= bpf.MaxPorts/2, "network.ports", "are %d ports in all, want at most %d", ports, bpf.MaxPorts/2)
	v.Check(len(n.Ranges) <= bpf.MaxRanges, "network.ranges", "has %d entries, want at most %d", len(n.Ranges), bpf.MaxRanges)
	for i, r := range n.Ranges {
		field := fmt.Sprintf("network.ranges[%d]", i)
		_, err := netip.ParsePrefix(r.CIDR)
		v.Check(err == nil, field+".cidr", "is %q, want a range such as 10.0.0.0/8 or fd00::/8", r.CIDR)
		class(field+".class", r.Class)
	}
	v.Check(len(n.Classes) <= 256, "network.cgroupClasses", "has %d entries, want at most 256", len(n.Classes))
	for i, c := range n.Classes {
		field := fmt.Sprintf("network.cgroupClasses[%d]", i)
		_, err := path.Match(c.Pattern, "")
		v.Check(err == nil && c.Pattern != "", field+".pattern", "is %q, want a pattern such as spegel.service or *buildkit*", c.Pattern)
		class(field+".class", c.Class)
	}
}

// options are the configuration as netattr takes it; what does not validate is
// left out.
func (c Config) networkOptions() netattr.Options {
	n := c.Network
	o := netattr.Options{
		Off: !n.Enabled, Sys: n.Sys, Cgroups: n.Cgroups, Pins: n.Pins, Mark: n.Mark, Datagrams: n.Datagrams, Devices: n.Devices,
		Ports: map[uint16]traffic.Class{}, Ranges: map[netip.Prefix]traffic.Class{},
	}
	// Engines that are no pods are known by their ports; pods by their cgroups. At
	// the ports of the web is all else too: pulls, images, what pods ask.
	for _, e := range c.Endpoints {
		if port, ok := portOf(e.URL); ok && port != 80 && port != 443 {
			o.Ports[port] = traffic.Serving
		}
	}
	for _, p := range n.Ports {
		class, _ := traffic.ParseClass(p.Class)
		for port := p.Port; port <= max(p.Port, p.To); port++ {
			o.Ports[uint16(port)] = class
		}
	}
	for _, r := range n.Ranges {
		class, _ := traffic.ParseClass(r.Class)
		if prefix, err := netip.ParsePrefix(r.CIDR); err == nil {
			o.Ranges[prefix.Masked()] = class
		}
	}
	for _, r := range n.Classes {
		class, _ := traffic.ParseClass(r.Class)
		o.Rules = append(o.Rules, netattr.Rule{Pattern: r.Pattern, Class: class})
	}
	return o
}

// portOf is the port that an engine's URL names.
func portOf(engine string) (uint16, bool) {
	u, err := url.Parse(engine)
	if err != nil {
		return 0, false
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	return uint16(port), err == nil && port > 0
}
