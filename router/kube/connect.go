package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/hearth-dev/hearth/identity"
)

// namespaceFile holds the namespace of the pod that a program runs in.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Connection is a way to an API server.
type Connection struct {
	Client    Client
	Namespace string // of the kubeconfig, or of the pod
	line      *line
}

// Connect makes a client by a kubeconfig file, or by the account of the pod
// that the program runs in where there is none. It asks nothing yet.
func Connect(kubeconfig string) (*Connection, error) {
	config, namespace, err := restConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	config.UserAgent = identity.Name + "-router"
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	c := &Connection{Namespace: namespace, line: &line{}}
	config.Wrap(func(inner http.RoundTripper) http.RoundTripper { return &noted{line: c.line, inner: inner} })
	if c.Client, err = kubernetes.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	return c, nil
}

// Failing is why the API server did not answer when it was last asked, nil
// where it did. Watches are begun anew within 30 s, so it is never older. The
// libraries tell of a server that refuses connections nowhere else.
func (c *Connection) Failing() error {
	c.line.mu.Lock()
	defer c.line.mu.Unlock()
	return c.line.failed
}

// line is the state of a connection.
type line struct {
	mu     sync.Mutex
	failed error // of the last request; guarded by mu
}

// noted notes how requests end.
type noted struct {
	line  *line
	inner http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (n *noted) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := n.inner.RoundTrip(r)
	if cause := context.Cause(r.Context()); err != nil && errors.Is(cause, errNoAnswer) {
		err = cause
	}
	if errors.Is(err, context.Canceled) {
		return response, err // nobody waits for the answer any more
	}
	n.line.mu.Lock()
	defer n.line.mu.Unlock()
	n.line.failed = err
	return response, err
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
