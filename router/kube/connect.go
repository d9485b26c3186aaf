package kube

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/hearth-dev/hearth/identity"
)

// namespaceFile holds the namespace of the pod that a program runs in.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Connect makes a client by a kubeconfig file, or by the account of the pod
// that the program runs in where there is none, and gives the namespace of
// either. It asks nothing yet.
func Connect(kubeconfig string) (Client, string, error) {
	config, namespace, err := restConfig(kubeconfig)
	if err != nil {
		return nil, "", fmt.Errorf("connect to API server: %w", err)
	}
	config.UserAgent = identity.Name + "-router"
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, "", fmt.Errorf("connect to API server: %w", err)
	}
	return client, namespace, nil
}

func restConfig(kubeconfig string) (*rest.Config, string, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, "", fmt.Errorf("%w: outside a cluster kubernetes.kubeconfig names a file", err)
		}
		namespace, err := os.ReadFile(namespaceFile)
		if err != nil {
			return nil, "", err
		}
		return config, strings.TrimSpace(string(namespace)), nil
	}
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, &clientcmd.ConfigOverrides{})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, "", err
	}
	namespace, _, err := loader.Namespace()
	return config, namespace, err
}

// ordinary reports whether an error is how watches end that nothing is wrong with.
func ordinary(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err)
}
