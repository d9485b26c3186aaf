package cgroups

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	lineHybrid  = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
	lineV1      = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
	lineElse    = "60 25 0:38 / /mnt/with\\040space rw,relatime shared:9 master:3 - cgroup2 none rw\n"
	linePart    = "61 25 0:38 /kubepods/pod1 /part rw - cgroup2 none rw\n"
	lineHidden  = "62 25 0:38 / /hidden rw - cgroup2 none rw\n"
	lineGarbage = "- cgroup2\n\n1 2 3 - cgroup2\ncgroup2 - - cgroup2 \n"
)

func TestTheMountOfCgroup2IsFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mountinfo string
		cgroup2   []string // directories that are
		want      string
	}{
		"version 2 alone":                    {lineV1, []string{"/host/sys/fs/cgroup", "/mnt/with space"}, "/host/sys/fs/cgroup"},
		"both versions":                      {lineV1 + lineHybrid + lineElse, []string{"/host/sys/fs/cgroup/unified", "/mnt/with space"}, "/host/sys/fs/cgroup/unified"},
		"elsewhere":                          {lineV1 + lineElse, []string{"/mnt/with space"}, "/mnt/with space"},
		"the whole tree before a part":       {linePart + lineElse, []string{"/part", "/mnt/with space"}, "/mnt/with space"},
		"a part alone":                       {lineV1 + linePart, []string{"/part"}, "/part"},
		"not what something is mounted over": {lineHidden + linePart, []string{"/part"}, "/part"},
		"version 1 alone":                    {lineV1, nil, ""},
		"garbage":                            {lineGarbage, []string{"3", "-"}, ""},
		"nothing":                            {"", nil, ""},
	} {
		got, err := findRoot("/host/sys", strings.NewReader(c.mountinfo), func(dir string) bool { return slices.Contains(c.cgroup2, dir) })
		if got != c.want || errors.Is(err, ErrNotMounted) != (c.want == "") {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestWhereCgroup2IsNotMountedTheErrorSaysSo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := FindRoot(dir, strings.NewReader(lineV1+"60 25 0:38 / "+dir+" rw - cgroup2 none rw\n"))
	if !errors.Is(err, ErrNotMounted) || !strings.Contains(err.Error(), "cgroup2 is not mounted: neither "+dir+"/fs/cgroup nor "+dir+"/fs/cgroup/unified") {
		t.Errorf("got %v", err)
	}
}

func TestWhatIsNoDirectoryOfCgroup2IsNoRoot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink(filepath.Join(dir, "gone"), link)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, file, link, filepath.Join(dir, "nothing")} {
		if root, err := Root(path); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: root %q, %v", path, root, err)
		}
	}
}

func TestTheCgroupsOfThisMachineAreRead(t *testing.T) {
	t.Parallel()
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer mounts.Close()
	root, err := FindRoot("/sys", mounts)
	if errors.Is(err, ErrNotMounted) {
		return // the other tests say what holds on a machine that has it
	}
	if err != nil {
		t.Fatal(err)
	}
	tree := New(Options{Root: root})
	id, err := tree.RootID()
	if err != nil {
		t.Fatal(err)
	}
	if path, ok := tree.Lookup(id); !ok || path != "/" {
		t.Errorf("the root, id %d, is %q, %v", id, path, ok)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	past, err := Root(link)
	if err != nil {
		t.Fatal(err)
	}
	if other, err := New(Options{Root: past}).RootID(); err != nil || other != id {
		t.Errorf("past a link the root is %d, %v; want %d", other, err, id)
	}
}
