package weightcache

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestADoubtThatWasLoadedOutlivesAClockThatGoesBack(t *testing.T) {
	t.Parallel()
	left, shard := killedInMidSegment(t, 1)
	c := &clock{at: time.Now()}
	change := func(o *Options, _ *PullerOptions) { o.Now = c.now }
	left.open(t, change)
	checkFlat(t, left, left.ensure(t))
	left.reopen(t, change)
	for _, jump := range []time.Duration{-2 * time.Hour, -365 * 24 * time.Hour} {
		c.jump(jump)
		if !left.puller.Doubtful(shard.SHA256) {
			t.Errorf("once the clock went back %s, who was given wrong bytes gets the rest of the right ones", -jump)
		}
		left.store.doubt(artifact.Digest{1})
		if !left.puller.Doubtful(shard.SHA256) {
			t.Errorf("once the clock went back %s, the next doubt takes the place of this one", -jump)
		}
	}
	left.reopen(t, change)
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("a restart after the clock went back forgot it")
	}
	c.jump(doubtFor + time.Minute)
	if left.puller.Doubtful(shard.SHA256) {
		t.Error("the doubt outlives its hour")
	}
}

func TestManyUnfinishedFilesOfWhichNothingIsGivenTakeNoPlaceAmongTheDoubts(t *testing.T) {
	t.Parallel()
	files := maps.Clone(model(1, 3*testSegment))
	for i := range maxDoubts + 1 {
		files[fmt.Sprintf("a/%04d.txt", i)] = fmt.Appendf(nil, "text %d", i)
	}
	r := newRig(t, newMemSource(files))
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	r.reopen(t, func(o *Options, _ *PullerOptions) { o.Boot = "another boot" })
	shard, _ := m.File(shard1)
	if !r.puller.Doubtful(shard.SHA256) {
		t.Error("bytes that may be lost are not in doubt")
	}
	if small := m.Files[0]; r.puller.Doubtful(small.SHA256) {
		t.Errorf("%s, of which nobody was given a byte unproven, is in doubt", small.Path)
	}
}

func TestDoubtsAreKeptAlsoWhereAFolderStoodInTheirPlace(t *testing.T) {
	t.Parallel()
	left, shard := killedInMidSegment(t, 1)
	path := filepath.Join(left.dir, "weights", doubtsFile)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	left.open(t)
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("bytes of which nothing is known are not in doubt")
	}
	checkFlat(t, left, left.ensure(t))
	left.reopen(t)
	if !left.puller.Doubtful(shard.SHA256) {
		t.Error("a restart forgot that wrong bytes were given out")
	}
}
