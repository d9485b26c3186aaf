package manifests

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	dracel "k8s.io/dynamic-resource-allocation/cel"

	"github.com/hearth-dev/hearth/api/v1alpha1"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/router"
)

// device is one of each kind as it is published.
func device(kind string, change map[string]string) dracel.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	d := dracel.Device{Driver: dradriver.Name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"kind": text(kind)}}
	if kind == dradriver.KindWeights {
		for _, name := range []string{"model", "repo", "revision", "digest", "format", "quantization", "tier"} {
			d.Attributes[resourceapi.QualifiedName(name)] = text("")
		}
	}
	for name, value := range change {
		d.Attributes[resourceapi.QualifiedName(name)] = text(value)
	}
	return d
}

// matches reports whether all selectors take a device.
func matches(t *testing.T, selectors []resourceapi.DeviceSelector, d dracel.Device) bool {
	t.Helper()
	for _, s := range selectors {
		compiled := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true}).CompileCELExpression(s.CEL.Expression, dracel.Options{})
		if compiled.Error != nil {
			t.Fatalf("%s: %v", s.CEL.Expression, compiled.Error)
		}
		ok, _, err := compiled.DeviceMatches(t.Context(), d)
		if err != nil {
			t.Fatalf("%s: %v", s.CEL.Expression, err)
		}
		if !ok {
			return false
		}
	}
	return true
}

func TestEachClassTakesItsKindOfDevicesAndNoOther(t *testing.T) {
	t.Parallel()
	classes := all[*resourceapi.DeviceClass](t, "manifests")
	kinds := []string{dradriver.KindGPU, dradriver.KindWeights, dradriver.KindKV}
	if len(classes) != len(kinds) {
		t.Errorf("%d classes", len(classes))
	}
	for _, kind := range kinds {
		class := classes[kind+"."+dradriver.Name]
		if class == nil {
			t.Errorf("no class for %s", kind)
			continue
		}
		for _, other := range kinds {
			d := device(other, nil)
			if got := matches(t, class.Spec.Selectors, d); got != (kind == other) {
				t.Errorf("class %s takes %s: %v", class.Name, other, got)
			}
			d.Driver = "gpu.nvidia.com"
			if matches(t, class.Spec.Selectors, d) {
				t.Errorf("class %s takes another driver's devices", class.Name)
			}
		}
	}
}

func TestTheExamplesClaimWhatTheyMean(t *testing.T) {
	t.Parallel()
	classes := all[*resourceapi.DeviceClass](t, "manifests")
	for _, file := range files(t, "examples") {
		for _, o := range objects(t, ".") {
			template, ok := o.Object.(*resourceapi.ResourceClaimTemplate)
			if !ok || o.file != file {
				continue
			}
			names := map[string]bool{}
			model := "org/name"
			if strings.HasSuffix(file, "-sim.yaml") {
				model = "demo/tiny"
			}
			for _, r := range template.Spec.Spec.Devices.Requests {
				if r.Exactly != nil {
					names[r.Name] = true
					if classes[r.Exactly.DeviceClassName] == nil {
						t.Errorf("%s: no class %s", file, r.Exactly.DeviceClassName)
					}
					continue
				}
				checkAlternatives(t, file, model, r, classes, names)
			}
			for _, c := range template.Spec.Spec.Devices.Config {
				config, err := v1alpha1.Decode(c.Opaque.Parameters.Raw)
				if err != nil {
					t.Errorf("%s: %v", file, err)
				}
				if w, is := config.(*v1alpha1.WeightsConfig); !is || w.Ref != "hub://"+model+"@main" {
					t.Errorf("%s: configuration %+v", file, config)
				}
				for _, r := range c.Requests {
					if !names[r] || c.Opaque.Driver != dradriver.Name {
						t.Errorf("%s: configuration for request %s of driver %s", file, r, c.Opaque.Driver)
					}
				}
			}
		}
	}
}

// checkAlternatives checks a prioritized list: a warm node first, a cold one last.
func checkAlternatives(t *testing.T, file, model string, r resourceapi.DeviceRequest, classes map[string]*resourceapi.DeviceClass, names map[string]bool) {
	t.Helper()
	warm := device(dradriver.KindWeights, map[string]string{"repo": model, "tier": "nvme"})
	cold := device(dradriver.KindWeights, map[string]string{"tier": dradriver.TierCold})
	other := device(dradriver.KindWeights, map[string]string{"repo": "org/other", "tier": "nvme"})
	last := len(r.FirstAvailable) - 1
	if strings.Contains(file, "warm-replicas") && last != 7 {
		t.Errorf("%s: the cold node is at index %d, want 7", file, last)
	}
	for i, a := range r.FirstAvailable {
		names[r.Name+"/"+a.Name] = true
		if classes[a.DeviceClassName] == nil {
			t.Errorf("%s: no class %s", file, a.DeviceClassName)
		}
		if matches(t, a.Selectors, warm) != (i == 0) || matches(t, a.Selectors, cold) != (i == last) || matches(t, a.Selectors, other) {
			t.Errorf("%s: alternative %d, %s", file, i, a.Name)
		}
		size := resource.Quantity{}
		if a.Capacity != nil {
			size = a.Capacity.Requests["size"]
		}
		if size.IsZero() != (i != last) {
			t.Errorf("%s: alternative %d asks for size %s", file, i, size.String())
		}
	}
}

// templates gives the pods of a folder's workloads, by file.
func templates(t *testing.T, folder string) map[string]corev1.PodTemplateSpec {
	t.Helper()
	found := map[string]corev1.PodTemplateSpec{}
	for _, o := range objects(t, folder) {
		if d, ok := o.Object.(*appsv1.Deployment); ok {
			found[o.file] = d.Spec.Template
		}
	}
	return found
}

func TestTheExamplesPodsUseTheirClaimsAndTellTheirEngine(t *testing.T) {
	t.Parallel()
	claims := map[string]bool{}
	for _, o := range objects(t, "examples") {
		if c, ok := o.Object.(*resourceapi.ResourceClaimTemplate); ok {
			claims[o.file+c.Name] = true
		}
	}
	list := templates(t, "examples")
	if len(list) != 6 {
		t.Errorf("%d examples", len(list))
	}
	for file, template := range list {
		if !slices.Contains(endpoints.Engines, template.Labels[kube.EngineLabel]) {
			t.Errorf("%s: the agent cannot know its engine by %v", file, template.Labels)
		}
		c := template.Spec.Containers[0]
		if !slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == "http" }) || c.ReadinessProbe == nil {
			t.Errorf("%s: no port http or no readiness probe", file)
		}
		if strings.Contains(file, "extended-resource") {
			if q := c.Resources.Limits["nvidia.com/gpu"]; q.Value() != 1 || len(template.Spec.ResourceClaims) > 0 {
				t.Errorf("%s: %+v", file, c.Resources)
			}
			continue
		}
		claim := template.Spec.ResourceClaims[0]
		if !claims[file+*claim.ResourceClaimTemplateName] || len(c.Resources.Claims) != 1 || c.Resources.Claims[0].Name != claim.Name {
			t.Errorf("%s: claims %+v, used %+v", file, template.Spec.ResourceClaims, c.Resources.Claims)
		}
		if !slices.Contains(c.Args, v1alpha1.DefaultModelPath) {
			t.Errorf("%s: %v does not name where the model is", file, c.Args)
		}
	}
}

func TestTheLabsRouterFindsTheSimulatedExamples(t *testing.T) {
	t.Parallel()
	cfg, err := router.Load(filepath.Join(deployments, "overlays/lab/router.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	pods := cfg.Pools[0].Pods
	selector, err := labels.Parse(pods.Selector)
	if err != nil {
		t.Fatal(err)
	}
	for file, template := range templates(t, "examples") {
		if got := selector.Matches(labels.Set(template.Labels)); got != strings.HasSuffix(file, "-sim.yaml") {
			t.Errorf("%s: found by the router: %v", file, got)
		}
		if !slices.Contains(template.Spec.Containers[0].Args, cfg.Models[0].Targets[0].ServedModel) && strings.HasSuffix(file, "-sim.yaml") {
			t.Errorf("%s: does not serve %s", file, cfg.Models[0].Targets[0].ServedModel)
		}
	}
	bindings := all[*rbacv1.RoleBinding](t, "examples")
	b := bindings["hearth-router-pods"]
	if b == nil || b.Namespace != pods.Namespace || b.RoleRef.Name != "hearth-router-pods" || b.Subjects[0].Name != "hearth-router" {
		t.Errorf("the router may not read the pods of %s: %+v", pods.Namespace, b)
	}
	agents := all[*corev1.Service](t, "manifests")[cfg.Kubernetes.Agents.Service]
	if agents == nil || agents.Spec.ClusterIP != corev1.ClusterIPNone || !agents.Spec.PublishNotReadyAddresses {
		t.Errorf("agents are found by %+v", agents)
	}
}

func TestExtendedResourcesAreAnOptionOfTheGPUClass(t *testing.T) {
	t.Parallel()
	if class := all[*resourceapi.DeviceClass](t, "manifests")["gpu.hearth.dev"]; class.Spec.ExtendedResourceName != nil {
		t.Error("nvidia.com/gpu is offered unsaid")
	}
	text := string(documents(t, "components/extended-resource/kustomization.yaml")[0])
	for _, want := range []string{"name: gpu.hearth.dev", "path: /spec/extendedResourceName", "value: nvidia.com/gpu"} {
		if !strings.Contains(text, want) {
			t.Errorf("the component lacks %q", want)
		}
	}
}
