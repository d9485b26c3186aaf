package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/identity"
)

// Names of what a claim asks for; a container's resources.claims[].request and
// configurations name them.
const (
	requestGPU     = "gpu"
	requestWeights = "weights"
	requestKV      = "kv"
)

// Alternatives of the request for weights. The scheduler scores a node by the
// index of the alternative it gets: 8 for the first, 1 for the eighth, and
// compares nodes after that. A warm node at index 0 beside a cold one at index
// 1 is 100 to 87, which other scores outweigh; at index 7 it is 100 to 12.
const (
	alternativeWarm = "warm"
	alternativeCold = "cold"
)

// digestSuffix ends the name of the attribute that stands for one whose value is too long.
const digestSuffix = "Digest"

// lines is text of indented lines.
type lines struct{ strings.Builder }

func (l *lines) add(indent int, format string, args ...any) {
	l.WriteString(strings.Repeat(" ", indent))
	fmt.Fprintf(l, format, args...)
	l.WriteByte('\n')
}

// render gives the object as YAML.
func (f claimFlags) render() (string, error) {
	p, err := f.plan()
	if err != nil {
		return "", err
	}
	l := &lines{}
	p.usage(l)
	l.add(0, "apiVersion: resource.k8s.io/v1")
	kind, indent := "ResourceClaimTemplate", 2
	if p.shared {
		kind, indent = "ResourceClaim", 0
	}
	l.add(0, "kind: %s", kind)
	l.add(0, "metadata:")
	l.add(2, "name: %s", scalar(p.name))
	if p.namespace != "" {
		l.add(2, "namespace: %s", scalar(p.namespace))
	}
	l.add(0, "spec:")
	if !p.shared {
		l.add(2, "spec:")
	}
	p.devices(l, indent+2)
	return l.String(), nil
}

// usage tells how a pod names the claim.
func (p claimPlan) usage(l *lines) {
	field := "resourceClaimTemplateName"
	if p.shared {
		field = "resourceClaimName"
	}
	l.add(0, "# In a pod:")
	l.add(0, "#   spec:")
	l.add(0, "#     resourceClaims: [{name: hearth, %s: %s}]", field, p.name)
	l.add(0, "#     containers: [{name: engine, resources: {claims: [{name: hearth}]}}]")
	if p.model != "" {
		l.add(0, "# The container finds the model at $HEARTH_MODEL_DIR, and as a HF_HUB_CACHE.")
	}
}

func (p claimPlan) devices(l *lines, indent int) {
	l.add(indent, "devices:")
	l.add(indent+2, "requests:")
	if p.gpus > 0 {
		l.add(indent+2, "- name: %s", requestGPU)
		l.add(indent+4, "exactly:")
		l.add(indent+6, "deviceClassName: %s", class(dradriver.KindGPU))
		l.add(indent+6, "allocationMode: ExactCount")
		l.add(indent+6, "count: %d", p.gpus)
		if p.product != "" {
			selector(l, indent+6, is(dradriver.AttributeProductName, p.product))
		}
	}
	if p.model != "" {
		p.weights(l, indent+2)
	}
	if p.kvRAM != "" || p.kvDsk != "" {
		l.add(indent+2, "- name: %s", requestKV)
		l.add(indent+4, "exactly:")
		l.add(indent+6, "deviceClassName: %s", class(dradriver.KindKV))
		l.add(indent+6, "capacity:")
		l.add(indent+8, "requests:")
		if p.kvRAM != "" {
			l.add(indent+10, "%s: %s", dradriver.CapacityMemory, p.kvRAM)
		}
		if p.kvDsk != "" {
			l.add(indent+10, "%s: %s", dradriver.CapacityNVMe, p.kvDsk)
		}
	}
	if p.same != "" {
		l.add(indent+2, "constraints:")
		l.add(indent+2, "- requests: [%s]", requestGPU)
		l.add(indent+4, "matchAttribute: %s", sames[p.same])
	}
	p.config(l, indent+2)
}

// weights asks for a warm node, and with a ref for a cold one where there is none.
func (p claimPlan) weights(l *lines, indent int) {
	l.add(indent, "- name: %s", requestWeights)
	if p.source.IsZero() {
		l.add(indent+2, "# Only nodes that have the model; 'hearth claim --ref hub://org/name' lets others pull it.")
		l.add(indent+2, "exactly:")
		l.add(indent+4, "deviceClassName: %s", class(dradriver.KindWeights))
		selector(l, indent+4, is(dradriver.AttributeModel, p.model))
		return
	}
	l.add(indent+2, "firstAvailable:")
	l.add(indent+2, "- name: %s", alternativeWarm)
	l.add(indent+4, "deviceClassName: %s", class(dradriver.KindWeights))
	selector(l, indent+4, is(dradriver.AttributeRepo, p.source.Name)+" && "+is(dradriver.AttributeRevision, p.source.Revision))
	l.add(indent+2, "# These match nothing. They put the cold node at index 7 of 7, as the scheduler")
	l.add(indent+2, "# prefers a node by the index of its alternative: 8 points for the first, 1 for the eighth.")
	for i := range resourceapi.FirstAvailableDeviceRequestMaxSize - 2 {
		l.add(indent+2, "- name: pad-%d", i+1)
		l.add(indent+4, "deviceClassName: %s", class(dradriver.KindWeights))
		selector(l, indent+4, "false")
	}
	l.add(indent+2, "- name: %s", alternativeCold)
	l.add(indent+4, "deviceClassName: %s", class(dradriver.KindWeights))
	selector(l, indent+4, is(dradriver.AttributeTier, dradriver.TierCold))
	if p.cold != "" {
		l.add(indent+4, "capacity:")
		l.add(indent+6, "requests:")
		l.add(indent+8, "%s: %s", dradriver.CapacitySize, p.cold)
	}
}

// config says what a cold node pulls and where the model goes.
func (p claimPlan) config(l *lines, indent int) {
	if p.model == "" || p.source.IsZero() && p.mount == "" {
		return
	}
	entry := func(request, ref string) {
		l.add(indent, "- requests: [%s]", request)
		l.add(indent+2, "opaque:")
		l.add(indent+4, "driver: %s", dradriver.Name)
		l.add(indent+4, "parameters:")
		l.add(indent+6, "apiVersion: %s", identity.APIVersion)
		l.add(indent+6, "kind: WeightsConfig")
		if ref != "" {
			l.add(indent+6, "ref: %s", quote(ref))
		}
		if p.mount != "" {
			l.add(indent+6, "containerPath: %s", quote(p.mount))
		}
	}
	l.add(indent, "config:")
	switch {
	case p.source.IsZero():
		entry(requestWeights, "")
	case p.mount == "":
		entry(requestWeights+"/"+alternativeCold, p.source.String())
	default:
		entry(requestWeights+"/"+alternativeWarm, "")
		entry(requestWeights+"/"+alternativeCold, p.source.String())
	}
}

func selector(l *lines, indent int, expression string) {
	l.add(indent, "selectors:")
	l.add(indent, "- cel:")
	l.add(indent+4, "expression: %s", quote(expression))
}

// plainScalar is what YAML takes for a string without quotes, but for its keywords.
var plainScalar = regexp.MustCompile(`^[a-z][a-z0-9-]+$`)

// scalar gives a name as a YAML string, quoted where it would be something else.
func scalar(name string) string {
	if plainScalar.MatchString(name) && !slices.Contains([]string{"true", "false", "null", "yes", "no", "on", "off"}, name) {
		return name
	}
	return quote(name)
}

// quote gives any text as a YAML string of one line: in single quotes, in which
// only they are special, and where a character is not printed as it is, with
// the escapes of double ones.
func quote(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
		return strconv.QuoteToASCII(s)
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// class names the DeviceClass of a kind of device.
func class(kind string) string { return kind + "." + dradriver.Name }

// is gives a CEL expression that holds where an attribute has a value: false,
// and no error, on a device that lacks the attribute. A value that is too long
// for an attribute is compared by its digest, as it is published.
func is(attribute, value string) string {
	if len(value) > resourceapi.DeviceAttributeMaxValueLength {
		sum := sha256.Sum256([]byte(value))
		attribute, value = attribute+digestSuffix, hex.EncodeToString(sum[:])
	}
	return fmt.Sprintf(`device.attributes[%q].?%s.orValue("") == %s`, dradriver.Name, attribute, strconv.Quote(value))
}
