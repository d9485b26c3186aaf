package segment

import (
	"syscall"
	"testing"
)

func TestFilesThatCouldNotBeMadeNorRemovedTakeNoRoomAfterTheFault(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	failOn(c.fs, "/", syscall.EIO, "sync", "syncdir")
	for range 12 {
		_ = fill(0, 30, 0)(c) // whatever it comes to
	}
	lost := 0
	for _, s := range c.log.drives[0].segments {
		if s.lost {
			lost++
		}
	}
	if lost == 0 {
		t.Fatal("no file was made that could not be removed")
	}
	c.fs.Heal()
	var err error
	for range 3 * passes { // the drive is set aside, and tried now and then
		if err = fill(0, 30, 0)(c); err == nil {
			break
		}
	}
	must(t, err, fill(30, 120, 0)(c), c.check())
	for _, s := range c.log.drives[0].segments {
		if s.lost {
			t.Errorf("%s still takes room and is of no use", s.path)
		}
	}
}
