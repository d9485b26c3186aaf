// Package cgroups owns the way from a cgroup's id, as sockets carry it, to who
// that is: Tree finds the directory with the id, Parse reads the directory's
// path. The network accounting in nodeagent/netattr calls it, from one
// goroutine. It asks neither the kubelet nor a container runtime, so it knows
// ids and never names; it never writes below the tree, and it never walks the
// tree more than once a second for ids that are not there.
package cgroups

import (
	"slices"
	"strings"
)

// Owner is what a cgroup's path says of who is in it. The zero value is the
// root, or a path that says nothing.
type Owner struct {
	// PodUID is the pod's UID with dashes. That of a static pod is the 32
	// hexadecimal digits of its manifest's hash, as the kubelet has it. Where a
	// pod runs pods of its own it is the outer one, which this node's kubelet knows.
	PodUID string
	// Container is the id, 64 hexadecimal digits, that the node's runtime gave:
	// what containers nest in it is the outer one's. It may be a pod's sandbox,
	// which the path does not tell. Empty for the pod itself and what monitors it.
	Container string
	// Unit names what is no pod: the last systemd unit of the path that is not a
	// container's scope, else the name at the top. Empty for a pod.
	Unit string
	// Runtime is set for the container runtime itself, or what loads images for
	// it: its bytes are those of images. Never set for what is in a pod.
	Runtime bool
}

// maxPath is the longest path, in bytes, that Parse reads: the kernel's PATH_MAX.
const maxPath = 4096

// Parse tells whose cgroup has a path, relative to the root of cgroup2. It knows
// what kubelets make with both drivers, below any root of theirs, and how
// containerd, CRI-O, Docker and Podman name containers. What it does not know is
// a unit, and a path longer than 4096 bytes is nobody's. It never fails.
func Parse(path string) Owner {
	if len(path) > maxPath {
		return Owner{}
	}
	var o Owner
	var top, unit string // the name at the top, and the last unit
	kubepods := false    // a parent is the kubelet's, as the cgroupfs driver names it
	settled := false     // what is below belongs to the pod's container or its monitor
	all := names(path)
	for depth, name := range all {
		if o.PodUID != "" {
			if !settled {
				o.Container, settled = containerOf(name)
			}
			continue
		}
		if uid, inner, ok := podOf(name, kubepods); ok {
			o = Owner{PodUID: uid}
			if inner != "" {
				o.Container, settled = containerOf(inner)
			}
			continue
		}
		kubepods = kubepods || name == "kubepods"
		switch id, container := containerOf(name); {
		case container:
			if o.Container == "" {
				o.Container = id
			}
			o.Runtime = false
		case isUnit(name):
			unit, o.Runtime = name, isRuntime(name)
		case depth == 0:
			top = name
		case depth == 1 && (top == "podruntime" || top == "system"):
			top += "/" + name // so Talos groups its services
		}
	}
	if o.PodUID != "" {
		return o
	}
	if o.Unit = unit; unit == "" {
		o.Unit = top
		o.Runtime = o.Container == "" && (isRuntime(top) || len(all) == 1 && isRuntimeName(top))
	}
	return o
}

// names gives the names of a path that are not empty.
func names(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// podOf tells whether a directory is a pod's and gives its UID. With the systemd
// driver the name says all: PREFIXkubepods-burstable-podUID.slice, with the
// UID's dashes as underscores. With cgroupfs it is podUID below kubepods. A
// runtime that was told the other driver's name than its own takes the whole
// triple slice:prefix:id as one name; inner is then the part of the container.
func podOf(name string, kubepods bool) (uid, inner string, ok bool) {
	name, inner, _ = strings.Cut(name, ":")
	if bare, cut := strings.CutPrefix(name, "pod"); cut && kubepods {
		if uid, ok = podUID(bare); ok {
			return uid, inner, true
		}
	}
	slice, cut := strings.CutSuffix(name, ".slice")
	at := strings.LastIndex(slice, "-pod")
	if !cut || at < 0 {
		return "", "", false
	}
	parent := strings.TrimSuffix(strings.TrimSuffix(slice[:at], "-burstable"), "-besteffort")
	if parent != "kubepods" && !strings.HasSuffix(parent, "-kubepods") {
		return "", "", false
	}
	uid, ok = podUID(slice[at+len("-pod"):])
	return uid, inner, ok
}

// podUID reads a UID with dashes or underscores, or a static pod's 32 digits.
func podUID(text string) (string, bool) {
	switch len(text) {
	case 32:
		return text, isHex(text)
	case 36:
		uid := strings.ReplaceAll(text, "_", "-")
		groups := strings.Split(uid, "-")
		ok := len(groups) == 5 && !slices.ContainsFunc(groups, func(g string) bool { return !isHex(g) })
		return uid, ok && len(groups[0]) == 8 && len(groups[1]) == 4 && len(groups[2]) == 4 && len(groups[3]) == 4
	}
	return "", false
}

// containerOf gives the id in a container's directory: the id alone, or after a
// runtime's prefix, in a scope of systemd's or not. A monitor's directory
// (crio-conmon-ID, libpod-conmon-ID) is recognised too and has no id to give.
func containerOf(name string) (id string, recognised bool) {
	name = strings.TrimSuffix(name, ".scope")
	if len(name) < 64 {
		return "", false
	}
	prefix, id := name[:len(name)-64], name[len(name)-64:]
	if !isHex(id) || prefix != "" && !strings.ContainsRune("-_:", rune(prefix[len(prefix)-1])) {
		return "", false
	}
	if strings.HasSuffix(prefix, "conmon-") || strings.HasSuffix(prefix, "conmon:") {
		return "", true
	}
	return id, true
}

// isHex reports whether all of a text is lower-case hexadecimal digits.
func isHex(text string) bool {
	for _, b := range []byte(text) {
		if (b < '0' || b > '9') && (b < 'a' || b > 'f') {
			return false
		}
	}
	return true
}

// isUnit reports whether a name is one of systemd's kinds of units that have cgroups.
func isUnit(name string) bool {
	for _, kind := range []string{".service", ".slice", ".scope", ".socket", ".mount", ".swap"} {
		if len(name) > len(kind) && strings.HasSuffix(name, kind) {
			return true
		}
	}
	return false
}

// runtimes are services that pull images: runtimes, distributions of Kubernetes
// with one inside, and snapshotters that load images as they are read.
var runtimes = []string{
	"containerd", "host-containerd", "crio", "cri-o", "docker", "dockerd", "podman", "buildkit", "buildkitd",
	"k3s", "k3s-agent", "rke2", "rke2-server", "rke2-agent", "k0s", "k0sworker", "k0scontroller",
	"snap.microk8s.daemon-containerd", "snap.docker.dockerd",
	"stargz-snapshotter", "nydus-snapshotter", "soci-snapshotter", "soci-snapshotter-grpc", "overlaybd-snapshotter", "gcfsd", "gcfs-snapshotter",
}

// isRuntimeName reports whether a service of OpenRC's, or what a container that
// is a node moves all its own processes into (k3d, Docker in Docker, Talos'
// first process), is a container runtime.
func isRuntimeName(name string) bool { return name == "init" || slices.Contains(runtimes, name) }

// isRuntime reports whether a unit, or a name at the top, is a container runtime's.
func isRuntime(unit string) bool {
	switch unit {
	case "podruntime/runtime", "system/runtime": // Talos: that of the pods, that of the system
		return true
	case "runtime.slice", "podruntime.slice":
		// Made for the runtime; where the kubelet is in it too, that has a unit below.
		return true
	}
	if name, ok := strings.CutSuffix(unit, ".service"); ok {
		return slices.Contains(runtimes, strings.ReplaceAll(name, `\x2d`, "-"))
	}
	name, ok := strings.CutPrefix(unit, "openrc.")
	return ok && slices.Contains(runtimes, name)
}
