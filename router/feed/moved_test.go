package feed

import "testing"

func TestAnAgentThatMovesIsTheSameNode(t *testing.T) {
	t.Parallel()
	one, stop := serve(t, "127.0.0.1:0", publisher(t, "n1", 7, "a"))
	f, sink := run(t, Node{Address: one, Name: "n1"})
	sink.until(t, "the first agent", func(s seen) bool { return s.epoch == 7 })
	stop()
	two, _ := serve(t, "127.0.0.1:0", publisher(t, "n1", 8, "a", "b"))
	if err := f.SetNodes([]Node{{Address: two, Name: "n1"}}); err != nil {
		t.Fatal(err)
	}
	sink.until(t, "the second agent", func(s seen) bool {
		if s.forgotten {
			t.Errorf("node %s was forgotten while its agent moved", s.node)
		}
		return s.epoch == 8 && s.endpoints == 2
	})
}

func TestANodeWhoseMovedAgentWasNeverReachedIsForgottenWithIt(t *testing.T) {
	t.Parallel()
	one, stop := serve(t, "127.0.0.1:0", publisher(t, "n1", 7, "a"))
	other, _ := serve(t, "127.0.0.1:0", publisher(t, "n2", 1, "a"))
	f, sink := run(t, Node{Address: one, Name: "n1"})
	sink.until(t, "the agent", func(s seen) bool { return s.epoch == 7 })
	stop()
	// Nobody answers for n1 where it is said to be now.
	if err := f.SetNodes([]Node{{Address: "127.0.0.1:1", Name: "n1"}, {Address: other, Name: "n2"}}); err != nil {
		t.Fatal(err)
	}
	sink.until(t, "the other agent", func(s seen) bool { return s.node == "n2" })
	if err := f.SetNodes([]Node{{Address: other, Name: "n2"}}); err != nil {
		t.Fatal(err)
	}
	sink.until(t, "the end of n1", func(s seen) bool { return s.forgotten && s.node == "n1" })
}
