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

func TestAnAgentWritesConditionsOfItsOwnIntoTheStatusOfItsOwnNodeAndNothingElse(t *testing.T) {
	t.Parallel()
	const agent = "system:serviceaccount:hearth-system:hearth-agent"
	p := newPolicy(t, all[*admissionv1.ValidatingAdmissionPolicy](t, "manifests")["nodes.hearth.dev"].Spec)
	type fields = map[string]any
	condition := func(kind, status string) fields {
		return fields{"type": kind, "status": status, "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
	}
	// node gives a node as it is, changed.
	node := func(change func(metadata, status fields)) fields {
		metadata := fields{"name": "node-1", "labels": fields{"zone": "a"}, "resourceVersion": "5"}
		status := fields{
			"capacity": fields{"cpu": "8"}, "addresses": []any{fields{"type": "InternalIP", "address": "10.0.0.1"}},
			"conditions": []any{condition("Ready", "True"), condition("MemoryPressure", "False")},
		}
		if change != nil {
			change(metadata, status)
		}
		return fields{"metadata": metadata, "spec": fields{"podCIDR": "10.1.0.0/24"}, "status": status}
	}
	conditions := func(list ...any) fields {
		return node(func(_, status fields) { status["conditions"] = list })
	}
	ready, pressure, ours := condition("Ready", "True"), condition("MemoryPressure", "False"), condition("hearth.dev/NetworkAccounting", "True")
	const others, elsewhere, metadata = "conditions whose type begins with hearth.dev/ and no other", "conditions of a node's status and nothing else", "labels, annotations"
	for name, c := range map[string]struct {
		user   map[string]any
		before fields
		now    fields
		want   string // part of the reason; empty: let in
	}{
		"its own condition":         {user(agent, "node-1"), node(nil), conditions(ready, pressure, ours), ""},
		"its own condition again":   {user(agent, "node-1"), conditions(ready, pressure, ours), conditions(ready, pressure, condition("hearth.dev/NetworkAccounting", "False")), ""},
		"its own among others":      {user(agent, "node-1"), node(nil), conditions(ready, ours, pressure), ""},
		"the version alone":         {user(agent, "node-1"), node(nil), node(func(m, _ fields) { m["resourceVersion"] = "6" }), ""},
		"a node without conditions": {user(agent, "node-1"), node(func(_, s fields) { delete(s, "conditions") }), conditions(ours), ""},
		"a node without status":     {user(agent, "node-1"), fields{"metadata": fields{"name": "node-1"}}, fields{"metadata": fields{"name": "node-1"}, "status": fields{"conditions": []any{ours}}}, ""},
		"of another node":           {user(agent, "node-2"), node(nil), conditions(ready, pressure, ours), "the agent of node node-2 may not write the status of node 'node-1'"},
		"with a token of no node":   {user(agent, ""), node(nil), conditions(ready, pressure, ours), "bound to no node"},
		"Ready":                     {user(agent, "node-1"), node(nil), conditions(condition("Ready", "False"), pressure), others},
		"Ready is gone":             {user(agent, "node-1"), node(nil), conditions(pressure, ours), others},
		"all conditions are gone":   {user(agent, "node-1"), node(nil), node(func(_, s fields) { delete(s, "conditions") }), others},
		"a condition of others":     {user(agent, "node-1"), node(nil), conditions(ready, pressure, condition("example.com/x", "True")), others},
		"a name that only has ours": {user(agent, "node-1"), node(nil), conditions(ready, pressure, condition("nothearth.dev/x", "True")), others},
		"capacity":                  {user(agent, "node-1"), node(nil), node(func(_, s fields) { s["capacity"] = fields{"cpu": "8", "nvidia.com/gpu": "8"} }), elsewhere},
		"an address":                {user(agent, "node-1"), node(nil), node(func(_, s fields) { s["addresses"] = []any{} }), elsewhere},
		"a field more":              {user(agent, "node-1"), node(nil), node(func(_, s fields) { s["images"] = []any{} }), elsewhere},
		"a field less":              {user(agent, "node-1"), node(nil), node(func(_, s fields) { delete(s, "capacity") }), elsewhere},
		"a label":                   {user(agent, "node-1"), node(nil), node(func(m, _ fields) { m["labels"] = fields{"zone": "b"} }), metadata},
		"no labels":                 {user(agent, "node-1"), node(nil), node(func(m, _ fields) { delete(m, "labels") }), metadata},
		"an annotation":             {user(agent, "node-1"), node(nil), node(func(m, _ fields) { m["annotations"] = fields{"a": "b"} }), metadata},
		"a finalizer":               {user(agent, "node-1"), node(nil), node(func(m, _ fields) { m["finalizers"] = []any{"f"} }), metadata},
		"by the kubelet":            {user("system:node:node-1", ""), node(nil), node(func(_, s fields) { s["capacity"] = fields{} }), ""},
	} {
		request := map[string]any{"userInfo": c.user, "operation": "UPDATE"}
		got := p.refuses(t, request, c.now, c.before)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) || strings.HasPrefix(got, "error") {
			t.Errorf("%s: %q, want %q", name, got, c.want)
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
	slice, node := policies["resourceslices.hearth.dev"].Spec, policies["nodes.hearth.dev"].Spec
	for _, expression := range []string{slice.MatchConditions[0].Expression, slice.Variables[0].Expression, node.MatchConditions[0].Expression} {
		if !strings.Contains(expression, `"`+account+`"`) {
			t.Errorf("%s does not name %s", expression, account)
		}
	}
}
