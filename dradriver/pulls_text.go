package dradriver

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// ReasonDeadline is the reason of a pull that did not end in its time; the
// others are those of stock.Progress.
const ReasonDeadline = "PullDeadline"

// pullText says how far a pull is: "pulling org/name, 41 %, about 50 s left".
// What nobody knows is left out.
func pullText(ref artifact.Ref, p stock.Progress) string {
	text := []string{"pulling " + ref.Name}
	switch {
	case p.Size > 0 && p.Present >= p.Size:
		text = append(text, "all of it is there and is being checked")
	case p.Size > 0:
		text = append(text, strconv.Itoa(int(100*float64(p.Present)/float64(p.Size)))+" %")
	}
	if p.Left > 0 && p.Present < p.Size {
		text = append(text, "about "+leftText(p.Left)+" left")
	}
	if p.Failed != "" {
		text = append(text, "the last try failed ("+p.Failed+") and is repeated")
	}
	return strings.Join(text, ", ")
}

// leftText rounds a duration for people.
func leftText(left time.Duration) string {
	switch {
	case left < 90*time.Second:
		return strconv.Itoa(max(1, int(left.Round(time.Second)/time.Second))) + " s"
	case left < 90*time.Minute:
		return strconv.Itoa(int(left.Round(time.Minute)/time.Minute)) + " min"
	}
	return strconv.Itoa(int(left.Round(time.Hour)/time.Hour)) + " h"
}

// verdict is what a pull's progress means for its claim.
type verdict struct {
	ready  bool
	failed bool   // it cannot succeed, or not in time
	reason string // CamelCase token where it failed
	text   string // for people; empty where it is ready
}

// judge says what progress means at a time.
func judge(ref artifact.Ref, p stock.Progress, deadline, now time.Time) verdict {
	switch {
	case p.Ready && !p.Final:
		return verdict{ready: true}
	case p.Final:
		reason := p.Reason
		if reason == "" {
			reason = "Failed"
		}
		return verdict{failed: true, reason: reason, text: fmt.Sprintf("cannot pull %s: %s", ref, p.Failed)}
	case !deadline.IsZero() && !now.Before(deadline):
		return verdict{failed: true, reason: ReasonDeadline, text: "not there within its time: " + pullText(ref, p)}
	}
	return verdict{text: pullText(ref, p)}
}
