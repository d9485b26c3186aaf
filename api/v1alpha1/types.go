// Package v1alpha1 holds what people and administrators may write for Hearth in
// the Kubernetes API, version hearth.dev/v1alpha1: the opaque configuration of
// ResourceClaims and DeviceClasses. The DRA driver decodes it, strictly, and
// acts on it; the command line writes it. It is pure: types, Decode and
// Validate, nothing else.
//
// A claim is written by whoever may create pods, so nothing here that a claim
// may hold names a path of the node.
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/hearth-dev/hearth/identity"
)

// GroupVersion is the API group and version of every type here.
var GroupVersion = schema.GroupVersion{Group: identity.Domain, Version: "v1alpha1"}

// Where a container finds what its claim got, unless the claim says otherwise.
const (
	DefaultModelPath = "/hearth/model"
	DefaultKVPath    = "/hearth/kv"
)

// Kinds of configuration.
const (
	KindWeights = "WeightsConfig"
	KindKV      = "KVConfig"
	KindClass   = "ClassConfig"
)

// Config is one of the types here.
type Config interface {
	runtime.Object
	// Validate says what is wrong with the first wrong field, by its name.
	Validate() error
}

// WeightsConfig is what a claim says about weights.
type WeightsConfig struct {
	metav1.TypeMeta `json:",inline"`
	// Ref names what a cold device pulls, hub://org/name@revision. For a warm
	// device it must mean the artifact that was allocated, or be absent.
	Ref string `json:"ref,omitempty"`
	// ContainerPath is where the container sees the model's files; empty means
	// DefaultModelPath.
	ContainerPath string `json:"containerPath,omitempty"`
}

// KVConfig is what a claim says about KV space.
type KVConfig struct {
	metav1.TypeMeta `json:",inline"`
	// ContainerPath is where the container sees its KV directory; empty means
	// DefaultKVPath.
	ContainerPath string `json:"containerPath,omitempty"`
}

// ClassConfig is the administrators' word, valid in a DeviceClass only.
type ClassConfig struct {
	metav1.TypeMeta `json:",inline"`
	// ShareAcrossNamespaces lets a device that allows several allocations serve
	// claims of several namespaces.
	ShareAcrossNamespaces bool `json:"shareAcrossNamespaces,omitempty"`
	// DeletePodOnPullFailure deletes the claim's pods where a pull cannot
	// succeed, so that their owner makes new ones that may go to another node.
	DeletePodOnPullFailure bool `json:"deletePodOnPullFailure,omitempty"`
	// PullDeadline is how long a pull may take before it counts as failed; 0
	// means the agent's configuration.
	PullDeadline metav1.Duration `json:"pullDeadline,omitzero"`
}

// DeepCopyObject implements runtime.Object.
func (c *WeightsConfig) DeepCopyObject() runtime.Object { copied := *c; return &copied }

// DeepCopyObject implements runtime.Object.
func (c *KVConfig) DeepCopyObject() runtime.Object { copied := *c; return &copied }

// DeepCopyObject implements runtime.Object.
func (c *ClassConfig) DeepCopyObject() runtime.Object { copied := *c; return &copied }
