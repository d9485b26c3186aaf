package segment

import (
	"context"
	"io/fs"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

// counted is a file system that counts the bytes that are written.
type counted struct {
	durable.FS
	written *int64
}

type countedFile struct {
	durable.File
	written *int64
}

func (c counted) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := c.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &countedFile{f, c.written}, nil
}

func (f *countedFile) WriteAt(p []byte, off int64) (int, error) {
	*f.written += int64(len(p))
	return f.File.WriteAt(p, off)
}

func TestASelfTestWritesWhatTheWearLetsAndIsCharged(t *testing.T) {
	t.Parallel()
	const page = PageSize
	for left, want := range map[int64]int64{
		1 << 40:      64<<20 + page,
		9 << 20:      8<<20 + page,
		4<<20 + page: 4<<20 + page,
		4 << 20:      2<<20 + page, // in any case
		0:            2<<20 + page,
	} {
		var written, taken int64
		wear := Wear{
			Spend: func(n int64) bool {
				if n > left {
					return false
				}
				taken += n
				return true
			},
			Charge: func(n int64) { taken += n },
		}
		fsys := durabletest.New()
		must(t, fsys.MkdirAll("/drive0", 0o700))
		v, err := SelfTest(context.Background(), counted{fsys, &written}, "/drive0", wear)
		if err != nil || v.Read <= 0 || v.Write <= 0 {
			t.Errorf("with %d bytes left: %+v, %v", left, v, err)
		}
		if taken != want || written > taken || written < taken-page {
			t.Errorf("with %d bytes left %d are written and %d taken, want %d", left, written, taken, want)
		}
	}
}
