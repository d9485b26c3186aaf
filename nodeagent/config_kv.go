package nodeagent

import (
	"path/filepath"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// KV configures the KV space that claims may take. Nothing is taken, and
// nothing made on the drive, while its sizes are 0.
type KV struct {
	Dir    string      `yaml:"dir"`
	Memory units.Bytes `yaml:"memory"` // of all claims together
	NVMe   units.Bytes `yaml:"nvme"`
	// NamespaceMemory and NamespaceNVMe bound what the claims of one namespace
	// take together; 0 is no bound.
	NamespaceMemory units.Bytes `yaml:"namespaceMemory"`
	NamespaceNVMe   units.Bytes `yaml:"namespaceNVMe"`
}

func (k KV) validate(v *configfile.Problems) {
	v.Check(filepath.IsAbs(k.Dir), "kv.dir", "is %q, want an absolute path", k.Dir)
	v.Check(k.NamespaceMemory <= k.Memory, "kv.namespaceMemory", "is %s, want at most kv.memory, %s", k.NamespaceMemory, k.Memory)
	v.Check(k.NamespaceNVMe <= k.NVMe, "kv.namespaceNVMe", "is %s, want at most kv.nvme, %s", k.NamespaceNVMe, k.NVMe)
}

func (k KV) budget() kvtier.Budget {
	return kvtier.Budget{Memory: k.Memory, NVMe: k.NVMe, NamespaceMemory: k.NamespaceMemory, NamespaceNVMe: k.NamespaceNVMe}
}
