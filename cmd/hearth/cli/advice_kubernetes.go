package cli

import (
	"fmt"
	"os"
	"slices"

	"github.com/hearth-dev/hearth/dradriver/simgpu"
	"github.com/hearth-dev/hearth/nodeagent"
)

// kubernetesAdvice names what a node on Kubernetes will miss: folders of the
// kubelet that are not there, and slice pools that nothing can fill.
func kubernetesAdvice(c *nodeagent.Config) []string {
	var odd []string
	if c.Inventory.Sim != "" {
		if _, err := simgpu.Load(c.Inventory.Sim, c.Node); err != nil {
			odd = append(odd, fmt.Sprintf("inventory.sim: %v", err))
		}
	}
	k := c.Kubernetes
	if !k.Enabled || !slices.Contains(c.Roles, nodeagent.RoleControl) {
		return odd // the data role alone has nothing to do with the kubelet
	}
	if len(k.Devices) == 0 {
		odd = append(odd, "kubernetes.devices: is empty, so this node publishes nothing; want some of gpus, weights, kv")
	}
	if slices.Contains(k.Devices, "gpus") && c.Inventory.Sim == "" && len(c.Devices) == 0 {
		odd = append(odd, "kubernetes.devices: gpus are to be published, and neither inventory nor devices names any")
	}
	if slices.Contains(k.Devices, "kv") && c.KV.Memory == 0 && c.KV.NVMe == 0 {
		odd = append(odd, "kubernetes.devices: KV space is to be published, and kv.memory and kv.nvme are 0")
	}
	for _, f := range []setting{
		{"kubernetes.kubeconfig", k.Kubeconfig},
		{"kubernetes.registrarDir", k.RegistrarDir},
		{"kubernetes.pluginsDir", k.PluginsDir},
		{"kubernetes.driverRoot", k.DriverRoot},
	} {
		if f.path == "" {
			continue
		}
		if _, err := os.Stat(f.path); err != nil {
			odd = append(odd, fmt.Sprintf("%s: %v", f.field, err))
		}
	}
	return odd
}
