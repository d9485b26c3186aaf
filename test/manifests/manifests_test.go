// Package manifests holds the tests of deployments/: that every file is of its
// type, that the parts agree with each other and with what the programs do, and
// that expressions decide what they are there for. It reads the checkout it
// stands in and needs no cluster.
package manifests

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
)

const deployments = "../../deployments"

// object is one document of a file.
type object struct {
	file string // below deployments
	runtime.Object
}

// files lists the YAML files below a folder of deployments.
func files(t *testing.T, folder string) (list []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(deployments, folder), func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !entry.IsDir() && filepath.Ext(path) == ".yaml" {
			name, err := filepath.Rel(deployments, path)
			list = append(list, name)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// documents splits a file.
func documents(t *testing.T, file string) (list [][]byte) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deployments, file))
	if err != nil {
		t.Fatal(err)
	}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		list = append(list, document)
	}
}

func kindOf(t *testing.T, file string, document []byte) schema.GroupVersionKind {
	t.Helper()
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(document, &kind); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return kind.GroupVersionKind()
}

// own reports whether a document is for a program and not for the API server.
func own(kind schema.GroupVersionKind) bool {
	return kind.Group == "kustomize.config.k8s.io" || kind.Group == "hearth.dev"
}

// objects decodes what goes to the API server, strictly.
func objects(t *testing.T, folder string) (list []object) {
	t.Helper()
	for _, file := range files(t, folder) {
		for _, document := range documents(t, file) {
			kind := kindOf(t, file, document)
			if own(kind) {
				continue
			}
			o, err := scheme.Scheme.New(kind)
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if err := yaml.UnmarshalStrict(document, o); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			list = append(list, object{file, o})
		}
	}
	return list
}

// all gives the objects of one type in a folder, by name.
func all[T runtime.Object](t *testing.T, folder string) map[string]T {
	t.Helper()
	found := map[string]T{}
	for _, o := range objects(t, folder) {
		if one, ok := o.Object.(T); ok {
			found[any(one).(metav1.Object).GetName()] = one
		}
	}
	return found
}

func TestEveryManifestIsStrictlyOfItsTypeAndNamed(t *testing.T) {
	t.Parallel()
	list := objects(t, ".")
	if len(list) < 30 {
		t.Fatalf("%d objects below %s", len(list), deployments)
	}
	seen := map[string]string{}
	for _, o := range list {
		meta := o.Object.(metav1.Object)
		kind := o.GetObjectKind().GroupVersionKind()
		if meta.GetName() == "" {
			t.Errorf("%s: a %s without a name", o.file, kind.Kind)
		}
		key := kind.Kind + " " + meta.GetNamespace() + "/" + meta.GetName()
		if strings.HasPrefix(o.file, "examples/") {
			key += o.file[strings.LastIndex(o.file, "-")+1:] // vllm and sim stand for each other
		}
		if seen[key] != "" {
			t.Errorf("%s and %s both have %s", seen[key], o.file, key)
		}
		seen[key] = o.file
	}
}

// kustomization is what the tests read of one.
type kustomization struct {
	Resources          []string `json:"resources"`
	Components         []string `json:"components"`
	Namespace          string   `json:"namespace"`
	ConfigMapGenerator []struct {
		Name    string   `json:"name"`
		Files   []string `json:"files"`
		Options struct {
			DisableNameSuffixHash bool `json:"disableNameSuffixHash"`
		} `json:"options"`
	} `json:"configMapGenerator"`
	Images []struct {
		Name   string `json:"name"`
		NewTag string `json:"newTag"`
	} `json:"images"`
}

func readKustomization(t *testing.T, folder string) (k kustomization) {
	t.Helper()
	if err := yaml.Unmarshal(documents(t, folder+"/kustomization.yaml")[0], &k); err != nil {
		t.Fatal(err)
	}
	return k
}

func TestEveryFileBelongsToItsKustomization(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{"manifests", "overlays/lab", "components/extended-resource", "components/delete-pods"} {
		k := readKustomization(t, folder)
		named := slices.Concat(k.Resources, []string{"kustomization.yaml"})
		for _, g := range k.ConfigMapGenerator {
			named = append(named, g.Files...)
		}
		for _, file := range files(t, folder) {
			if !slices.Contains(named, filepath.Base(file)) {
				t.Errorf("%s: kustomization.yaml does not name it", file)
			}
		}
		for _, name := range slices.Concat(named, k.Components) {
			if _, err := os.Stat(filepath.Join(deployments, folder, name)); err != nil {
				t.Errorf("%s names %s: %v", folder, name, err)
			}
		}
	}
}

func agentConfig(t *testing.T, folder string) nodeagent.Config {
	t.Helper()
	cfg := nodeagent.Default()
	if err := configfile.Load(filepath.Join(deployments, folder, "agent.yaml"), nodeagent.Kind, &cfg); err != nil {
		t.Fatal(err)
	}
	cfg.Node = "node-1"
	return cfg
}

func TestTheConfigurationsPassTheirOwnCheck(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{"manifests", "overlays/lab"} {
		if _, err := router.Load(filepath.Join(deployments, folder, "router.yaml")); err != nil {
			t.Error(err)
		}
		for _, role := range []string{nodeagent.RoleControl, nodeagent.RoleData} {
			cfg := agentConfig(t, folder)
			cfg.Roles = []string{role}
			if err := cfg.Validate(); err != nil {
				t.Errorf("%s, role %s: %v", folder, role, err)
			}
		}
	}
	gpus, err := simgpu.Load(filepath.Join(deployments, "overlays/lab/gpus.yaml"), "node-1")
	if err != nil || len(gpus) == 0 {
		t.Errorf("%d GPUs, %v", len(gpus), err)
	}
}

func TestWhatIsInstalledTakesNothingUnsaid(t *testing.T) {
	t.Parallel()
	cfg := agentConfig(t, "manifests")
	if len(cfg.Kubernetes.Devices) > 0 || cfg.Inventory.Sim != "" || len(cfg.Sources) > 0 || len(cfg.Models) > 0 || cfg.KV.Memory != 0 || cfg.KV.NVMe != 0 || cfg.Health.AllowInject || cfg.Listen.Insecure || cfg.Listen.Mirror != "" {
		t.Errorf("the agent's configuration takes something: %+v", cfg)
	}
	if cfg.Weights.KeepFree < 10<<30 {
		t.Errorf("the weights keep %s free", cfg.Weights.KeepFree)
	}
}
