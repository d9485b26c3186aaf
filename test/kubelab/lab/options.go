// Package lab runs real Kubernetes clusters on one machine: a control plane and
// nodes, each a machine made of namespaces (package machine), joined by a bridge
// that is in a namespace too. Nothing of a lab is in this system's own network,
// and several labs run at a time.
//
// It owns a lab's directory, its cgroups and, through them, all its processes.
// The end-to-end tests and the program kubelab call it. It knows nothing of
// Hearth but an address to forward to; images and manifests come from outside.
package lab

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Options says what lab to bring up. The zero value is a lab called "default"
// with one node.
type Options struct {
	// Name tells labs apart: lower case, digits and hyphens, at most 20 characters.
	Name string
	// Nodes is how many nodes there are at first, 1 to MaxNodes.
	Nodes int
	// Images are archives that every node has from its beginning.
	Images []string
	// FeatureGates are set in every component.
	FeatureGates map[string]bool
	// RuntimeConfig switches API versions, "resource.k8s.io/v1beta2=true".
	RuntimeConfig []string
	// Args are appended to a component's own: etcd, kube-apiserver,
	// kube-controller-manager, kube-scheduler, kubelet, kube-proxy or containerd.
	Args map[string][]string
	// Forwards are services that answer on this system's loopback.
	Forwards []Forward
	// Replace takes down a lab of that name first. Without it a complete lab is
	// an error, and only what a crashed run left is taken down.
	Replace bool
	// Program is the program kubelab; built from source where it is empty.
	Program string
	// Within bounds Up, but for building programs; 5 minutes where it is 0.
	Within time.Duration
	// Log gets a line for each step; none where it is nil.
	Log io.Writer
}

// Forward makes a service of the cluster answer on 127.0.0.1.
type Forward struct {
	// Name is how Lab.Address knows it.
	Name string `json:"name"`
	// Namespace and Service say whose ready endpoints are dialled, in turn.
	Namespace string `json:"namespace"`
	Service   string `json:"service"`
	// Port is the service's port by name, or by number as its endpoints have it.
	Port string `json:"port"`
	// Local is the port here; a free one where it is 0 or taken.
	Local int `json:"local"`
}

// MaxNodes is how many nodes a lab may have.
const MaxNodes = 64

var validName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$`)

// ErrUp says that a lab is there and complete.
var ErrUp = errors.New("the lab is up")

func (o Options) withDefaults() (Options, error) {
	if o.Name == "" {
		o.Name = "default"
	}
	if !validName.MatchString(o.Name) {
		return o, fmt.Errorf("bring up lab: the name %q is not of lower-case letters, digits and hyphens, at most 20", o.Name)
	}
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	if o.Nodes < 1 || o.Nodes > MaxNodes {
		return o, fmt.Errorf("bring up lab: %d nodes; 1 to %d can be", o.Nodes, MaxNodes)
	}
	for component := range o.Args {
		if !slices.Contains(components, component) {
			return o, fmt.Errorf("bring up lab: no component is called %q; there are %s", component, strings.Join(components, ", "))
		}
	}
	for i, f := range o.Forwards {
		other := slices.IndexFunc(o.Forwards, func(g Forward) bool { return g.Name == f.Name })
		if f.Name == "" || f.Name == apiListener || other != i {
			return o, fmt.Errorf("bring up lab: the name %q of a forward is empty or taken", f.Name)
		}
	}
	if o.Within == 0 {
		o.Within = 5 * time.Minute
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	return o, nil
}

// components are the programs of a lab whose arguments can be changed.
var components = []string{
	"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "dns", "containerd", "kubelet", "kube-proxy",
}

// ParseFeatureGates reads "A=true,B=false".
func ParseFeatureGates(text string) (map[string]bool, error) {
	gates := map[string]bool{}
	for _, pair := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' }) {
		name, value, _ := strings.Cut(pair, "=")
		if name == "" || value != "true" && value != "false" {
			return nil, fmt.Errorf("read feature gates: %q is not NAME=true or NAME=false", pair)
		}
		gates[name] = value == "true"
	}
	return gates, nil
}

// gateFlag is the reverse, sorted; empty without gates.
func gateFlag(gates map[string]bool) string {
	var pairs []string
	for name, on := range gates {
		pairs = append(pairs, fmt.Sprintf("%s=%t", name, on))
	}
	slices.Sort(pairs)
	return strings.Join(pairs, ",")
}
