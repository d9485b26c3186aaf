package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"

	"github.com/hearth-dev/hearth/test/kubelab/programs"
)

// configuration gives what a node has in /etc but for its credentials, by path
// below it. Every path that Kubernetes, containerd and CDI have by default is as
// they have it, so that manifests made for other clusters fit.
func (n *Node) configuration(ctx context.Context) (map[string][]byte, error) {
	spec, err := n.runtimeSpec(ctx)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{
		"containerd/config.toml": []byte(containerdConfig),
		"containerd/spec.json":   spec,
		"machine-id":             []byte(strings.ReplaceAll(newBootID(), "-", "") + "\n"),
		"resolv.conf":            []byte("nameserver " + dnsAddress + "\n"),
	}
	for name, value := range map[string]any{
		"cni/net.d/10-kubelab.conflist": n.networkConfig(),
		"kubernetes/kubelet.json":       n.kubeletConfig(),
		"kubernetes/kube-proxy.json":    n.proxyConfig(),
	} {
		if files[name], err = json.MarshalIndent(value, "", "  "); err != nil {
			return nil, fmt.Errorf("write %s: %w", name, err)
		}
	}
	return files, nil
}

// containerdConfig leaves root, state and socket where they are by default.
// restrict_oom_score_adj: a system may forbid root to lower a score, and then
// every sandbox would fail.
const containerdConfig = `version = 3

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "` + programs.PauseImage + `"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
tolerate_missing_hugetlb_controller = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "/etc/containerd/spec.json"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "/opt/kubelab/bin/runc"
SystemdCgroup = false
`

// runtimeSpec is what containerd makes every container from: its own default
// with a hook that gives the container the node's boot id.
func (n *Node) runtimeSpec(ctx context.Context) ([]byte, error) {
	text, err := exec.CommandContext(ctx, n.lab.programs.Path("ctr"), "oci", "spec").Output()
	if err != nil {
		return nil, fmt.Errorf("ask containerd for its default spec: %w", err)
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return nil, fmt.Errorf("read containerd's default spec: %w", err)
	}
	if process, ok := spec["process"].(map[string]any); ok {
		delete(process, "rlimits") // containerd's own would be low for a node
	}
	spec["hooks"] = map[string]any{"createContainer": []any{map[string]any{
		"path": "/opt/kubelab/kubelab", "args": []string{"kubelab", "boot-hook"},
	}}}
	return json.MarshalIndent(spec, "", "  ")
}

func (n *Node) networkConfig() any {
	return map[string]any{
		"cniVersion": "1.0.0",
		"name":       "kubelab",
		"plugins": []any{
			map[string]any{
				"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
				"ipam": map[string]any{
					"type":   "host-local",
					"ranges": []any{[]any{map[string]any{"subnet": podSubnet(n.index)}}},
					"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}},
		},
	}
}

func (n *Node) kubeletConfig() any {
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": "/etc/kubernetes/ca.crt"},
		},
		"authorization":            map[string]any{"mode": "Webhook"},
		"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
		"clusterDNS":               []string{dnsAddress},
		"clusterDomain":            clusterDomain,
		"resolvConf":               "/etc/resolv.conf",
		// The system's cgroups may be of version 1 or of both at once.
		"cgroupDriver":           "cgroupfs",
		"cgroupRoot":             n.PodCgroup(),
		"failCgroupV1":           false,
		"enforceNodeAllocatable": []string{},
		"failSwapOn":             false,
		"oomScoreAdj":            0, // lowering it may be forbidden
		// All nodes share this system's drive, which may be rather full.
		"evictionHard": map[string]string{
			"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi", "nodefs.inodesFree": "1%",
		},
		"imageGCHighThresholdPercent": 100,
		"imageGCLowThresholdPercent":  99,
		"serializeImagePulls":         false,
		"protectKernelDefaults":       false,
	}
	if len(n.lab.FeatureGates) > 0 {
		config["featureGates"] = n.lab.FeatureGates
	}
	return config
}

func (n *Node) proxyConfig() any {
	config := map[string]any{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"mode":               "nftables",
		"clusterCIDR":        podNetwork,
		"hostnameOverride":   n.Name(),
		"clientConnection":   map[string]any{"kubeconfig": "/etc/kubernetes/kube-proxy.kubeconfig"},
		"conntrack":          map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
		"healthzBindAddress": "127.0.0.1:10256",
		"metricsBindAddress": "127.0.0.1:10249",
	}
	if len(n.lab.FeatureGates) > 0 {
		config["featureGates"] = n.lab.FeatureGates
	}
	return config
}
