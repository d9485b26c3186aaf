package manifests

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/hearth-dev/hearth/identity"
)

// placed says where each folder of the node is in a container.
func placed(t *testing.T, spec corev1.PodSpec, container string) (mounts map[string]corev1.VolumeMount) {
	t.Helper()
	paths := map[string]string{}
	for _, v := range spec.Volumes {
		if v.HostPath != nil {
			paths[v.Name] = v.HostPath.Path
		}
	}
	at := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == container })
	if at < 0 {
		t.Fatalf("no container %s", container)
	}
	mounts = map[string]corev1.VolumeMount{}
	for _, m := range spec.Containers[at].VolumeMounts {
		if path, is := paths[m.Name]; is {
			if path != m.MountPath && path != "/sys" {
				t.Errorf("%s is at %s of container %s: what one role writes down another, or the runtime, finds at the node's path", path, m.MountPath, container)
			}
			mounts[path] = m
		}
	}
	return mounts
}

func TestEveryFolderThatARoleUsesIsMountedThere(t *testing.T) {
	t.Parallel()
	cfg := agentConfig(t, "manifests")
	k := cfg.Kubernetes
	spec := all[*appsv1.DaemonSet](t, "manifests")["hearth-agent"].Spec.Template.Spec
	for role, want := range map[string][]string{
		"control": {
			filepath.Join(k.PluginsDir, identity.Driver), k.RegistrarDir, k.CDIDir, k.ClaimsDir, cfg.Health.StateDir,
			filepath.Dir(cfg.Listen.Socket), filepath.Dir(k.PodResources),
		},
		"data": {filepath.Dir(cfg.Weights.Dir), filepath.Dir(cfg.Listen.DataSocket), "/sys", filepath.Dir(cfg.Network.Pins)},
	} {
		mounts := placed(t, spec, role)
		slices.Sort(want)
		if have := slices.Sorted(maps.Keys(mounts)); !slices.Equal(have, slices.Compact(want)) {
			t.Errorf("%s has %v, uses %v", role, have, want)
		}
	}
	// The container has a /sys of its own.
	if sys := placed(t, spec, "data")["/sys"]; sys.MountPath != cfg.Network.Sys || !sys.ReadOnly || sys.RecursiveReadOnly == nil || *sys.RecursiveReadOnly != corev1.RecursiveReadOnlyIfPossible {
		t.Errorf("the node's /sys is mounted as %+v and used at %s", sys, cfg.Network.Sys)
	}
	// Views are hard links into the store: both are below one mount.
	state := filepath.Dir(cfg.Weights.Dir)
	for _, dir := range []string{cfg.Weights.Dir, cfg.Weights.Dir + "-views", cfg.KV.Dir} {
		if filepath.Dir(dir) != state {
			t.Errorf("%s is not directly below %s", dir, state)
		}
	}
}

func TestNoContainerHasMoreRightsThanItUses(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{"manifests", "overlays/lab"} {
		for _, o := range objects(t, folder) {
			var spec corev1.PodSpec
			switch o := o.Object.(type) {
			case *appsv1.DaemonSet:
				spec = o.Spec.Template.Spec
			case *appsv1.Deployment:
				spec = o.Spec.Template.Spec
			default:
				continue
			}
			// Connections older than the agent are found by the ids of processes.
			if spec.HostNetwork || spec.HostIPC || spec.HostPID != (spec.ServiceAccountName == "hearth-agent") {
				t.Errorf("%s: shares a namespace of the node that it has no use for, or lacks one", o.file)
			}
			for _, c := range spec.Containers {
				s := c.SecurityContext
				var needs []corev1.Capability
				if c.Name == "data" {
					// Removes what engines of other users left in their KV directories; counts bytes in the kernel.
					needs = []corev1.Capability{"DAC_OVERRIDE", "FOWNER", "BPF", "PERFMON"}
				}
				if s == nil || s.Privileged != nil && *s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
					s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem || s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || !slices.Equal(s.Capabilities.Add, needs) {
					t.Errorf("%s: container %s: %+v", o.file, c.Name, s)
				}
				if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Requests.Cpu().IsZero() {
					t.Errorf("%s: container %s has no limit of its own", o.file, c.Name)
				}
				if c.ReadinessProbe == nil {
					t.Errorf("%s: container %s has no readiness probe", o.file, c.Name)
				}
			}
			if spec.SecurityContext == nil || spec.SecurityContext.SeccompProfile == nil || spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("%s: no seccomp profile", o.file)
			}
		}
	}
	// Role data has no token.
	spec := all[*appsv1.DaemonSet](t, "manifests")["hearth-agent"].Spec.Template.Spec
	if spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken {
		t.Error("every container of the agent gets the token")
	}
	for _, c := range spec.Containers {
		has := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return strings.HasPrefix(m.MountPath, "/var/run/secrets") })
		if has != (c.Name == "control") {
			t.Errorf("container %s has the token: %v", c.Name, has)
		}
	}
}

func TestAnUpdateNeverRunsTwoAgentsOnANode(t *testing.T) {
	t.Parallel()
	d := all[*appsv1.DaemonSet](t, "manifests")["hearth-agent"]
	u := d.Spec.UpdateStrategy.RollingUpdate
	if u == nil || u.MaxSurge == nil || u.MaxSurge.String() != "0" {
		t.Errorf("update strategy %+v", u)
	}
	if grace := *d.Spec.Template.Spec.TerminationGracePeriodSeconds; grace < 12 {
		t.Errorf("an agent that ends within 10 s gets %d s", grace)
	}
	if !slices.ContainsFunc(d.Spec.Template.Spec.Tolerations, func(x corev1.Toleration) bool {
		return x.Operator == corev1.TolerationOpExists && x.Key == "" && x.Effect == ""
	}) {
		t.Error("a taint of a node keeps its agent away, and pods there could not be unprepared")
	}
}

func TestProbesAndServicesLeadToPortsThatAreListenedOn(t *testing.T) {
	t.Parallel()
	cfg := agentConfig(t, "manifests")
	port := func(address string) int32 {
		_, text, _ := strings.Cut(address, ":")
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			t.Fatalf("%q: %v", address, err)
		}
		return int32(n)
	}
	listened := map[string]int32{"report": port(cfg.Listen.Report), "admin": port(cfg.Listen.Admin), "data-admin": port(cfg.Listen.DataAdmin)}
	d := all[*appsv1.DaemonSet](t, "manifests")["hearth-agent"]
	for _, c := range d.Spec.Template.Spec.Containers {
		for _, p := range c.Ports {
			if listened[p.Name] != p.ContainerPort {
				t.Errorf("%s: port %s is %d, the configuration has %d", c.Name, p.Name, p.ContainerPort, listened[p.Name])
			}
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			name := probe.HTTPGet.Port.String()
			if !slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == name }) || probe.HTTPGet.Scheme != corev1.URISchemeHTTPS {
				t.Errorf("%s: probe %+v", c.Name, probe.HTTPGet)
			}
		}
	}
	deployment := all[*appsv1.Deployment](t, "manifests")["hearth-router"]
	for name, service := range all[*corev1.Service](t, "manifests") {
		target := map[string]corev1.PodTemplateSpec{"hearth-agents": d.Spec.Template, "hearth-router": deployment.Spec.Template}[name]
		if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(target.Labels)) {
			t.Errorf("service %s selects nothing", name)
		}
		for _, p := range service.Spec.Ports {
			if !slices.ContainsFunc(target.Spec.Containers, func(c corev1.Container) bool {
				return slices.ContainsFunc(c.Ports, func(have corev1.ContainerPort) bool { return have.Name == p.TargetPort.String() })
			}) {
				t.Errorf("service %s: no port %s", name, p.TargetPort.String())
			}
		}
	}
	for _, s := range []*metav1.LabelSelector{d.Spec.Selector, deployment.Spec.Selector} {
		if len(s.MatchLabels) != 1 {
			t.Errorf("selector %+v", s)
		}
	}
}

// use is one kind of call to the API server.
type use struct{ group, resource, verb string }

// calls lists what the programs ask of the API server, by account. What it
// names is looked for in the sources by TestTheListOfCallsIsWhole.
var calls = map[string][]use{
	"hearth-agent": {
		{"resource.k8s.io", "resourceclaims", "get"},
		{"resource.k8s.io", "resourceclaims/status", "update"},
		{"resource.k8s.io", "resourceclaims/status", "patch"},
		{"resource.k8s.io", "resourceclaims/driver", "associated-node:update"},
		{"resource.k8s.io", "resourceclaims/driver", "associated-node:patch"},
		{"resource.k8s.io", "resourceslices", "get"},
		{"resource.k8s.io", "resourceslices", "list"},
		{"resource.k8s.io", "resourceslices", "watch"},
		{"resource.k8s.io", "resourceslices", "create"},
		{"resource.k8s.io", "resourceslices", "update"},
		{"resource.k8s.io", "resourceslices", "patch"},
		{"resource.k8s.io", "resourceslices", "delete"},
		{"", "nodes", "get"},
		{"", "nodes/status", "patch"},
		{"", "pods", "get"},
		{"", "pods", "list"},
		{"", "pods", "watch"},
		{"", "events", "create"},
		{"", "events", "patch"},
	},
	"hearth-router": {
		{"discovery.k8s.io", "endpointslices", "get"},
		{"discovery.k8s.io", "endpointslices", "list"},
		{"discovery.k8s.io", "endpointslices", "watch"},
	},
}

func uses(rules []rbacv1.PolicyRule) (list []use) {
	for _, r := range rules {
		for _, g := range r.APIGroups {
			for _, res := range r.Resources {
				for _, v := range r.Verbs {
					list = append(list, use{g, res, v})
				}
			}
		}
	}
	return list
}

func TestTheRulesAreWhatTheCallsNeedAndNoMore(t *testing.T) {
	t.Parallel()
	given := map[string][]use{
		"hearth-agent":  uses(all[*rbacv1.ClusterRole](t, "manifests")["hearth-agent"].Rules),
		"hearth-router": uses(all[*rbacv1.Role](t, "manifests")["hearth-router"].Rules),
	}
	for account, want := range calls {
		for _, u := range want {
			if !slices.Contains(given[account], u) {
				t.Errorf("%s may not %s %s", account, u.verb, u.resource)
			}
		}
		for _, u := range given[account] {
			if !slices.Contains(want, u) {
				t.Errorf("%s may %s %s, which nothing does", account, u.verb, u.resource)
			}
			if u.group == "*" || u.resource == "*" || u.verb == "*" || strings.HasSuffix(u.resource, "/proxy") || u.resource == "nodes" && u.verb != "get" {
				t.Errorf("%s has the rule %+v", account, u)
			}
		}
	}
	pods := all[*rbacv1.ClusterRole](t, "manifests")["hearth-router-pods"]
	if got := uses(pods.Rules); !slices.Equal(got, []use{{"", "pods", "get"}, {"", "pods", "list"}, {"", "pods", "watch"}}) {
		t.Errorf("the router may %v", got)
	}
	for _, b := range all[*rbacv1.ClusterRoleBinding](t, ".") {
		if b.RoleRef.Name == "hearth-router-pods" {
			t.Error("the router may read the pods of every namespace")
		}
		if !slices.ContainsFunc(objects(t, "."), func(o object) bool {
			r, ok := o.Object.(*rbacv1.ClusterRole)
			return ok && r.Name == b.RoleRef.Name
		}) {
			t.Errorf("binding %s names no role that is there", b.Name)
		}
	}
}

// clientCall finds which resources of the API server sources speak of.
var clientCall = regexp.MustCompile(`(?:CoreV1|ResourceV1|DiscoveryV1)\(\)\.(\w+)\(|\bNewFiltered(\w+)Informer\(`)

func TestTheListOfCallsIsWhole(t *testing.T) {
	t.Parallel()
	for account, folders := range map[string][]string{"hearth-agent": {"nodeagent", "dradriver"}, "hearth-router": {"router"}} {
		for _, folder := range folders {
			err := filepath.WalkDir(filepath.Join("../..", folder), func(path string, entry os.DirEntry, err error) error {
				if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
					return err
				}
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				for _, match := range clientCall.FindAllStringSubmatch(string(text), -1) {
					resource := strings.ToLower(match[1])
					if match[2] != "" {
						resource = strings.ToLower(match[2]) + "s"
					}
					if resource == "restclient" || account == "hearth-router" && resource == "pods" {
						continue
					}
					if !slices.ContainsFunc(calls[account], func(u use) bool { return u.resource == resource }) {
						t.Errorf("%s: asks for %s, which is not in the list of calls", path, resource)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}
