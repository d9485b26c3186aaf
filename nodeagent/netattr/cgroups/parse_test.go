package cgroups

import (
	"bufio"
	"os"
	"strings"
	"testing"
)

// known reads testdata/paths.txt.
func known(t testing.TB) map[string]Owner {
	t.Helper()
	file, err := os.Open("testdata/paths.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	owners := map[string]Owner{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if lines.Text() == "" || lines.Text()[0] == '#' {
			continue
		}
		f := strings.Fields(lines.Text())
		if len(f) != 5 || owners[f[0]] != (Owner{}) {
			t.Fatalf("a line has a path of its own and four fields: %q", lines.Text())
		}
		for i, field := range f {
			if field == "-" {
				f[i] = ""
			}
		}
		owners[f[0]] = Owner{PodUID: f[1], Container: f[2], Unit: f[3], Runtime: f[4] == "runtime"}
	}
	if lines.Err() != nil || len(owners) < 50 {
		t.Fatalf("%d paths: %v", len(owners), lines.Err())
	}
	return owners
}

func TestPathsThatClustersMakeHaveTheirOwners(t *testing.T) {
	t.Parallel()
	for path, want := range known(t) {
		if got := Parse(path); got != want {
			t.Errorf("%s\n got %+v\nwant %+v", path, got, want)
		}
		if got := Parse(strings.TrimPrefix(path, "/")); got != want {
			t.Errorf("%s without its first slash\n got %+v\nwant %+v", path, got, want)
		}
	}
}

func TestWhatAContainerInAPodNestsIsStillThatContainer(t *testing.T) {
	t.Parallel()
	paths := known(t)
	for path, owner := range paths {
		if owner.PodUID == "" || owner.Container == "" {
			continue
		}
		for below := range paths {
			if got := Parse(path + below); got != owner {
				t.Errorf("%s\nbelow %s\n got %+v\nwant %+v", below, path, got, owner)
			}
		}
	}
}

func TestAPathLongerThanTheKernelAllowsIsNobodys(t *testing.T) {
	t.Parallel()
	if got := Parse("/system.slice/containerd.service" + strings.Repeat("/a", 4096)); got != (Owner{}) {
		t.Errorf("got %+v", got)
	}
}

func FuzzParse(f *testing.F) {
	for path := range known(f) {
		f.Add(path)
	}
	f.Add("/kubepods/pod/::::/.slice/-pod.slice/kubepods-pod.slice:::")
	f.Fuzz(func(t *testing.T, path string) {
		o := Parse(path)
		if o != Parse("/"+path) && len(path) < maxPath {
			t.Errorf("%q: a slash in front changes its owner", path)
		}
		if o.Container != "" && (len(o.Container) != 64 || !isHex(o.Container)) {
			t.Errorf("%q: container %q", path, o.Container)
		}
		if o.PodUID == "" {
			return
		}
		if uid, ok := podUID(o.PodUID); !ok || uid != o.PodUID {
			t.Errorf("%q: pod %q", path, o.PodUID)
		}
		if o.Unit != "" || o.Runtime {
			t.Errorf("%q: a pod is no unit: %+v", path, o)
		}
		if below := Parse(path + "/x"); below != o && len(path)+2 <= maxPath {
			t.Errorf("%q: %+v, and what is below it %+v", path, o, below)
		}
	})
}
