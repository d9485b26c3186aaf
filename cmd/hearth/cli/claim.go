package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/hearth-dev/hearth/api/v1alpha1"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// claimFlags are what `hearth claim` is asked for.
type claimFlags struct {
	model, ref, size       string
	gpus                   int
	product, same          string
	kv, kvNVMe             string
	name, namespace, mount string
	shared                 bool
}

// maxClaimGPUs is the most results that one allocation may have, less those
// for weights and KV space.
const maxClaimGPUs = 30

// sames are what --same takes, and the attribute that is then equal.
var sames = map[string]string{
	"pcieRoot": "resource.kubernetes.io/pcieRoot",
	"numaNode": "resource.kubernetes.io/numaNode",
	"nvlink":   dradriver.Name + "/" + dradriver.AttributeNVLinkGroup,
}

func (a *app) claim() *cobra.Command {
	var f claimFlags
	command := &cobra.Command{
		Use:   "claim --model M [--gpus N] [--kv SIZE]",
		Short: "Print the ResourceClaimTemplate for GPUs, weights and KV space",
		Long: `Claim prints the ResourceClaimTemplate that a pod needs, ready for kubectl apply:

    hearth claim --model smol --ref hub://org/smol --gpus 2 --kv 40Gi | kubectl apply -f -

Without --ref the pod waits for a node that has the model. With it the scheduler
prefers such a node, and takes another one that then pulls the model first.
--shared prints a ResourceClaim instead, one that several pods use together.
Nothing is asked of a cluster or a node.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			text, err := f.render()
			if err != nil {
				return err
			}
			if _, err := fmt.Fprint(a.Out, text); err != nil {
				return fmt.Errorf("write answer: %w", err)
			}
			return nil
		},
	}
	o := command.Flags()
	o.StringVar(&f.model, "model", "", "short name of the model, as 'hearth models list' ends with (default the last part of --ref)")
	o.StringVar(&f.ref, "ref", "", "what a node without the model pulls, hub://org/name@revision")
	o.StringVar(&f.size, "size", "", "how large the model is, such as 140Gi: keeps off nodes without that room (with --ref)")
	o.StringVar(&f.mount, "path", "", "where the container finds the model (default /hearth/model)")
	o.IntVar(&f.gpus, "gpus", 1, "number of GPUs; 0 asks for none")
	o.StringVar(&f.product, "product", "", `which GPUs, by product name, such as "NVIDIA H200"`)
	o.StringVar(&f.same, "same", "", "what the GPUs have in common: pcieRoot, numaNode or nvlink")
	o.StringVar(&f.kv, "kv", "", "KV space in memory, such as 40Gi")
	o.StringVar(&f.kvNVMe, "kv-nvme", "", "KV space on the drive, such as 200Gi")
	o.StringVar(&f.name, "name", "", "name of the object (default after the model)")
	o.StringVar(&f.namespace, "namespace", "", "namespace of the object (default what kubectl has)")
	o.BoolVar(&f.shared, "shared", false, "print a ResourceClaim that several pods share")
	return command
}

// claimPlan is what the flags mean.
type claimPlan struct {
	claimFlags
	source       artifact.Ref // zero without --ref
	kvRAM, kvDsk string       // quantities, empty for none
	cold         string       // quantity, empty for none
}

func (f claimFlags) plan() (claimPlan, error) {
	p := claimPlan{claimFlags: f}
	if f.ref != "" {
		ref, err := artifact.ParseRef(f.ref)
		if err != nil {
			return p, terminal.Usagef("--ref: %w", err)
		}
		if ref.Scheme != artifact.SchemeHub {
			return p, terminal.Usagef("--ref %s names a folder of one node; want hub://org/name@revision", f.ref)
		}
		p.source = ref
		last := ref.Name[strings.LastIndex(ref.Name, "/")+1:]
		if p.model == "" {
			p.model = last
		}
		if p.model != last {
			return p, terminal.Usagef("--model %s is not what --ref %s brings, which is known as %s; leave --model out", f.model, f.ref, last)
		}
	}
	var err error
	for _, q := range []struct {
		flag, text string
		into       *string
	}{{"--kv", f.kv, &p.kvRAM}, {"--kv-nvme", f.kvNVMe, &p.kvDsk}, {"--size", f.size, &p.cold}} {
		if *q.into, err = quantity(q.flag, q.text); err != nil {
			return p, err
		}
	}
	switch {
	case p.model == "" && f.gpus == 0 && f.kv == "" && f.kvNVMe == "":
		return p, terminal.Usagef("nothing to claim: want --model, --gpus or --kv")
	case len(p.model) > 200 || strings.ContainsFunc(p.model, func(r rune) bool { return r < ' ' || r > '~' || r == '/' }):
		return p, terminal.Usagef("--model %q is no short name of a model", p.model)
	case f.gpus < 0 || f.gpus > maxClaimGPUs:
		return p, terminal.Usagef("--gpus %d: want 0 to %d", f.gpus, maxClaimGPUs)
	case f.gpus == 0 && (f.product != "" || f.same != ""):
		return p, terminal.Usagef("--product and --same speak of GPUs, and --gpus is 0")
	case len(f.product) > 200 || strings.ContainsFunc(f.product, func(r rune) bool { return r < ' ' || r > '~' }):
		return p, terminal.Usagef("--product %q is no product name", f.product)
	case f.same != "" && sames[f.same] == "":
		return p, terminal.Usagef("--same %s: want pcieRoot, numaNode or nvlink", f.same)
	case f.size != "" && f.ref == "":
		return p, terminal.Usagef("--size is of what a node pulls; it goes with --ref")
	case f.mount != "" && p.model == "":
		return p, terminal.Usagef("--path is where the model goes, and there is no --model")
	}
	if err := (&v1alpha1.WeightsConfig{ContainerPath: f.mount}).Validate(); err != nil {
		return p, terminal.Usagef("--path: %w", err)
	}
	if p.name == "" {
		p.name = objectName(p.model)
	}
	if bad := validation.IsDNS1123Subdomain(p.name); len(bad) > 0 {
		return p, terminal.Usagef("--name %q: %s", p.name, bad[0])
	}
	if f.namespace != "" && len(validation.IsDNS1123Label(f.namespace)) > 0 {
		return p, terminal.Usagef("--namespace %q is no name of a namespace", f.namespace)
	}
	return p, nil
}

// quantity reads a size as Kubernetes writes it; "40GiB" is taken for 40Gi.
func quantity(flag, text string) (string, error) {
	if text == "" {
		return "", nil
	}
	q, err := resource.ParseQuantity(strings.TrimSuffix(strings.TrimSuffix(text, "B"), "b"))
	if err != nil || q.Sign() <= 0 {
		return "", terminal.Usagef("%s %s: want a size such as 40Gi", flag, text)
	}
	return q.String(), nil
}

// objectName makes the name of an object after a model's.
func objectName(model string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			return r
		}
		return '-'
	}, model)
	name = strings.Trim(name, "-")
	if name = strings.Trim(name[:min(len(name), 60)], "-"); name == "" {
		return "gpus"
	}
	return name
}
