package weightcache

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func FuzzDecodeChunks(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add(make([]byte, 64), 2)
	f.Add(append(make([]byte, 32), bytes.Repeat([]byte{1}, 32)...), 2)
	f.Fuzz(func(t *testing.T, data []byte, count int) {
		var sha artifact.Digest
		copy(sha[:], data[max(0, len(data)-len(sha)):])
		chunks, err := decodeChunks(data, sha, count)
		if err != nil {
			if !errors.Is(err, artifact.ErrInvalid) {
				t.Errorf("error %v is not ErrInvalid", err)
			}
			return
		}
		var again []byte
		for _, c := range chunks {
			again = append(again, c[:]...)
		}
		if len(chunks) != count || !bytes.Equal(again, data) || chunks[count-1] != sha {
			t.Errorf("%d chunks of %d bytes", len(chunks), len(data))
		}
	})
}

// emptyStore is the drive of a store that holds nothing.
func emptyStore(t testing.TB) *world {
	t.Helper()
	w, err := newWorld(nil)
	if err == nil {
		err = errors.Join(w.open(), w.close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func FuzzOpenWithAnyVersion(f *testing.F) {
	for _, text := range []string{"hearth weightcache 1\n", "hearth weightcache 2\n", "hearth weightcache 0", "", "\x00", "hearth weightcache 99999999999999999999\n", "hearth weightcache +1"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		w := emptyStore(t)
		if err := durable.WriteFile(w.fs, worldDir+"/"+formatFile, text, 0o600); err != nil {
			t.Fatal(err)
		}
		before, err := w.tree("/var")
		if err != nil {
			t.Fatal(err)
		}
		if err := w.open(); err == nil {
			if err := w.close(); err != nil {
				t.Error(err)
			}
			return
		}
		after, err := w.tree("/var")
		if err != nil {
			t.Fatal(err)
		}
		if diff := diffTrees(before, after); len(diff) > 0 {
			t.Errorf("a store that was refused has changed: %v", diff)
		}
	})
}

func FuzzOpenWithAnyRecord(f *testing.F) {
	m, err := artifact.NewManifest(&artifact.Listing{
		Ref: testRef, Source: "mem", Commit: "ab",
		Files: []artifact.File{{Path: "config.json", Size: 2, SHA256: artifact.Digest{1}, Kind: artifact.Metadata}},
	})
	if err != nil {
		f.Fatal(err)
	}
	good, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, false)
	f.Add(good, true)
	f.Add([]byte(`{"version": 99}`), false)
	f.Add([]byte(`{}`), true)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, data []byte, superseded bool) {
		w := emptyStore(t)
		name := recordName(testRef)
		if superseded {
			name += supersededTag + m.Digest.Short()
		}
		path := worldDir + "/" + refsDir + "/" + name + recordSuffix
		if err := durable.WriteFile(w.fs, path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := w.open(); err != nil {
			if !errors.Is(err, ErrNewer) {
				t.Fatal(err)
			}
			if got, err := durable.ReadFile(w.fs, path, 1<<30); err != nil || !slices.Equal(got, data) {
				t.Errorf("a record of a newer version was touched: %v", err)
			}
			return
		}
		for _, m := range w.store.Manifests() {
			if err := m.Check(); err != nil || m.Ref != testRef {
				t.Errorf("%s is pinned: %v", m.Ref, err)
			}
		}
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		if err := w.after(w.fs.CrashWith(durabletest.PageSector, durabletest.Nothing), "second").recover(); err != nil {
			t.Error(err)
		}
	})
}
