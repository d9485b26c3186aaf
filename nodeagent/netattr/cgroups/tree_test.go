package cgroups

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// clock is a time that a test moves.
type clock struct{ t time.Time }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

// open makes a Tree over a temporary directory, whose inode numbers are ids as
// good as those of cgroup2.
func open(t *testing.T) (*Tree, string, *clock) {
	t.Helper()
	c := &clock{t: time.Unix(1_000_000, 0)}
	root := t.TempDir()
	return New(Options{Root: root, Now: c.now}), root, c
}

// mkdir makes a directory with all above it and gives its id.
func mkdir(t *testing.T, names ...string) uint64 {
	t.Helper()
	dir := filepath.Join(names...)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		t.Fatal(err)
	}
	return inode(info).Ino
}

func remove(t *testing.T, names ...string) {
	t.Helper()
	if err := os.Remove(filepath.Join(names...)); err != nil {
		t.Fatal(err)
	}
}

// expect looks an id up; want is its path, empty for none.
func expect(t *testing.T, tree *Tree, id uint64, want string) {
	t.Helper()
	if got, ok := tree.Lookup(id); got != want || ok != (want != "") {
		t.Errorf("id %d is %q, %v; want %q", id, got, ok, want)
	}
}

// nowhere is an id that no directory has.
const nowhere = 1 << 60

func TestTheFirstLookupFindsWhatIsThere(t *testing.T) {
	t.Parallel()
	tree, root, _ := open(t)
	top := mkdir(t, root)
	deep := mkdir(t, root, "kubepods", "burstable", "pod1", "container", "sub")
	pod := mkdir(t, root, "kubepods", "burstable", "pod1")
	other := mkdir(t, root, "system.slice")
	if err := os.WriteFile(filepath.Join(root, "system.slice", "cgroup.procs"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(root, filepath.Join(root, "kubepods", "loop")); err != nil {
		t.Fatal(err)
	}
	expect(t, tree, deep, "/kubepods/burstable/pod1/container/sub")
	expect(t, tree, pod, "/kubepods/burstable/pod1")
	expect(t, tree, other, "/system.slice")
	expect(t, tree, top, "/")
	if id, err := tree.RootID(); id != top || err != nil {
		t.Errorf("the root is %d, %v; want %d", id, err, top)
	}
	if tree.walks != 1 || tree.Err() != nil || len(tree.known) != 7 {
		t.Errorf("%d walks, %v, %d are known", tree.walks, tree.Err(), len(tree.known))
	}
}

func TestMissesCauseAtMostOneWalkASecond(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	if err := tree.Walk(); err != nil {
		t.Fatal(err)
	}
	late := mkdir(t, root, "late")
	for id := range uint64(1000) {
		expect(t, tree, nowhere+id, "")
	}
	expect(t, tree, late, "")
	if tree.walks != 1 {
		t.Fatalf("%d walks within a second", tree.walks)
	}
	c.advance(walkEvery)
	expect(t, tree, late, "/late")
	// That walk looked for all the others too.
	for range 10 {
		c.advance(walkEvery)
		for id := range uint64(1000) {
			expect(t, tree, nowhere+id, "")
		}
	}
	if tree.walks != 2 {
		t.Errorf("%d walks for ids that one walk did not find", tree.walks)
	}
}

func TestAMissIsRememberedForThirtySecondsAfterAWalk(t *testing.T) {
	t.Parallel()
	tree, _, c := open(t)
	expect(t, tree, nowhere, "")
	c.advance(missFor - 1)
	expect(t, tree, nowhere, "")
	if tree.walks != 1 {
		t.Fatalf("%d walks before 30 s are over", tree.walks)
	}
	c.advance(1)
	expect(t, tree, nowhere, "")
	if tree.walks != 2 {
		t.Errorf("%d walks when 30 s are over", tree.walks)
	}
	// What nobody asks for any more is not remembered for ever.
	c.advance(missFor + 1)
	expect(t, tree, nowhere+1, "")
	if len(tree.missed) != 1 {
		t.Errorf("%d misses are remembered", len(tree.missed))
	}
}

func TestMissesAreBounded(t *testing.T) {
	t.Parallel()
	tree, _, c := open(t)
	for id := range uint64(3 * maxMissed) {
		if id%1000 == 0 {
			c.advance(walkEvery)
		}
		expect(t, tree, nowhere+id, "")
		if len(tree.missed) > maxMissed {
			t.Fatalf("%d misses are remembered", len(tree.missed))
		}
	}
}

func TestAGoneCgroupKeepsItsPathUntilItIsForgotten(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	id := mkdir(t, root, "pod", "container")
	expect(t, tree, id, "/pod/container")
	if tree.Gone(id) {
		t.Error("a cgroup that is there is gone")
	}
	remove(t, root, "pod", "container")
	if !tree.Gone(id) {
		t.Error("a cgroup without a directory is not gone")
	}
	if err := tree.Walk(); err != nil {
		t.Fatal(err)
	}
	expect(t, tree, id, "/pod/container")
	tree.Forget(id)
	c.advance(walkEvery)
	expect(t, tree, id, "")
}

func TestADirectoryMadeAgainIsAnotherCgroup(t *testing.T) {
	t.Parallel()
	for _, looks := range []string{"asked", "walked"} {
		tree, root, _ := open(t)
		old := mkdir(t, root, "pod")
		expect(t, tree, old, "/pod")
		fresh := mkdir(t, root, "made meanwhile, so that it has another inode")
		remove(t, root, "pod")
		if err := os.Rename(filepath.Join(root, "made meanwhile, so that it has another inode"), filepath.Join(root, "pod")); err != nil {
			t.Fatal(err)
		}
		if looks == "walked" {
			if err := tree.Walk(); err != nil {
				t.Fatal(err)
			}
			expect(t, tree, fresh, "/pod")
		}
		if !tree.Gone(old) || tree.Gone(fresh) {
			t.Errorf("%s: the old one is gone: %v; the new one is gone: %v", looks, tree.Gone(old), tree.Gone(fresh))
		}
	}
}

func TestAnIdThatIsNowhereIsGoneOnceAWalkConfirmsIt(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	if tree.Gone(nowhere) {
		t.Error("gone before anybody looked")
	}
	if err := tree.Walk(); err != nil {
		t.Fatal(err)
	}
	expect(t, tree, nowhere, "")
	if tree.Gone(nowhere) {
		t.Error("gone although it may be newer than the walk")
	}
	c.advance(walkEvery)
	expect(t, tree, nowhere, "")
	if !tree.Gone(nowhere) {
		t.Error("not gone after a walk that did not find it")
	}
	if err := os.Rename(root, root+"-away"); err != nil {
		t.Fatal(err)
	}
	if err := tree.Walk(); err == nil || tree.Gone(nowhere) {
		t.Errorf("gone after a walk that saw nothing: %v", err)
	}
}

func TestWhereTheTreeIsUnmountedNothingCountsAsGone(t *testing.T) {
	t.Parallel()
	tree, root, _ := open(t)
	id := mkdir(t, root, "pod")
	expect(t, tree, id, "/pod")
	if err := os.Rename(root, root+"-away"); err != nil {
		t.Fatal(err)
	}
	if err := tree.Walk(); !errors.Is(err, os.ErrNotExist) || tree.Err() == nil || tree.Gone(id) {
		t.Errorf("without a root: %v, gone: %v", err, tree.Gone(id))
	}
	if _, err := tree.RootID(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the root has an id: %v", err)
	}
	mkdir(t, root)
	if err := tree.Walk(); err == nil || tree.Err() == nil || tree.Gone(id) {
		t.Errorf("with another root: %v, gone: %v", err, tree.Gone(id))
	}
	expect(t, tree, id, "/pod")
	remove(t, root)
	if err := os.Rename(root+"-away", root); err != nil {
		t.Fatal(err)
	}
	if err := tree.Walk(); err != nil || tree.Err() != nil || tree.Gone(id) {
		t.Errorf("with its own root again: %v, gone: %v", err, tree.Gone(id))
	}
}

func TestFiveThousandShortLivedPodsKeepTheBound(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	tree.maxKnown = 2_000
	stays := mkdir(t, root, "stays")
	expect(t, tree, stays, "/stays")
	const pods, rounds = 1_000, 5
	for round := range rounds {
		name := func(i int) string { return fmt.Sprintf("kubepods-pod%d-%d.slice", round, i) }
		for i := range pods {
			if err := os.Mkdir(filepath.Join(root, name(i)), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		last := mkdir(t, root, name(pods-1))
		// A walk for its own sake: unlike cgroup2's, these inodes are used again.
		if err := tree.Walk(); err != nil {
			t.Fatal(err)
		}
		expect(t, tree, last, "/"+name(pods-1))
		for i := range pods {
			remove(t, root, name(i))
		}
		c.advance(walkEvery)
		expect(t, tree, nowhere, "")
		expect(t, tree, last, "/"+name(pods-1))
		if !tree.Gone(last) || len(tree.known) > tree.maxKnown || len(tree.missed) > 1 {
			t.Errorf("round %d: %d are known, %d missed", round, len(tree.known), len(tree.missed))
		}
		c.advance(missFor)
	}
	if tree.Gone(stays) {
		t.Error("what stays is gone")
	}
	expect(t, tree, stays, "/stays")
}

func TestWhenFullThoseThatWentFirstAreForgottenFirst(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	tree.maxKnown = 4
	// All are made before one goes, or their inodes would be used again.
	first, second, third := mkdir(t, root, "1"), mkdir(t, root, "2"), mkdir(t, root, "3")
	hold := t.TempDir()
	if err := os.Rename(filepath.Join(root, "3"), filepath.Join(hold, "3")); err != nil {
		t.Fatal(err)
	}
	fourth := mkdir(t, root, "4")
	expect(t, tree, first, "/1")
	for _, name := range []string{"2", "1"} {
		if err := os.Rename(filepath.Join(root, name), filepath.Join(hold, name)); err != nil {
			t.Fatal(err)
		}
		if err := tree.Walk(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(hold, "3"), filepath.Join(root, "3")); err != nil {
		t.Fatal(err)
	}
	c.advance(walkEvery)
	expect(t, tree, third, "/3")
	expect(t, tree, first, "/1")
	expect(t, tree, fourth, "/4")
	expect(t, tree, second, "") // it went first
}

func TestWhatIsAskedForIsFoundAmongMoreCgroupsThanAreKept(t *testing.T) {
	t.Parallel()
	tree, root, c := open(t)
	tree.maxKnown = 10
	ids := map[uint64]string{}
	for i := range 50 {
		ids[mkdir(t, root, fmt.Sprint(i))] = fmt.Sprintf("/%d", i)
	}
	for id, path := range ids {
		c.advance(walkEvery)
		expect(t, tree, id, path)
		if len(tree.known) > tree.maxKnown {
			t.Fatalf("%d are known", len(tree.known))
		}
	}
}

func TestAWalkEndsInATreeThatIsTooDeep(t *testing.T) {
	t.Parallel()
	tree, root, _ := open(t)
	dir := root
	for range maxDepth + 10 {
		dir = filepath.Join(dir, "nested")
	}
	mkdir(t, dir)
	if err := tree.Walk(); err != nil || len(tree.known) != maxDepth+1 {
		t.Errorf("%d are known: %v", len(tree.known), err)
	}
}
