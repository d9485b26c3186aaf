package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hearth-dev/hearth/dradriver"
)

// HeartbeatEvery is the least time between two writes of a condition of the node
// that differ in their heartbeat alone.
const HeartbeatEvery = 5 * time.Minute

// SetNodeCondition makes a condition of this node what it is now, as `kubectl
// describe node` shows it: the caller gives type, status, reason and message, of
// which 1 KiB stands. It never blocks: the condition is written in the
// background where it differs from what the node has, or the node's heartbeat of
// it is older than HeartbeatEvery, and the time of its last transition is kept
// where its status is the same.
func (c *Client) SetNodeCondition(condition corev1.NodeCondition) {
	condition.Message = cut(condition.Message, maxMessage)
	if !c.queue.add("node condition/"+string(condition.Type), "set node condition", func(ctx context.Context) error {
		return final(c.setNodeCondition(ctx, condition))
	}) {
		c.opts.Log.Warn("condition of the node dropped, the queue is full", slog.String("type", string(condition.Type)))
	}
}

func (c *Client) setNodeCondition(ctx context.Context, condition corev1.NodeCondition) error {
	nodes := c.opts.Client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, c.opts.Node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	now := metav1.Now()
	condition.LastHeartbeatTime, condition.LastTransitionTime = now, now
	for _, has := range node.Status.Conditions {
		if has.Type != condition.Type || has.Status != condition.Status {
			continue
		}
		condition.LastTransitionTime = has.LastTransitionTime
		same := has.Reason == condition.Reason && has.Message == condition.Message
		if same && now.Sub(has.LastHeartbeatTime.Time) < HeartbeatEvery {
			return nil
		}
	}
	// Conditions are merged by their type: those of others stay.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{condition}}})
	if err != nil {
		return fmt.Errorf("%w: encode condition of node: %w", errFinal, err)
	}
	_, err = nodes.Patch(ctx, c.opts.Node, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: dradriver.Name}, "status")
	return err
}
