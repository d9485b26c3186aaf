//go:build root

package drives

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/admin"
)

// fill takes what is free on the volume but so many bytes.
func fill(t *testing.T, v *volume, but int64) (release func()) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(v.dir, &st); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(v.dir, "stranger")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	// Not every free block can be had, so it takes ever smaller pieces.
	var taken int64
	want := int64(st.Bavail)*st.Bsize - but
	for piece := want; piece >= st.Bsize && taken < want; {
		piece = min(piece, want-taken)
		if unix.Fallocate(int(f.Fd()), 0, taken, piece) == nil {
			taken += piece
		} else {
			piece /= 2
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestADriveFullBeforeAPullIsSaidServingGoesOnAndThePullCompletesLater(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	release := fill(t, v, 4<<20)
	n.failure("org/big", admin.CodeNoSpace)
	n.serves("org/small")
	release()
	n.pull("org/big")
	n.serves("org/big")
}

func TestADriveThatFillsInMidPullIsSaidAndThePullResumes(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	end := n.begin("org/big")
	release := fill(t, v, 0)
	// Whether it had allocated all it needs is chance; what it says is not.
	if err := end(); err != nil {
		n.failure("org/big", admin.CodeNoSpace)
	}
	n.serves("org/small")
	n.alive()
	release()
	n.pull("org/big")
	n.serves("org/big")
}

func TestADriveWithoutInodesIsSaidAndThePullCompletesLater(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64", "-N", "128")
	n := start(t, v)
	n.pull("org/small")
	dir := filepath.Join(v.dir, "strangers")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o644); err != nil {
			break
		}
	}
	n.failure("org/big", admin.CodeNoSpace)
	n.serves("org/small")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	n.pull("org/big")
	n.serves("org/big")
}

func TestADriveThatTurnsReadOnlyInMidPullServesOnAndTakesThePullUpWhenItIsBack(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	end := n.begin("org/big")
	v.freeze()
	if err := end(); err == nil {
		t.Error("a pull onto a read-only drive ended well")
	}
	n.failure("org/big", admin.CodeInternal, admin.CodeNoSpace)
	n.serves("org/small")
	n.alive()
	comesBack(v, n)
}

// comesBack ends the agent, mends the drive and starts anew: what was whole is
// served, and what could not be pulled now can.
func comesBack(v *volume, n *node) {
	n.t.Helper()
	n.Kill()
	v.gone()
	v.back()
	n.restart()
	n.serves("org/small")
	n.pull("org/big")
	n.serves("org/big")
}

func TestADriveThatTurnsReadOnlyWhileItIsReadServesOn(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	v.freeze()
	for range 3 {
		n.serves("org/small")
	}
	n.failure("org/big", admin.CodeInternal, admin.CodeNoSpace)
	n.alive()
	comesBack(v, n)
}

func TestAStoreDeletedUnderTheAgentIsNoticedAndComesBack(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	if err := os.RemoveAll(n.store); err != nil {
		t.Fatal(err)
	}
	if err := n.mirrored("org/small"); err != nil {
		t.Logf("without its store: %v", err)
	}
	n.alive()
	n.Kill()
	n.restart()
	n.pull("org/small")
	n.serves("org/small")
}

func TestADriveUnmountedUnderTheAgentLeavesNothingWrongAndComesBack(t *testing.T) {
	t.Parallel()
	v := mounted(t, "64")
	n := start(t, v)
	n.pull("org/small")
	v.gone()
	if err := n.mirrored("org/small"); err != nil {
		t.Logf("without its drive: %v", err)
	}
	n.alive()
	n.Kill()
	v.back()
	n.restart()
	m, err := n.Client.Model(n.ctx, "hub://org/small")
	if err != nil || m.State != "Ready" {
		t.Errorf("after the drive came back the model is %q, %v", m.State, err)
	}
	n.serves("org/small")
}
