package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/apiserver/pkg/cel/lazy"
)

// policy is an admission policy whose expressions are compiled as the API
// server of the oldest minor has them.
type policy struct {
	spec admissionv1.ValidatingAdmissionPolicySpec
	env  *cel.Env
}

func newPolicy(t *testing.T, spec admissionv1.ValidatingAdmissionPolicySpec) policy {
	t.Helper()
	set, err := environment.MustBaseEnvSet(version.MajorMinor(1, 34)).Extend(environment.VersionedOptions{
		IntroducedVersion: version.MajorMinor(1, 0),
		EnvOptions: []cel.EnvOption{
			cel.Variable("object", cel.DynType), cel.Variable("oldObject", cel.DynType),
			cel.Variable("request", cel.DynType), cel.Variable("variables", cel.DynType),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return policy{spec: spec, env: set.NewExpressionsEnv()}
}

func (p policy) eval(t *testing.T, expression string, input map[string]any) (ref.Val, error) {
	t.Helper()
	ast, issues := p.env.Compile(expression)
	if issues.Err() != nil {
		t.Fatalf("%s: %v", expression, issues.Err())
	}
	program, err := p.env.Program(ast)
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	value, _, err := program.Eval(input)
	return value, err
}

// refuses gives why a request is refused, empty where it is let in. A variable
// is evaluated when it is asked for, as the API server does.
func (p policy) refuses(t *testing.T, request, object, oldObject map[string]any) string {
	t.Helper()
	variables := lazy.NewMapValue(types.NewObjectType("variables"))
	input := map[string]any{"request": request, "object": object, "oldObject": oldObject, "variables": variables}
	for _, v := range p.spec.Variables {
		variables.Append(v.Name, func(*lazy.MapValue) ref.Val {
			value, err := p.eval(t, v.Expression, input)
			if err != nil {
				return types.WrapErr(err)
			}
			return value
		})
	}
	for _, c := range p.spec.MatchConditions {
		value, err := p.eval(t, c.Expression, input)
		if err != nil {
			return "error: " + err.Error() // failurePolicy Fail
		}
		if value != types.True {
			return ""
		}
	}
	var reasons []string
	for _, v := range p.spec.Validations {
		value, err := p.eval(t, v.Expression, input)
		if err != nil {
			return "error: " + err.Error()
		}
		if value == types.True {
			continue
		}
		text := v.Message
		if v.MessageExpression != "" {
			said, err := p.eval(t, v.MessageExpression, input)
			if err != nil {
				t.Errorf("%s: %v", v.MessageExpression, err)
				continue
			}
			text = said.Value().(string)
		}
		reasons = append(reasons, text)
	}
	return strings.Join(reasons, "; ")
}

func user(name, node string) map[string]any {
	info := map[string]any{"username": name}
	if node != "" {
		info["extra"] = map[string]any{"authentication.kubernetes.io/node-name": []string{node}}
	}
	return info
}

func TestOnlyTheAgentOfANodeWritesTheNodesSlices(t *testing.T) {
	t.Parallel()
	const agent = "system:serviceaccount:hearth-system:hearth-agent"
	p := newPolicy(t, all[*admissionv1.ValidatingAdmissionPolicy](t, "manifests")["resourceslices.hearth.dev"].Spec)
	slice := func(driver, node string) map[string]any {
		spec := map[string]any{"driver": driver}
		if node != "" {
			spec["nodeName"] = node
		}
		return map[string]any{"spec": spec}
	}
	ours := slice("hearth.dev", "node-1")
	for _, c := range []struct {
		name      string
		user      map[string]any
		operation string
		slice     map[string]any
		want      string // part of the reason; empty: let in
	}{
		{"its own", user(agent, "node-1"), "CREATE", ours, ""},
		{"its own", user(agent, "node-1"), "UPDATE", ours, ""},
		{"its own", user(agent, "node-1"), "DELETE", ours, ""},
		{"another node's", user(agent, "node-2"), "CREATE", ours, "the agent of node node-2 may not write slices of node 'node-1'"},
		{"another node's", user(agent, "node-2"), "UPDATE", ours, "may not write"},
		{"another node's", user(agent, "node-2"), "DELETE", ours, "may not write"},
		{"of all nodes", user(agent, "node-1"), "CREATE", slice("hearth.dev", ""), "slices of node ''"},
		{"another driver's", user(agent, "node-1"), "CREATE", slice("gpu.nvidia.com", "node-1"), "of driver hearth.dev only"},
		{"with a token of no node", user(agent, ""), "CREATE", ours, "bound to no node"},
		{"with a token of no node", user(agent, ""), "DELETE", ours, "bound to no node"},
		{"by a foreign account", user("system:serviceaccount:llm:default", "node-1"), "CREATE", ours, "only the agent (" + agent + ") publishes slices of driver hearth.dev, not system:serviceaccount:llm:default"},
		{"by a foreign account", user("system:serviceaccount:llm:default", "node-1"), "UPDATE", ours, "only the agent"},
		{"by an administrator", user("kubernetes-admin", ""), "CREATE", ours, "only the agent"},
		{"by an administrator", user("kubernetes-admin", ""), "DELETE", ours, ""},
		{"by the kubelet", user("system:node:node-1", ""), "DELETE", ours, ""},
		{"another driver's by its own", user("system:serviceaccount:nvidia:gpu", "node-1"), "CREATE", slice("gpu.nvidia.com", "node-1"), ""},
	} {
		request := map[string]any{"userInfo": c.user, "operation": c.operation}
		object, old := c.slice, c.slice
		switch c.operation {
		case "CREATE":
			old = nil
		case "DELETE":
			object = nil
		}
		got := p.refuses(t, request, object, old)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) || strings.HasPrefix(got, "error") {
			t.Errorf("%s a slice %s: %q, want %q", c.operation, c.name, got, c.want)
		}
	}
}

func TestThePolicyIsBoundDeniesAndNamesTheAgentsAccount(t *testing.T) {
	t.Parallel()
	policies := all[*admissionv1.ValidatingAdmissionPolicy](t, "manifests")
	bindings := all[*admissionv1.ValidatingAdmissionPolicyBinding](t, "manifests")
	for name, p := range policies {
		b := bindings[name]
		if b == nil || b.Spec.PolicyName != name || !slices.Equal(b.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) || b.Spec.MatchResources != nil {
			t.Errorf("policy %s is bound by %+v", name, b)
		}
		if p.Spec.FailurePolicy == nil || *p.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("policy %s lets in what it cannot judge", name)
		}
	}
	d := all[*appsv1.DaemonSet](t, "manifests")["hearth-agent"]
	account := "system:serviceaccount:" + d.Namespace + ":" + d.Spec.Template.Spec.ServiceAccountName
	if k := readKustomization(t, "manifests"); k.Namespace != d.Namespace {
		t.Errorf("the kustomization puts %s into %s", d.Namespace, k.Namespace)
	}
	p := policies["resourceslices.hearth.dev"]
	for _, expression := range []string{p.Spec.MatchConditions[0].Expression, p.Spec.Variables[0].Expression} {
		if !strings.Contains(expression, `"`+account+`"`) {
			t.Errorf("%s does not name %s", expression, account)
		}
	}
}
