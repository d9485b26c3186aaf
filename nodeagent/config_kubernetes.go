package nodeagent

import (
	"path/filepath"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/units"
)

// maxPluginSocket is how long the path of a folder for the driver's sockets may
// be, in bytes, so that the longest name below it stays within the kernel's limit.
const maxPluginSocket = identity.MaxSocketPath - len("/"+identity.Driver+"-reg.sock")

// Kubernetes configures the DRA driver. Nothing of it is read, and nothing of
// Kubernetes is touched, unless Enabled.
type Kubernetes struct {
	Enabled bool `yaml:"enabled"`
	// Kubeconfig is a file; empty is the pod's own account.
	Kubeconfig string `yaml:"kubeconfig"`
	// Devices are the slice pools to publish: "gpus", "weights", "kv".
	Devices []string `yaml:"devices"`
	// Features overrides what is found out about the cluster, by the names of
	// feature gates.
	Features map[string]bool `yaml:"features"`
	// DriverRoot is where the GPU driver's libraries are on the node, for
	// mounts into containers; empty mounts none.
	DriverRoot string `yaml:"driverRoot"`
	CDIDir     string `yaml:"cdiDir"`
	// PluginsDir and RegistrarDir are the kubelet's folders for the sockets of plugins.
	PluginsDir   string `yaml:"pluginsDir"`
	RegistrarDir string `yaml:"registrarDir"`
	// ClaimsDir holds the ledger.
	ClaimsDir string `yaml:"claimsDir"`
	// PodResources is the kubelet's socket that tells of classic device plugins.
	PodResources string `yaml:"podResources"`
	// KubeletDir and RuntimeDir show the file systems of the kubelet and of the
	// container runtime; an empty RuntimeDir tries the usual places.
	KubeletDir string `yaml:"kubeletDir"`
	RuntimeDir string `yaml:"runtimeDir"`
	// EvictionHard is the kubelet's, as its configuration has it; empty asks the
	// kubelet, and takes its defaults where it does not tell.
	EvictionHard map[string]string `yaml:"evictionHard"`
	// PullDeadline is how long a claim's weights may take; a DeviceClass may say otherwise.
	PullDeadline units.Duration `yaml:"pullDeadline"`
}

// Inventory is where GPUs come from, besides devices.
type Inventory struct {
	Sim string `yaml:"sim"` // file of kind SimInventory; empty is none
}

func defaultKubernetes() Kubernetes {
	const kubelet = "/var/lib/kubelet"
	return Kubernetes{
		CDIDir: cdi.DefaultDir, PluginsDir: kubelet + "/plugins", RegistrarDir: kubelet + "/plugins_registry",
		ClaimsDir: identity.StateDir + "/claims", PodResources: kubelet + "/pod-resources/kubelet.sock", KubeletDir: kubelet,
		PullDeadline: units.Duration(30 * time.Minute),
	}
}

// pluginDir is the driver's own folder among the kubelet's plugins.
func (k Kubernetes) pluginDir() string { return filepath.Join(k.PluginsDir, identity.Driver) }

func (k Kubernetes) validate(v *configfile.Problems) {
	_, err := dradriver.ParsePools(k.Devices)
	v.Check(err == nil, "kubernetes.devices", "are wrong: %v", err)
	_, err = dradriver.Features{}.With(k.Features)
	v.Check(err == nil, "kubernetes.features", "are wrong: %v", err)
	_, err = kube.ParseThresholds(k.EvictionHard)
	v.Check(err == nil, "kubernetes.evictionHard", "is wrong: %v", err)
	v.Check(k.Enabled || len(k.Devices) == 0, "kubernetes.devices", "publishes %q while kubernetes.enabled is false", k.Devices)
	for _, f := range []struct {
		name, path string
		optional   bool
	}{
		{"kubeconfig", k.Kubeconfig, true},
		{"driverRoot", k.DriverRoot, true},
		{"cdiDir", k.CDIDir, false},
		{"pluginsDir", k.PluginsDir, false},
		{"registrarDir", k.RegistrarDir, false},
		{"claimsDir", k.ClaimsDir, false},
		{"podResources", k.PodResources, true},
		{"kubeletDir", k.KubeletDir, false},
		{"runtimeDir", k.RuntimeDir, true},
	} {
		v.Check(filepath.IsAbs(f.path) || f.optional && f.path == "", "kubernetes."+f.name, "is %q, want an absolute path", f.path)
	}
	v.Check(len(k.pluginDir()) <= maxPluginSocket, "kubernetes.pluginsDir", "is too long for the kernel's limit on socket paths: want at most %d bytes", maxPluginSocket-len("/"+identity.Driver))
	v.Check(len(k.RegistrarDir) <= maxPluginSocket, "kubernetes.registrarDir", "is too long for the kernel's limit on socket paths: want at most %d bytes", maxPluginSocket)
	v.Check(k.PullDeadline >= units.Duration(time.Second), "kubernetes.pullDeadline", "is %s, want a duration such as 30m", k.PullDeadline)
}

func (i Inventory) validate(v *configfile.Problems) {
	v.Check(i.Sim == "" || filepath.IsAbs(i.Sim), "inventory.sim", "is %q, want the absolute path of a file", i.Sim)
}

// publishes reports whether a slice pool is configured.
func (k Kubernetes) publishes(pool string) bool {
	return k.Enabled && slices.Contains(k.Devices, pool)
}
