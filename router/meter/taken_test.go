package meter

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// written waits until n records count as written.
func written(t *testing.T, m *Meter, n uint64) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for m.Stats().Written < n {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("records were not written")
		}
	}
}

func TestAFileThatIsTakenAwayTakesNoLaterRecordWithIt(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]func(t *testing.T, path string){
		"removed": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		},
		"moved": func(t *testing.T, path string) {
			if err := os.Rename(path, path+".1"); err != nil {
				t.Error(err)
			}
		},
		"removed with its directory, which comes back": func(t *testing.T, path string) {
			if err := os.RemoveAll(filepath.Dir(path)); err != nil {
				t.Error(err)
			}
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "usage", "usage.jsonl")
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			m, stop := run(t, Options{Path: path})
			var want []string
			for i := range uint64(3) {
				m.Add(&Record{ID: fmt.Sprint("before-", i)})
				written(t, m, i+1)
			}
			take(t, path)
			for i := range uint64(3) {
				want = append(want, fmt.Sprint("after-", i))
				m.Add(&Record{ID: want[i]})
				written(t, m, 4+i)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if got := ids(t, path); !slices.Equal(got, want) {
				t.Errorf("the file holds %v, not %v", got, want)
			}
			if _, err := os.Stat(path + ".1"); err == nil && len(ids(t, path+".1")) != 3 {
				t.Errorf("the moved file holds %v", ids(t, path+".1"))
			}
		})
	}
}
