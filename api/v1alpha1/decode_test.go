package v1alpha1_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/api/v1alpha1"
)

func typed(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: "hearth.dev/v1alpha1", Kind: kind}
}

func TestDecodeReadsEachKind(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]v1alpha1.Config{
		`{"apiVersion":"hearth.dev/v1alpha1","kind":"WeightsConfig","ref":"hub://org/name@main","containerPath":"/models/main"}`: &v1alpha1.WeightsConfig{
			TypeMeta: typed("WeightsConfig"), Ref: "hub://org/name@main", ContainerPath: "/models/main",
		},
		`{"apiVersion":"hearth.dev/v1alpha1","kind":"KVConfig"}`: &v1alpha1.KVConfig{TypeMeta: typed("KVConfig")},
		`{"apiVersion":"hearth.dev/v1alpha1","kind":"ClassConfig","shareAcrossNamespaces":true,"deletePodOnPullFailure":true,"pullDeadline":"45m"}`: &v1alpha1.ClassConfig{
			TypeMeta: typed("ClassConfig"), ShareAcrossNamespaces: true, DeletePodOnPullFailure: true,
			PullDeadline: metav1.Duration{Duration: 45 * time.Minute},
		},
	} {
		got, err := v1alpha1.Decode([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", text, diff)
		}
		if diff := cmp.Diff(got, got.DeepCopyObject()); diff != "" {
			t.Errorf("copy of %s: %s", text, diff)
		}
	}
}

func TestDecodeRefusesAndSaysWhichField(t *testing.T) {
	t.Parallel()
	const head = `{"apiVersion":"hearth.dev/v1alpha1","kind":`
	for _, test := range []struct{ text, want string }{
		{head + `"WeightsConfig","hostPath":"/var/lib"}`, `WeightsConfig: unknown field "hostPath"`},
		{head + `"WeightsConfig","Ref":"hub://a/b"}`, `unknown field "Ref"`},
		{head + `"WeightsConfig","ref":"hub://a/b","ref":"hub://a/c"}`, `duplicate field "ref"`},
		{head + `"WeightsConfig","ref":"dir:///models/x"}`, `ref "dir:///models/x": want hub://org/name@revision`},
		{head + `"WeightsConfig","ref":7}`, `ref`},
		{head + `"KVConfig","ref":"hub://a/b"}`, `KVConfig: unknown field "ref"`},
		{head + `"ClassConfig","pullDeadline":"-1s"}`, `pullDeadline`},
		{head + `"ClassConfig","pullDeadline":"soon"}`, `soon`},
		{head + `"ClassConfig","pullDeadline":"25h"}`, `want 0 to 24h`},
		{head + `"GpuConfig"}`, `unknown kind GpuConfig`},
		{`{"apiVersion":"hearth.dev/v1","kind":"KVConfig"}`, `unknown kind KVConfig of hearth.dev/v1`},
		{`{"apiVersion":"hearth.dev/v1alpha1"}`, `apiVersion and kind must be set`},
		{`{"kind":"KVConfig"}`, `apiVersion and kind must be set`},
		{`{}`, `apiVersion and kind must be set`},
		{`null`, ``},
		{`[`, ``},
		{``, ``},
		{head + `"KVConfig"} {"kind":"KVConfig"}`, ``},
		{head + `"KVConfig","containerPath":"kv"}`, `containerPath "kv": want an absolute path`},
		{head + `"KVConfig","containerPath":"/a/../b"}`, `want a clean path`},
		{head + `"KVConfig","containerPath":"/a/"}`, `want a clean path`},
		{head + `"KVConfig","containerPath":"/"}`, `hide the container's own files`},
		{head + `"KVConfig","containerPath":"/proc"}`, `inside /proc`},
		{head + `"KVConfig","containerPath":"/dev/shm"}`, `inside /dev`},
		{head + `"KVConfig","containerPath":"/etc/ld.so.preload"}`, `inside /etc`},
		{head + `"KVConfig","containerPath":"/var/run/secrets"}`, `inside /var/run`},
		{head + `"KVConfig","containerPath":"/usr/lib/python3"}`, `inside /usr`},
		{head + `"KVConfig","containerPath":"/a\nb"}`, `control characters`},
		{head + `"KVConfig","containerPath":"/` + strings.Repeat("a", 1024) + `"}`, `want at most 1024`},
		{head + `"ClassConfig","shareAcrossNamespaces":"yes"}`, `shareAcrossNamespaces`},
		{`{"apiVersion":"hearth.dev/v1alpha1","kind":"List","items":[{"kind":"x"}]}`, `unknown kind List`},
	} {
		config, err := v1alpha1.Decode([]byte(test.text))
		if err == nil {
			t.Errorf("%s: decoded to %+v", test.text, config)
			continue
		}
		if !errors.Is(err, v1alpha1.ErrInvalid) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want ErrInvalid with %q", test.text, err, test.want)
		}
	}
}

func TestPathsThatOnlyLookReservedAreAllowed(t *testing.T) {
	t.Parallel()
	for _, p := range []string{"/library", "/binaries/x", "/models/dev", "/hearth/model", "/data/etc", "/processed", "/home/me/models"} {
		if _, err := v1alpha1.Decode([]byte(`{"apiVersion":"hearth.dev/v1alpha1","kind":"KVConfig","containerPath":"` + p + `"}`)); err != nil {
			t.Errorf("%s: %v", p, err)
		}
	}
}

func FuzzDecodeNeverTakesWhatDoesNotValidate(f *testing.F) {
	f.Add([]byte(`{"apiVersion":"hearth.dev/v1alpha1","kind":"WeightsConfig","ref":"hub://org/name@main","containerPath":"/models/main"}`))
	f.Add([]byte("apiVersion: hearth.dev/v1alpha1\nkind: KVConfig\ncontainerPath: /kv\n"))
	f.Add([]byte(`{"apiVersion":"hearth.dev/v1alpha1","kind":"ClassConfig","pullDeadline":"45m"}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		config, err := v1alpha1.Decode(raw)
		if err == nil && config.Validate() != nil {
			t.Errorf("%q decoded to %+v", raw, config)
		}
		if err != nil && !errors.Is(err, v1alpha1.ErrInvalid) {
			t.Errorf("%q: %v does not wrap ErrInvalid", raw, err)
		}
	})
}
