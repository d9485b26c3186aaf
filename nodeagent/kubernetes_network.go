package nodeagent

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
)

// networkAccounting is the type of the node's condition that says how much is
// seen of who moves bytes over its network.
const networkAccounting = identity.Domain + "/NetworkAccounting"

const (
	// accountingAgain is how often the condition is set without a change: its
	// heartbeat is then due.
	accountingAgain = kube.HeartbeatEvery + 10*time.Second
	// accountingSilent is how long the data role may be away before the condition
	// says that nothing is known: it starts anew within seconds.
	accountingSilent = time.Minute
	// maxAccounting bounds the condition's message, in bytes.
	maxAccounting = 1 << 10
)

// tellAccounting keeps the node's condition, and tells of it when less is seen
// than before. When the agent stops the condition is left as it is: programs in
// the kernel go on.
func (c *cluster) tellAccounting(ctx context.Context, a *Agent) error {
	changed, end := a.data.Subscribe()
	defer end()
	heartbeat := time.NewTicker(accountingAgain)
	defer heartbeat.Stop()
	silent := time.NewTimer(accountingSilent)
	defer silent.Stop()
	var told corev1.NodeCondition
	var sight string // as told; empty while nothing is
	for {
		state, ok := a.data.Snapshot()
		if ok {
			silent.Reset(accountingSilent)
			condition := accounting(state.Network)
			if condition != told {
				c.client.SetNodeCondition(condition)
			}
			now := ""
			if state.Network != nil {
				now = state.Network.Sight
			}
			if sightRank(now) < sightRank(sight) {
				a.log.Warn("less of the network is seen than before", slog.String("sight", now), slog.String("why", condition.Message))
				c.client.Event(dradriver.Object{Kind: kube.KindNode, Name: a.config.Node, UID: a.config.Node}, true, "NetworkAccountingLost", condition.Message)
			}
			told, sight = condition, now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-heartbeat.C:
			if told.Type != "" {
				c.client.SetNodeCondition(told)
			}
		case <-silent.C:
			if _, ok := a.data.Snapshot(); !ok {
				told = corev1.NodeCondition{
					Type: networkAccounting, Status: corev1.ConditionUnknown, Reason: "Unavailable", Message: "the data role, which counts, does not answer",
				}
				c.client.SetNodeCondition(told)
			}
		}
	}
}

// sightRank orders sights by how much is seen; one that is not known is the least.
func sightRank(sight string) int {
	for s := netattr.SightFull; s > netattr.SightNone; s-- {
		if s.String() == sight {
			return int(s)
		}
	}
	return 0
}

// accounting is the condition for what is seen.
func accounting(n *local.Network) corev1.NodeCondition {
	c := corev1.NodeCondition{Type: networkAccounting, Status: corev1.ConditionFalse}
	if n == nil {
		c.Status, c.Reason, c.Message = corev1.ConditionUnknown, "Unavailable", "the data role, which counts, does not say"
		return c
	}
	switch n.Sight {
	case netattr.SightFull.String():
		c.Status, c.Reason, c.Message = corev1.ConditionTrue, "Full", "every byte has an owner, or is counted as unattributed"
		return c
	case netattr.SightPartial.String():
		c.Reason, c.Message = "Partial", "some bytes have no owner"
	case netattr.SightDevices.String():
		c.Reason, c.Message = "DevicesOnly", "bytes are counted and have no owners"
	default:
		c.Reason, c.Message = "Unavailable", "bytes are not counted"
	}
	if len(n.Off) == 0 {
		why := n.Reason
		if why == "" && c.Reason == "DevicesOnly" {
			why = "network.enabled is false"
		}
		if why != "" {
			c.Message = cutText(c.Message+": "+why, maxAccounting)
		}
		return c
	}
	// Each sensor is named, however long the reasons are.
	share := (maxAccounting - len(c.Message)) / len(n.Off)
	for i, s := range n.Off {
		join := "; "
		if i == 0 {
			join = ": "
		}
		c.Message += cutText(fmt.Sprintf("%s%s is off (%s", join, s.Name, s.Reason), share-1) + ")"
	}
	return c
}

// cutText shortens a text to at most limit bytes, at the end of a rune.
func cutText(text string, limit int) string {
	const more = "..."
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:max(0, limit-len(more))], "") + more
}
