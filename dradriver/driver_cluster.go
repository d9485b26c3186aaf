package dradriver

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// Object names an object of the API server.
type Object struct {
	Kind      string // "ResourceClaim" or "Pod"
	Namespace string
	Name      string
	UID       string
}

// DeviceCondition is a condition of one allocated device of this driver, in the
// status of its claim.
type DeviceCondition struct {
	Pool, Device, ShareID string
	Condition             metav1.Condition // LastTransitionTime is the implementation's
}

// ConditionPrepared says whether a device is prepared for its claim.
const ConditionPrepared = "Prepared"

// ClaimState is what the API server says of a claim.
type ClaimState struct {
	Exists        bool         // false: it is gone, or its name has another UID
	AllocatedHere bool         // its allocation has a device of this driver on this node
	Pods          []ledger.Pod // that it is reserved for
}

// Cluster is what the driver tells to, and asks of, the API server besides what
// the kubelet's library does. The first three return at once: they put what
// they are told into a bounded queue and try until it is there or is not worth
// telling any more.
type Cluster interface {
	// Event records an event on an object; reason is a CamelCase token.
	Event(on Object, warning bool, reason, text string)
	// SetConditions sets conditions of devices in a claim's status; the latest of
	// a claim stand.
	SetConditions(claim Object, conditions []DeviceCondition)
	// DeletePod deletes a pod, of that UID only.
	DeletePod(pod Object)
	// Claim asks how a claim is now.
	Claim(ctx context.Context, claim Object) (ClaimState, error)
}

// noCluster is the Cluster of a node that has none: every claim is as it was.
type noCluster struct{}

func (noCluster) Event(Object, bool, string, string)      {}
func (noCluster) SetConditions(Object, []DeviceCondition) {}
func (noCluster) DeletePod(Object)                        {}
func (noCluster) Claim(context.Context, Object) (ClaimState, error) {
	return ClaimState{Exists: true, AllocatedHere: true}, nil
}
