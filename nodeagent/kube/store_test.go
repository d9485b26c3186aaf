package kube

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/units"
)

func TestAStoreOnTheKubeletsFileSystemsWantsAReserveAboveItsThresholds(t *testing.T) {
	t.Parallel()
	const size = 500 * units.GiB
	drives := map[string]FileSystem{
		"/var/lib/kubelet": {Device: 1, Size: size}, "/images": {Device: 2, Size: size},
		"/same": {Device: 1, Size: size, Free: 400 * units.GiB}, "/with-images": {Device: 2, Size: size}, "/own": {Device: 3, Size: size},
		// Two subvolumes of one file system have devices of their own and one id.
		"/btrfs-kubelet": {Device: 4, ID: [2]int32{7, 7}, Size: size}, "/btrfs-store": {Device: 5, ID: [2]int32{7, 7}, Size: size},
	}
	find := func(path string) (FileSystem, error) { return drives[path], nil }
	for _, c := range []struct {
		dir, kubelet string
		reserve      units.Bytes
		takes        units.Bytes
		thresholds   Thresholds
		want         []string // parts of the refusal; none where it is taken
	}{
		{"/own", "/var/lib/kubelet", 0, 0, DefaultThresholds, nil},
		{"/same", "/var/lib/kubelet", units.GiB, 0, DefaultThresholds, []string{"weights.dir /same", "the kubelet's file system", "10 %", "weights.keepFree to at least 51GiB (it is 1GiB)"}},
		{"/same", "/var/lib/kubelet", 50 * units.GiB, 0, DefaultThresholds, []string{"at least 51GiB"}},
		{"/same", "/var/lib/kubelet", 51 * units.GiB, 0, DefaultThresholds, nil},
		{"/with-images", "/var/lib/kubelet", 51 * units.GiB, 0, DefaultThresholds, []string{"the container runtime's file system", "15 %", "at least 76GiB"}},
		{"/with-images", "/var/lib/kubelet", 76 * units.GiB, 0, DefaultThresholds, nil},
		{"/same", "/var/lib/kubelet", 2 * units.GiB, 0, Thresholds{NodeFS: Threshold{Bytes: units.GiB}}, nil},
		{"/same", "/var/lib/kubelet", 0, 0, Thresholds{}, nil},                            // a kubelet that never evicts for it
		{"/same", "/var/lib/kubelet", units.GiB, 349 * units.GiB, DefaultThresholds, nil}, // 400 GiB are free
		{"/same", "/var/lib/kubelet", units.GiB, 350 * units.GiB, DefaultThresholds, []string{"weights.keepFree to at least 51GiB"}},
		{"/btrfs-store", "/btrfs-kubelet", 0, 0, DefaultThresholds, []string{"the kubelet's file system"}},
	} {
		store := Store{Field: "weights.dir", Dir: c.dir, Reserve: c.reserve, ReserveField: "weights.keepFree"}
		if c.takes > 0 {
			store.Takes, store.TakesField = c.takes, "weights.budget"
		}
		err := checkStore(store, KubeletPaths{Root: c.kubelet, Runtime: "/images"}, c.thresholds, find)
		if (err == nil) != (len(c.want) == 0) {
			t.Errorf("%s with a reserve of %s: %v", c.dir, c.reserve, err)
			continue
		}
		for _, part := range c.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s with a reserve of %s: %q does not say %q", c.dir, c.reserve, err, part)
			}
		}
	}
}

func TestKVSpaceOnTheKubeletsFileSystemIsBoundByWhatIsFree(t *testing.T) {
	t.Parallel()
	find := func(string) (FileSystem, error) {
		return FileSystem{Device: 1, Size: 500 * units.GiB, Free: 400 * units.GiB}, nil
	}
	kv := Store{Field: "kv.dir", Dir: "/kv", Takes: 349 * units.GiB, TakesField: "kv.nvme"}
	paths := KubeletPaths{Root: "/kubelet", Runtime: "/images"}
	thresholds := Thresholds{NodeFS: Threshold{Share: 0.1}}
	if err := checkStore(kv, paths, thresholds, find); err != nil {
		t.Errorf("KV space that leaves more than the threshold gave %v", err)
	}
	kv.Takes = 360 * units.GiB
	if err := checkStore(kv, paths, thresholds, find); err == nil || !strings.Contains(err.Error(), "set kv.nvme to at most 350GiB, or put it on a drive of its own") {
		t.Errorf("KV space that leaves less gave %v", err)
	}
}

func TestFoldersOfOneFileSystemAreFoundToBe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "kubelet"), 0o700); err != nil {
		t.Fatal(err)
	}
	store := Store{Field: "weights.dir", Dir: filepath.Join(dir, "not", "yet", "there"), ReserveField: "weights.keepFree"}
	err := CheckStore(store, KubeletPaths{Root: filepath.Join(dir, "kubelet"), Runtime: "/proc"}, DefaultThresholds)
	if err == nil || !strings.Contains(err.Error(), "10 %") {
		t.Errorf("a store beside the kubelet gave %v", err)
	}
	if err := CheckStore(store, KubeletPaths{Root: "/proc", Runtime: "/proc"}, DefaultThresholds); err != nil {
		t.Errorf("a store on a file system of its own gave %v", err)
	}
}

func TestThresholdsOfAKubeletAreReadAsItHasThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Thresholds{
		`{"kubeletconfig":{}}`: DefaultThresholds,
		`{"kubeletconfig":{"evictionHard":{"imagefs.available":"15%","memory.available":"100Mi","nodefs.available":"5%"}}}`: {
			NodeFS: Threshold{Share: 0.05}, ImageFS: Threshold{Share: 0.15},
		},
		`{"kubeletconfig":{"evictionHard":{"nodefs.available":"1Gi"},"evictionSoft":{"nodefs.available":"20%"}}}`: {
			NodeFS: Threshold{Share: 0.2, Bytes: units.GiB},
		},
	} {
		if got, err := parseConfigz([]byte(text)); err != nil || got != want {
			t.Errorf("%s is %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{`[`, `{"kubeletconfig":{"evictionHard":{"nodefs.available":"much"}}}`, `{"kubeletconfig":{"evictionHard":{"nodefs.available":"200%"}}}`} {
		if got, err := parseConfigz([]byte(text)); err == nil || got != DefaultThresholds {
			t.Errorf("%s is %+v, %v; want an error and the defaults", text, got, err)
		}
	}
}

func TestTheKubeletIsAskedThroughTheAPIServer(t *testing.T) {
	t.Parallel()
	allowed := true
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !allowed || r.URL.Path != "/api/v1/nodes/node-1/proxy/configz" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kubeletconfig":{"evictionHard":{"nodefs.available":"20%"}}}`))
	}))
	defer server.Close()
	clientset, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	client := New(Options{Client: clientset, Node: "node-1"})
	if got, err := client.Thresholds(t.Context()); err != nil || got.NodeFS != (Threshold{Share: 0.2}) {
		t.Errorf("thresholds are %+v, %v", got, err)
	}
	allowed = false
	if got, err := client.Thresholds(t.Context()); err == nil || got != DefaultThresholds {
		t.Errorf("where it may not be asked: %+v, %v", got, err)
	}
}
