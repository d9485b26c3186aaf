// Package kube is the agent's side of Kubernetes besides the driver itself: the
// client, what people are told (events, conditions of claims), what is asked
// (does a claim still stand, does a classic device plugin serve the GPUs, which
// eviction thresholds has the kubelet), and the check of a store's file system.
// The agent's root builds and runs it; the driver reaches it through an
// interface of its own. It never blocks a caller on the API server, prepares
// nothing and publishes no slices.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
)

// Bounds of what the API server is asked and told. One that is slow, and takes
// 20 s for each request, is heard: what is told in the background takes two.
const (
	callTimeout  = 30 * time.Second
	sendTimeout  = 45 * time.Second
	startTimeout = 10 * time.Second // of what the agent's start waits for
)

// Options are what a Client is told.
type Options struct {
	// Client speaks to the API server; see NewClientset.
	Client kubernetes.Interface
	// Node is this node's name, as its Node object has it.
	Node string
	// Log receives what could not be told; nil discards.
	Log *slog.Logger
}

// Client tells and asks the API server. It is safe for concurrent use.
type Client struct {
	opts   Options
	queue  *queue
	events *record.EventCorrelator

	mu       sync.Mutex
	problems map[string]string // by what was tried
}

// New makes a Client; Run sends what it is told.
func New(opts Options) *Client {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	c := &Client{opts: opts, problems: map[string]string{}}
	c.queue = newQueue(c.outcome)
	c.events = record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{})
	return c
}

// NewClientset makes a clientset: of the kubeconfig file, or where the path is
// empty of the pod's own account. program stands in the User-Agent. It asks nothing.
func NewClientset(kubeconfig, program string) (kubernetes.Interface, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = program
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	// One node's agent: a burst of claims may not stand behind a slow trickle.
	config.QPS, config.Burst = 20, 40
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	return client, nil
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read kubernetes.kubeconfig: %w", err)
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("find the API server: this is no pod of a cluster; set kubernetes.kubeconfig")
	}
	if err != nil {
		return nil, fmt.Errorf("read the pod's account: %w", err)
	}
	return config, nil
}

// Run sends events, conditions and deletions until ctx is done.
func (c *Client) Run(ctx context.Context) error {
	c.queue.run(ctx)
	return nil
}

// Stats counts what was told to the API server.
type Stats struct {
	Sent    int64 // events, conditions and deletions that it took
	Dropped int64 // those that had no room in the queue, or were refused for good
	Waiting int   // those that are still to be sent
}

// Stats gives the present counts.
func (c *Client) Stats() Stats { return c.queue.stats() }

// Problems are what people should know: what the API server refuses, by what
// was tried. Empty where the last try of each kind went well.
func (c *Client) Problems() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []string
	for what, text := range c.problems {
		list = append(list, what+": "+text)
	}
	slices.Sort(list)
	return list
}

// outcome notes how a try ended; err is nil where it went well.
func (c *Client) outcome(what string, err error) {
	c.mu.Lock()
	before := c.problems[what]
	text := ""
	if err != nil {
		text = plain(err)
		c.problems[what] = text
	} else {
		delete(c.problems, what)
	}
	c.mu.Unlock()
	if text != "" && text != before {
		c.opts.Log.Warn("API server not told, trying again later", slog.String("what", what), slog.Any("error", err))
	}
}

// plain gives an error of the API server with what to do about it.
func plain(err error) string {
	if apierrors.IsForbidden(err) {
		return err.Error() + " (the agent's ClusterRole lacks a rule)"
	}
	return err.Error()
}

// Node asks for this node's object.
func (c *Client) Node(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	node, err := c.opts.Client.CoreV1().Nodes().Get(ctx, c.opts.Node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("ask for node %s: %w", c.opts.Node, err)
	}
	return node, nil
}
