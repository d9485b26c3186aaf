package dradriver

import (
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestPullTextSaysWhatIsKnownAndNoMore(t *testing.T) {
	t.Parallel()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}
	for want, p := range map[string]stock.Progress{
		"pulling org/name":                                                 {},
		"pulling org/name, 41 %, about 50 s left":                          {Present: 41, Size: 100, Left: 50 * time.Second},
		"pulling org/name, 41 %":                                           {Present: 41, Size: 100},
		"pulling org/name, 0 %, about 12 min left":                         {Size: 100, Left: 12 * time.Minute},
		"pulling org/name, 99 %, about 3 h left":                           {Present: 999, Size: 1000, Left: 3 * time.Hour},
		"pulling org/name, 50 %, about 1 s left":                           {Present: 1, Size: 2, Left: time.Millisecond},
		"pulling org/name, all of it is there and is being checked":        {Present: 100, Size: 100, Left: time.Second},
		"pulling org/name, the last try failed (no route) and is repeated": {Failed: "no route", Reason: "Unreachable"},
	} {
		if got := pullText(ref, p); got != want {
			t.Errorf("%+v: %q, want %q", p, got, want)
		}
	}
}

func TestJudgeTellsWaitingFromFailure(t *testing.T) {
	t.Parallel()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/name", Revision: "main"}
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		p        stock.Progress
		deadline time.Time
		want     verdict
	}{
		"ready":             {stock.Progress{Ready: true}, now.Add(-time.Hour), verdict{ready: true}},
		"on its way":        {stock.Progress{Present: 1, Size: 2}, now.Add(time.Second), verdict{text: "pulling org/name, 50 %"}},
		"without deadline":  {stock.Progress{Present: 1, Size: 2}, time.Time{}, verdict{text: "pulling org/name, 50 %"}},
		"past its deadline": {stock.Progress{Present: 1, Size: 2}, now, verdict{failed: true, reason: "PullDeadline", text: "not there within its time: pulling org/name, 50 %"}},
		"forbidden": {
			stock.Progress{Failed: "403", Reason: "Forbidden", Final: true},
			now.Add(time.Hour),
			verdict{failed: true, reason: "Forbidden", text: "cannot pull hub://org/name@main: 403"},
		},
		"final without a reason": {stock.Progress{Failed: "odd", Final: true}, now, verdict{failed: true, reason: "Failed", text: "cannot pull hub://org/name@main: odd"}},
		"ready and refused":      {stock.Progress{Ready: true, Final: true, Failed: "changed", Reason: "Changed"}, now, verdict{failed: true, reason: "Changed", text: "cannot pull hub://org/name@main: changed"}},
	} {
		if got := judge(ref, c.p, c.deadline, now); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
