package report

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// TestAReaderOnASocketThatStopsReadingIsCaughtUpByASnapshot fills the window
// of a real connection: the node keeps a bounded run of deltas meanwhile.
func TestAReaderOnASocketThatStopsReadingIsCaughtUpByASnapshot(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 3)
	conn := serve(t, p)
	fill := func(round int) error {
		var list []*Artifact
		for i := range 100 {
			list = append(list, &Artifact{Ref: fmt.Sprint("hub://a/", i), Detail: strings.Repeat("x", 1000) + fmt.Sprint(round)})
		}
		return p.SetArtifacts(list)
	}
	var s State
	snapshots, messages := 0, 0
	const rounds = 200
	err := Watch(t.Context(), conn, Resume{}, func(r *Report) error {
		if err := s.Apply(r); err != nil {
			return err
		}
		messages++
		if r.Snapshot {
			snapshots++
		}
		if messages == 1 {
			// The reader stands still while the node's state moves on.
			for round := range rounds {
				if err := fill(round); err != nil {
					return err
				}
			}
		}
		if s.Seq() == rounds+1 {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("Watch gave %v", err)
	}
	if snapshots < 2 || messages > rounds || len(s.Artifacts()) != 100 {
		t.Errorf("%d snapshots in %d messages for %d artifacts", snapshots, messages, len(s.Artifacts()))
	}
	if got := s.Artifact("hub://a/7").GetDetail(); !strings.HasSuffix(got, fmt.Sprint(rounds-1)) {
		t.Errorf("the last state was not reached: %.20q", got)
	}
}
