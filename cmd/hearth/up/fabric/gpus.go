package fabric

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
)

// gpuWord is a product and how many a node has: "h100x8".
var gpuWord = regexp.MustCompile(`^([a-z][a-z0-9]*)x([1-9][0-9]?)$`)

// equip gives a node the simulated GPUs of Options.GPUs.
func (f *Fabric) equip(n *Node) error {
	if f.opts.GPUs == "" {
		return nil
	}
	path := f.opts.GPUs
	if word := gpuWord.FindStringSubmatch(f.opts.GPUs); word != nil {
		path = filepath.Join(n.dir, "gpus.yaml")
		text := fmt.Sprintf("apiVersion: %s\nkind: %s\ngpus:\n- product: %s\n  count: %s\n", configfile.APIVersion, simgpu.Kind, word[1], word[2])
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return fmt.Errorf("write GPUs of %s: %w", n.Name, err)
		}
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("find GPUs of %s: %w", n.Name, err)
	}
	devices, err := simgpu.Load(path, n.Name)
	if err != nil {
		return fmt.Errorf("read GPUs of %s: %w", n.Name, err)
	}
	n.inventory = path
	for _, d := range devices {
		n.gpus = append(n.gpus, string(d.ID))
	}
	return nil
}

// device names the GPU of a node's i-th engine; engines share where there are more.
func (n *Node) device(i int) string {
	if len(n.gpus) == 0 {
		return "gpu-" + strconv.Itoa(i)
	}
	return n.gpus[i%len(n.gpus)]
}
