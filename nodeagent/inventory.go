package nodeagent

import (
	"fmt"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
)

// inventory gives the node's devices: those of the configuration and those of
// the inventory's file. The devices of endpoints are among them.
func (c Config) inventory() ([]device.Device, error) {
	list := c.devices()
	if c.Inventory.Sim == "" {
		return list, nil
	}
	simulated, err := simgpu.Load(c.Inventory.Sim, c.Node)
	if err != nil {
		return nil, fmt.Errorf("read inventory.sim: %w", err)
	}
	known := map[device.ID]bool{}
	for _, d := range list {
		known[d.ID] = true
	}
	for _, d := range simulated {
		if known[d.ID] {
			return nil, fmt.Errorf("read inventory.sim: %s has device %s, which is under devices too", c.Inventory.Sim, d.ID)
		}
		known[d.ID] = true
		list = append(list, d)
	}
	for _, e := range c.Endpoints {
		for _, id := range e.Devices {
			if !known[device.ID(id)] {
				return nil, fmt.Errorf("read inventory.sim: endpoint %s runs on %s, which is neither in %s nor under devices", e.Name, id, c.Inventory.Sim)
			}
		}
	}
	return list, nil
}
