package tidy

import (
	"slices"
	"strings"
	"testing"
)

// leaves import nothing of Hearth and only the standard library and x/sys.
var leaves = []string{"units", "identity", "durable", "weightcache/artifact", "dradriver/device", "kvtier/block", "nodeagent/netattr/traffic"}

// everyday may be imported anywhere but in leaves.
var everyday = []string{"units", "identity", "durable"}

// law says, for the first prefix that a package's folder has, which of Hearth's
// own packages its code (not its tests) may import: a folder, or a folder and
// everything below it where the entry ends in "/...". The everyday leaves and
// the package's own folder need no mention.
var law = []struct {
	folder string
	may    []string
}{
	{"configfile", nil},
	{"weightcache/artifact", nil},
	{"weightcache/source", []string{"weightcache/artifact", "weightcache/source/..."}},
	{"weightcache/hubmirror", []string{"weightcache/artifact", "weightcache/source"}},
	{"weightcache", []string{"weightcache/..."}},
	{"dradriver/device", nil},
	{"dradriver/stock/stocktest", []string{"dradriver/stock", "weightcache/artifact"}},
	{"dradriver/stock", []string{"weightcache/artifact"}},
	{"dradriver/ledger", []string{"dradriver/device", "weightcache/artifact"}},
	{"dradriver/cdi", []string{"dradriver/ledger"}},
	{"dradriver/simgpu", []string{"dradriver/device", "configfile"}},
	{"dradriver", []string{"dradriver/...", "weightcache/artifact", "api/..."}},
	{"api", nil},
	{"kvtier/block", nil},
	{"kvtier/arena", []string{"kvtier/block"}},
	{"kvtier/index", []string{"kvtier/block"}},
	{"kvtier/segment", []string{"kvtier/block"}},
	{"kvtier/wear", []string{"kvtier/block"}},
	{"kvtier/gate", []string{"kvtier/block"}},
	{"kvtier/resp", []string{"kvtier", "kvtier/block"}},
	{"kvtier/peer", []string{"kvtier", "kvtier/block", "kvtier/gate"}},
	{"kvtier", []string{"kvtier/arena", "kvtier/block", "kvtier/gate", "kvtier/index", "kvtier/segment", "kvtier/wear"}},
	{"durable", []string{"durable/..."}},
	{"identity", nil},
	{"units", nil},
	{"nodeagent/report", []string{"weightcache/artifact", "dradriver/device"}},
	{"nodeagent/health", []string{"dradriver/device"}},
	{"nodeagent/netattr/traffic", nil},
	{"nodeagent/netattr/", []string{"nodeagent/netattr/traffic"}},
	{"nodeagent/netattr", []string{"nodeagent/netattr/..."}},
	{"nodeagent/scaleout", []string{"nodeagent/netattr", "nodeagent/netattr/traffic"}},
	{"nodeagent/", []string{"nodeagent/*", "weightcache/...", "dradriver/...", "kvtier/..."}},
	{"nodeagent", []string{"nodeagent/...", "weightcache/...", "dradriver/...", "kvtier/...", "api/...", "configfile"}},
	{"router/pick", []string{"weightcache/artifact"}},
	{"router/proxy/wire", nil},
	{"router/", []string{"router/*", "nodeagent/report", "weightcache/artifact"}},
	{"router", []string{"router/...", "nodeagent/report", "weightcache/artifact", "configfile"}},
	{"cmd", []string{"..."}},
	{"test", []string{"..."}},
}

// admits reports whether one entry of the law admits a folder.
func admits(entry, folder string) bool {
	if entry == "..." {
		return true
	}
	if below, ok := strings.CutSuffix(entry, "/..."); ok {
		return folder == below || strings.HasPrefix(folder, below+"/")
	}
	if below, ok := strings.CutSuffix(entry, "/*"); ok {
		return strings.HasPrefix(folder, below+"/")
	}
	return entry == folder
}

func TestPackagesImportOnlyWhatTheLawAllows(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		if s.test() || s.dir() == "." {
			continue
		}
		rule := slices.IndexFunc(law, func(r struct {
			folder string
			may    []string
		},
		) bool {
			return s.dir() == r.folder || strings.HasPrefix(s.dir(), strings.TrimSuffix(r.folder, "/")+"/")
		})
		if rule < 0 {
			t.Errorf("%s: the import law says nothing about %s; add it here and to ARCHITECTURE.md", s.name, s.dir())
			continue
		}
		for _, imported := range s.imports() {
			folder, own := strings.CutPrefix(imported, module+"/")
			switch {
			case !own && slices.Contains(leaves, s.dir()) && strings.Contains(strings.Split(imported, "/")[0], ".") && !strings.HasPrefix(imported, "golang.org/x/sys/"):
				t.Errorf("%s: a leaf imports %s; leaves use only the standard library and x/sys", s.name, imported)
			case !own:
			case folder == s.dir() || slices.ContainsFunc(law[rule].may, func(entry string) bool { return admits(entry, folder) }):
			case slices.Contains(everyday, folder) && !slices.Contains(leaves, s.dir()):
			default:
				t.Errorf("%s: %s may not import %s", s.name, s.dir(), folder)
			}
		}
	}
}

// fences name packages that few may import, whatever else the law says.
var fences = []struct {
	imported string
	reason   string
	only     []string
}{
	{"github.com/prometheus/", "metrics are published by the two roots", []string{"nodeagent", "router", "cmd/...", "test/..."}},
	{"k8s.io/", "few rooms know Kubernetes", []string{"api/...", "dradriver", "nodeagent/kube", "nodeagent", "router/pool", "router/kube", "cmd/...", "test/..."}},
	{"tags.cncf.io/", "one room writes CDI specs", []string{"dradriver/cdi", "test/..."}},
	{module + "/cmd", "nothing builds on the command line", []string{"cmd/...", "test/..."}},
	{module + "/test", "tests are imported by tests and by hearth up and bench", []string{"cmd/...", "test/..."}},
	{"github.com/goccy/go-yaml", "one strict reader of configuration", []string{"configfile", "nodeagent/health", "cmd/...", "test/..."}},
	{"github.com/cilium/ebpf", "one room speaks to the kernel's programs", []string{"nodeagent/netattr/bpf", "cmd/...", "test/..."}},
	{"github.com/spf13/cobra", "only cmd has commands", []string{"cmd/...", "test/..."}},
	{"unsafe", "no room here needs it", nil},
}

func TestFencedPackagesAreImportedOnlyWhereTheyBelong(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		if s.test() || s.generated() {
			continue
		}
		for _, imported := range s.imports() {
			for _, fence := range fences {
				if !strings.HasPrefix(imported, fence.imported) {
					continue
				}
				if !slices.ContainsFunc(fence.only, func(entry string) bool { return admits(entry, s.dir()) }) {
					t.Errorf("%s: imports %s; %s", s.name, imported, fence.reason)
				}
			}
		}
	}
}

func TestOnlyCmdAndTestsImportTheRoots(t *testing.T) {
	t.Parallel()
	for _, s := range goFiles(t) {
		top, _, _ := strings.Cut(s.name, "/")
		if top == "cmd" || top == "test" {
			continue
		}
		for _, imported := range s.imports() {
			if (imported == module+"/nodeagent" || imported == module+"/router") && imported != module+"/"+s.dir() {
				t.Errorf("%s: imports the root %s; only cmd and test may", s.name, imported)
			}
		}
	}
}
