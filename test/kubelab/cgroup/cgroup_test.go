package cgroup

import "testing"

func TestOnlyMountsOfAWholeHierarchyCount(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ line, at, kind string }{
		{"31 24 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw", "/sys/fs/cgroup/unified", "cgroup2"},
		{"32 24 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory", "/sys/fs/cgroup/memory", "cgroup"},
		{"33 24 0:28 /part /other rw - cgroup cgroup rw,memory", "", ""},
		{"nonsense", "", ""},
		{"", "", ""},
	} {
		at, kind, ok := parseMount(c.line)
		if at != c.at || kind != c.kind || ok != (c.at != "") {
			t.Errorf("%q: %q %q %t", c.line, at, kind, ok)
		}
	}
}
