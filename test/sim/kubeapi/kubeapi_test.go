package kubeapi_test

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// serve starts a server and gives a client of it, without a limit of its own.
func serve(t *testing.T) (*kubeapi.Server, kubernetes.Interface) {
	t.Helper()
	api := kubeapi.New()
	server := httptest.NewServer(api)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	return api, client
}

func claim(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
	}
}

func slice(name, node string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{Driver: "hearth.dev", NodeName: &node}}
}

func TestAClientReadsWhatWasPutAndIsToldWhatIsNotThere(t *testing.T) {
	t.Parallel()
	api, client := serve(t)
	if err := api.Put(claim("a")); err != nil {
		t.Fatal(err)
	}
	got, err := client.ResourceV1().ResourceClaims("team").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil || got.UID == "" || got.ResourceVersion == "" || got.CreationTimestamp.IsZero() {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := client.ResourceV1().ResourceClaims("other").Get(t.Context(), "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("in another namespace: %v", err)
	}
	api.Delete("resource.k8s.io/v1", "resourceclaims", "team", "a")
	if _, err := client.ResourceV1().ResourceClaims("team").Get(t.Context(), "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after it was deleted: %v", err)
	}
	if got := api.Requests()["GET resourceclaims"]; got != 3 {
		t.Errorf("%d requests were counted, want 3", got)
	}
}

func TestAnUpdateOfAnOldVersionIsAConflict(t *testing.T) {
	t.Parallel()
	_, client := serve(t)
	slices := client.ResourceV1().ResourceSlices()
	made, err := slices.Create(t.Context(), slice("", "n"), metav1.CreateOptions{})
	if err == nil {
		t.Errorf("a slice without a name: %+v", made)
	}
	unnamed := slice("", "n")
	unnamed.GenerateName = "s-"
	if made, err = slices.Create(t.Context(), unnamed, metav1.CreateOptions{}); err != nil || len(made.Name) != 7 {
		t.Fatalf("made %+v, %v", made, err)
	}
	if _, err := slices.Create(t.Context(), made, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("the same again: %v", err)
	}
	next := made.DeepCopy()
	next.Spec.Pool.Name = "p"
	next, err = slices.Update(t.Context(), next, metav1.UpdateOptions{})
	if err != nil || next.ResourceVersion == made.ResourceVersion || next.UID != made.UID {
		t.Fatalf("updated %+v, %v", next, err)
	}
	if _, err := slices.Update(t.Context(), made, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("of the old version: %v", err)
	}
	patched, err := slices.Patch(t.Context(), made.Name, types.MergePatchType, []byte(`{"spec":{"pool":{"generation":7}}}`), metav1.PatchOptions{})
	if err != nil || patched.Spec.Pool.Generation != 7 || patched.Spec.Pool.Name != "p" {
		t.Errorf("patched %+v, %v", patched, err)
	}
}

func TestADryRunKeepsNothing(t *testing.T) {
	t.Parallel()
	_, client := serve(t)
	slices := client.ResourceV1().ResourceSlices()
	if _, err := slices.Create(t.Context(), slice("s", "n"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Fatal(err)
	}
	if _, err := slices.Get(t.Context(), "s", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after a dry run: %v", err)
	}
	info, err := client.Discovery().ServerVersion()
	if err != nil || info.GitVersion != kubeapi.Version {
		t.Errorf("version %+v, %v", info, err)
	}
}

func TestAClientThatSpeaksProtobufIsUnderstood(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(kubeapi.New())
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{
		ContentType: "application/vnd.kubernetes.protobuf", AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.ResourceV1().ResourceSlices().Create(t.Context(), slice("s", "n"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := client.ResourceV1().ResourceSlices().Get(t.Context(), "s", metav1.GetOptions{})
	if err != nil || *got.Spec.NodeName != "n" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestAListIsChosenByFieldsAndLabels(t *testing.T) {
	t.Parallel()
	_, client := serve(t)
	slices := client.ResourceV1().ResourceSlices()
	for name, node := range map[string]string{"a": "n1", "b": "n2", "c": "n1"} {
		s := slice(name, node)
		s.Labels = map[string]string{"name": name}
		if _, err := slices.Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for options, want := range map[metav1.ListOptions]int{
		{}:                                  3,
		{FieldSelector: "spec.nodeName=n1"}: 2,
		{FieldSelector: "spec.nodeName=n1,spec.driver=hearth.dev"}:   2,
		{FieldSelector: "spec.driver!=hearth.dev"}:                   0,
		{FieldSelector: "spec.nodeName=n1", LabelSelector: "name=c"}: 1,
	} {
		got, err := slices.List(t.Context(), options)
		if err != nil || len(got.Items) != want {
			t.Errorf("%+v: %d, %v", options, len(got.Items), err)
		}
	}
}

func TestACollectionIsDeletedAsFarAsItIsChosen(t *testing.T) {
	t.Parallel()
	_, client := serve(t)
	slices := client.ResourceV1().ResourceSlices()
	for name, labels := range map[string]map[string]string{"a": {"of": "bench"}, "b": {"of": "bench"}, "c": nil} {
		made := slice(name, "n")
		made.Labels = labels
		if _, err := slices.Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := slices.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "of=bench"}); err != nil {
		t.Fatal(err)
	}
	left, err := slices.List(t.Context(), metav1.ListOptions{})
	if err != nil || len(left.Items) != 1 || left.Items[0].Name != "c" {
		t.Errorf("left are %+v, %v", left, err)
	}
}

func TestAnInformerSeesEveryChange(t *testing.T) {
	t.Parallel()
	api, client := serve(t)
	if err := api.Put(&corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "before"}}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan string, 16)
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Nodes().Informer()
	name := func(o any) string { key, _ := cache.DeletionHandlingMetaNamespaceKeyFunc(o); return key }
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { seen <- "added " + name(o) },
		UpdateFunc: func(_, o any) { seen <- "updated " + name(o) },
		DeleteFunc: func(o any) { seen <- "deleted " + name(o) },
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	factory.Start(ctx.Done())
	expect := func(want string) {
		t.Helper()
		select {
		case got := <-seen:
			if got != want {
				t.Errorf("saw %q, want %q", got, want)
			}
		case <-ctx.Done():
			t.Fatalf("never saw %q", want)
		}
	}
	expect("added before")
	made, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "after"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	expect("added after")
	made.Labels = map[string]string{"a": "b"}
	if _, err := client.CoreV1().Nodes().Update(ctx, made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("updated after")
	if err := client.CoreV1().Nodes().Delete(ctx, "before", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("deleted before")
	cancel()
	factory.Shutdown()
}
