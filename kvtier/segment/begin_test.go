package segment

import (
	"fmt"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// reclaiming is a log that has given keys other values and ended some, and then what
// makes it use its segments again.
func reclaiming() (c *caller, again func() error) {
	c = newCaller(nil)
	return c, func() error { return all(fill(20, 60, 2), endAll(21, 22, 23), fill(60, 90, 0))(c) }
}

// TestCrashAmidASegmentsNewIncarnationGivesNoOldValue lets the process, or the power,
// end at each change that gives a used segment its new header, with each part of it on
// the drive or not.
func TestCrashAmidASegmentsNewIncarnationGivesNoOldValue(t *testing.T) {
	t.Parallel()
	c, again := reclaiming()
	before := all(fill(0, 30, 0), endAll(1, 2, 3), fill(10, 30, 1), sealAll)
	must(t, c.open(), before(c))
	var ops []string
	c.fs.FailWhen(func(op, path string) error {
		ops = append(ops, op+" "+path)
		return nil
	})
	must(t, again())
	if c.log.Stats().Reclaimed < 3 {
		t.Fatalf("%d segments are used again", c.log.Stats().Reclaimed)
	}
	// The last page, then the first two, then their sync: of a file that was written
	// and sealed before.
	var begins []int
	for i := range len(ops) - 3 {
		path, isWrite := strings.CutPrefix(ops[i], "write ")
		if isWrite && ops[i+1] == ops[i] && ops[i+2] == "datasync "+path && !strings.HasPrefix(ops[i+3], "write "+path) {
			begins = append(begins, i)
		}
	}
	if len(begins) < 3 {
		t.Fatalf("%d new incarnations are seen", len(begins))
	}
	tried, some := 0, begins[:1]
	if !testing.Short() {
		some = begins[:3]
	}
	for _, begin := range some {
		for k := 1; k <= 4; k++ {
			for _, tear := range []bool{false, true} {
				c, again := reclaiming()
				must(t, c.open(), before(c))
				c.fs.CrashAt(c.fs.Changes()+begin+k, tear)
				if err := again(); !crashed(c) {
					t.Fatalf("change %d: no crash, %v", begin+k, err)
				}
				fates := map[string]durabletest.Survives{
					"everything": durabletest.Everything, "nothing": durabletest.Nothing, "names": durabletest.NamesAlone, "bytes": durabletest.BytesAlone,
				}
				for _, n := range c.fs.Unsynced() {
					fates[fmt.Sprintf("only %d", n)], fates[fmt.Sprintf("without %d", n)] = durabletest.Only(n), durabletest.Without(n)
				}
				for name, lives := range fates {
					for _, sector := range []int64{durabletest.PageSector, durabletest.SmallSector} {
						tried++
						if err := c.on(c.fs.CrashWith(sector, lives)).recover(); err != nil {
							t.Fatalf("crash at change %d of a new incarnation, torn %t, what survives: %s: %v", k, tear, name, err)
						}
					}
				}
			}
		}
	}
	t.Logf("%d states", tried)
}
