package nodeagent

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// reporting is an Agent that can publish artifacts and nothing else.
func reporting(t *testing.T, configured ...artifact.Ref) *Agent {
	t.Helper()
	publisher, err := report.NewPublisher(report.PublisherOptions{Node: "n", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	a := &Agent{publisher: publisher, log: slog.New(slog.DiscardHandler), problems: map[string]string{}, configured: map[artifact.Ref]bool{}}
	for _, ref := range configured {
		a.configured[ref] = true
	}
	return a
}

func hubRef(name string) artifact.Ref {
	return artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/" + name, Revision: "main"}
}

func TestARefThatAClientMadeUpIsNotReported(t *testing.T) {
	t.Parallel()
	wanted, known := hubRef("wanted"), hubRef("known")
	a := reporting(t, wanted)
	list, more := a.toReport([]weightcache.Status{
		{Ref: hubRef("made-up"), State: weightcache.Failed, Detail: "not found"},
		{Ref: hubRef("asked-now"), State: weightcache.Resolving},
		{Ref: known, State: weightcache.Filling, Digest: artifact.Digest{1}},
		{Ref: wanted, State: weightcache.Failed, Detail: "unavailable"},
	})
	if len(list) != 2 || list[0].Ref != wanted || list[1].Ref != known || more != 0 {
		t.Errorf("reported %v and %d more", list, more)
	}
}

func TestAFullReportKeepsConfiguredAndReadyArtifactsAndStillMoves(t *testing.T) {
	t.Parallel()
	last := hubRef("zz-configured")
	for name, c := range map[string]struct {
		detail string
		least  int
	}{
		"by number": {least: report.MaxArtifacts},
		"by bytes":  {detail: strings.Repeat("x", report.MaxTextBytes), least: report.MaxArtifacts / 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := reporting(t, last)
			var statuses []weightcache.Status
			for i := range report.MaxArtifacts + 9 {
				statuses = append(statuses, weightcache.Status{
					Ref: hubRef(fmt.Sprintf("m%05d", i)), State: weightcache.Failed, Digest: artifact.Digest{1}, Detail: c.detail,
				})
			}
			statuses[len(statuses)-1].State = weightcache.Ready
			statuses = append(statuses, weightcache.Status{Ref: last, State: weightcache.Resolving})
			a.publishArtifacts(statuses)
			before := a.publisher.Seq()
			list, _ := a.toReport(statuses)
			if list[0].Ref != last || list[1].State != weightcache.Ready || len(list) != report.MaxArtifacts {
				t.Errorf("reports %d artifacts, first %s and %s", len(list), list[0].Ref, list[1].Ref)
			}
			if out := int(a.leftOut.Load()); out < 10 || out > len(statuses)-c.least || a.problems["report room"] == "" || a.problems["report artifacts"] != "" {
				t.Errorf("left out %d, problems %v", out, a.problems)
			}
			statuses[len(statuses)-1].State = weightcache.Ready
			a.publishArtifacts(statuses)
			if a.publisher.Seq() != before+1 {
				t.Errorf("the report stands at sequence %d, want a change after %d", a.publisher.Seq(), before)
			}
			a.publishArtifacts(statuses[:3])
			if a.leftOut.Load() != 0 || a.problems["report room"] != "" {
				t.Errorf("still full: %v", a.problems)
			}
		})
	}
}
