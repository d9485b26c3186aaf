package hubmirror

import (
	"strings"
	"testing"
)

func TestPathsAreNormalisedBeforeTheyAreRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		path string
		want route
	}{
		{"/api/models/acme/tiny", route{routeInfo, "acme/tiny", "main", ""}},
		{"/api/models/gpt2", route{routeInfo, "gpt2", "main", ""}},
		{"/api/models/acme/tiny/", route{routeInfo, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/revision/dev%2Ffeature-1", route{routeInfo, "acme/tiny", "dev/feature-1", ""}},
		{"/api/models/gpt2/revision/main", route{routeInfo, "gpt2", "main", ""}},
		{"/api/models/acme/tiny/tree/main", route{routeTree, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/tree/main/onnx/sub", route{routeTree, "acme/tiny", "main", "onnx/sub"}},
		{"/api/models/acme/tiny/tree/refs%2Fpr%2F1", route{routeTree, "acme/tiny", "refs/pr/1", ""}},
		{"/api/models/acme/tiny/tree/refs/pr/1/onnx", route{routeTree, "acme/tiny", "refs/pr/1", "onnx"}},
		{"/api/models/acme/tiny/refs", route{routeRefs, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/auth-check", route{routeAuth, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/paths-info/main", route{routePaths, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/commits/main", route{routeCommits, "acme/tiny", "main", ""}},
		{"/api/models/acme/tiny/xet-read-token/main", route{}},
		{"/api/models/acme/tiny/unknown/main", route{}},
		{"/api/models/acme/tiny/revision", route{}},
		{"/api/models", route{}},
		{"/api/agent-harnesses", route{}},
		{"/api/whoami-v2", route{kind: routeWhoami}},
		{"/api/datasets/a/b", route{kind: routeForeign}},
		{"/datasets/a/b/resolve/main/x", route{kind: routeForeign}},
		{"/acme/tiny/resolve/main/a/b.json", route{routeResolve, "acme/tiny", "main", "a/b.json"}},
		{"/gpt2/resolve/main/config.json", route{routeResolve, "gpt2", "main", "config.json"}},
		{"/acme/tiny/raw/main/config.json", route{routeRaw, "acme/tiny", "main", "config.json"}},
		{"/acme/tiny/resolve/main//etc/passwd", route{routeResolve, "acme/tiny", "main", "etc/passwd"}},
		{"/acme/tiny/resolve/main/../other/x", route{routeResolve, "acme/tiny", "other", "x"}},
		{"/acme/tiny/resolve/main/a%20b%2520c.txt", route{routeResolve, "acme/tiny", "main", "a b%20c.txt"}},
		{"/acme/tiny/resolve/main", route{}},
		{"/acme/tiny/resolve/main/%zz", route{}},
		{"/../../api/models/a/b", route{routeInfo, "a/b", "main", ""}},
		{"", route{}},
		{"/", route{}},
	} {
		if got := parseRoute(c.path); got != c.want {
			t.Errorf("%q: got %+v, want %+v", c.path, got, c.want)
		}
	}
}

func FuzzParseRouteNamesARepositoryAndRevisionOrNothing(f *testing.F) {
	for _, s := range []string{"/api/models/a/b/tree/main/x", "/a/b/resolve/refs/pr/1/x", "/a/raw/HEAD/x", "/api/models/a/revision/x%2Fy", "//..//%2e%2e/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		r := parseRoute(path)
		if r.kind < 0 || r.kind >= routeKinds {
			t.Fatalf("kind %d", r.kind)
		}
		switch r.kind {
		case routeOther, routeForeign, routeWhoami:
			if r.repo != "" || r.rev != "" {
				t.Errorf("%+v names a repository", r)
			}
		default:
			if r.rev == "" {
				t.Errorf("%+v lacks a revision", r)
			}
			if strings.HasPrefix(r.path, "/") && !strings.Contains(path, "%2") {
				t.Errorf("%+v has an absolute path", r)
			}
		}
	})
}

func TestClientFamiliesAreFirstProductsOfBoundedForm(t *testing.T) {
	t.Parallel()
	for agent, want := range map[string]string{
		"unknown/None; hf_hub/2.4.0; python/3.11.7": "hf_hub",
		"vllm/0.32.0; hf_hub/2.4.0; python/3.14.8":  "vllm",
		"llama-cpp/b1-7e4c0a9":                      "llama-cpp",
		"":                                          "other",
		"Mozilla/5.0 (X11)":                         "mozilla",
		strings.Repeat("x", 40):                     "other",
		"ev\"il{} /1":                               "other",
		"tool/None; hf-hub/0.5.0; rust/unknown":     "tool",
	} {
		if got := family(agent); got != want {
			t.Errorf("%q: got %q, want %q", agent, got, want)
		}
	}
}
