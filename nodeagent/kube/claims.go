package kube

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"

	"github.com/hearth-dev/hearth/dradriver"
)

var _ dradriver.Cluster = (*Client)(nil)

// Claim implements dradriver.Cluster.
func (c *Client) Claim(ctx context.Context, on dradriver.Object) (dradriver.ClaimState, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	claim, err := c.opts.Client.ResourceV1().ResourceClaims(on.Namespace).Get(ctx, on.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return dradriver.ClaimState{}, nil
	case err != nil:
		return dradriver.ClaimState{}, fmt.Errorf("ask for claim %s/%s: %w", on.Namespace, on.Name, err)
	case string(claim.UID) != on.UID:
		return dradriver.ClaimState{}, nil
	}
	return dradriver.ClaimState{Exists: true, AllocatedHere: c.allocatedHere(claim), Pods: dradriver.PodsOf(claim)}, nil
}

// allocatedHere reports whether a claim has a device in a slice pool of this node.
func (c *Client) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	node := c.opts.Node
	pools := []string{dradriver.PoolGPUs(node), dradriver.PoolWeights(node), dradriver.PoolKV(node)}
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == dradriver.Name && slices.Contains(pools, r.Pool)
	})
}

// SetConditions implements dradriver.Cluster: it writes conditions of a claim's devices into its status, in the
// background and until it worked or the claim is gone; it never blocks. What
// waits for the same claim is replaced: give all of a claim's conditions at once.
func (c *Client) SetConditions(claim dradriver.Object, conditions []dradriver.DeviceCondition) {
	conditions = slices.Clone(conditions)
	key := "conditions/" + claim.UID
	if !c.queue.add(key, "write claim status", func(ctx context.Context) error { return c.writeConditions(ctx, claim, conditions) }) {
		c.opts.Log.Warn("condition dropped, the queue is full", slog.String("claim", claim.UID))
	}
}

func (c *Client) writeConditions(ctx context.Context, on dradriver.Object, conditions []dradriver.DeviceCondition) error {
	claims := c.opts.Client.ResourceV1().ResourceClaims(on.Namespace)
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		claim, err := claims.Get(ctx, on.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && (string(claim.UID) != on.UID || claim.Status.Allocation == nil) {
			return nil // nobody is left to be told
		}
		if err != nil {
			return err
		}
		if !c.apply(claim, conditions) {
			return nil
		}
		_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{FieldManager: dradriver.Name})
		return err
	})
	return final(err)
}

// apply puts the conditions of devices that are allocated into the status, and
// tells whether that changed it.
func (c *Client) apply(claim *resourceapi.ResourceClaim, conditions []dradriver.DeviceCondition) bool {
	changed := false
	for _, dc := range conditions {
		if !allocated(claim, dc) {
			continue
		}
		at := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
			return s.Driver == dradriver.Name && s.Pool == dc.Pool && s.Device == dc.Device && text(s.ShareID) == dc.ShareID
		})
		if at < 0 {
			status := resourceapi.AllocatedDeviceStatus{Driver: dradriver.Name, Pool: dc.Pool, Device: dc.Device}
			if dc.ShareID != "" {
				status.ShareID = &dc.ShareID
			}
			claim.Status.Devices = append(claim.Status.Devices, status)
			at = len(claim.Status.Devices) - 1
		}
		condition := dc.Condition
		condition.Message = cut(condition.Message, 32<<10)
		changed = meta.SetStatusCondition(&claim.Status.Devices[at].Conditions, condition) || changed
	}
	return changed
}

// allocated reports whether a claim still has the device of a condition: the
// API server refuses a status of any other.
func allocated(claim *resourceapi.ResourceClaim, dc dradriver.DeviceCondition) bool {
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		share := ""
		if r.ShareID != nil {
			share = string(*r.ShareID)
		}
		return r.Driver == dradriver.Name && r.Pool == dc.Pool && r.Device == dc.Device && share == dc.ShareID
	})
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// DeletePod implements dradriver.Cluster: only a pod of that UID is deleted, so
// that another node may do what this one cannot. It never blocks.
func (c *Client) DeletePod(pod dradriver.Object) {
	uid := types.UID(pod.UID)
	if !c.queue.add("pod/"+pod.UID, "delete pod", func(ctx context.Context) error {
		err := c.opts.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // it is gone, or another has its name
		}
		return final(err)
	}) {
		c.opts.Log.Warn("deletion dropped, the queue is full", slog.String("pod", pod.Name))
	}
}
