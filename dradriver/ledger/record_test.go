package ledger

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// goldenEntry is the entry of testdata/v1 in each of its states.
func goldenEntry(state State) Entry {
	at := time.Date(2026, 11, 29, 12, 0, 0, 500, time.UTC)
	e := planOf("golden", "gpu-0000-1b-00-0")
	e.State, e.Boot, e.Begun = Begun, "6f1c8a4e-boot", at
	e.Weights[0].Pull, e.Weights[0].Deadline = true, at.Add(30*time.Minute)
	if state == Begun {
		return e
	}
	e = doneOf(e)
	e.State, e.Prepared, e.Sharers, e.Lines.Prepared = Prepared, at.Add(time.Second), []string{"0c1a-other"}, 41
	if state == Prepared {
		return e
	}
	e.Lines.Gone = 42
	return e.tombstone(at.Add(time.Hour))
}

func TestFilesOfVersionOneAreReadAndWrittenByteForByte(t *testing.T) {
	t.Parallel()
	var all []byte
	for _, state := range []State{Begun, Prepared, Gone} {
		want := goldenEntry(state)
		record, err := encode(&want)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, record...)
		// The file of a claim in a state has the records of the earlier ones too.
		path := filepath.Join("testdata", "v1", string(state)+".json")
		if os.Getenv("GOLDEN") == "write" {
			if err := os.WriteFile(path, all, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		stored, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(stored, all) {
			t.Errorf("%s: the format changed; version %d is to be written as it was, a change needs a new version", path, Version)
		}
		got, err := decode(stored)
		if err != nil || got.whole != len(stored) {
			t.Fatalf("%s: %d of %d bytes, %v", path, got.whole, len(stored), err)
		}
		if diff := cmp.Diff(want, got.entry); diff != "" {
			t.Errorf("%s: %s", path, diff)
		}
	}
}

func TestAnAppendThatACrashCutShortIsNotReadWhereverItWasCut(t *testing.T) {
	t.Parallel()
	begun, prepared := goldenEntry(Begun), goldenEntry(Prepared)
	first, err1 := encode(&begun)
	second, err2 := encode(&prepared)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	check := func(what string, n int, tail []byte) {
		t.Helper()
		got, err := decode(slices.Concat(first, tail))
		if err != nil || got.entry.State != Begun || got.whole != len(first) {
			t.Fatalf("%s %d: state %q, %d bytes, %v", what, n, got.entry.State, got.whole, err)
		}
	}
	for n := range len(second) {
		check("cut after", n, second[:n])
		holes := slices.Clone(second)
		clear(holes[n:])
		check("zeroes from", n, holes)
		holes = slices.Clone(second)
		clear(holes[:n+1])
		check("zeroes up to", n, holes)
	}
}

func TestAnyFlippedBitOfAFileIsFoundOrFallsBackToARecordThatChecks(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile(filepath.Join("testdata", "v1", "prepared.json"))
	if err != nil {
		t.Fatal(err)
	}
	begun, fell := goldenEntry(Begun), 0
	for at := range data {
		for bit := range 8 {
			flipped := slices.Clone(data)
			flipped[at] ^= 1 << bit
			got, err := decode(flipped)
			switch {
			case errors.Is(err, ErrNewer):
				t.Fatalf("byte %d bit %d: taken for a newer version", at, bit)
			case err == nil && !cmp.Equal(got.entry, begun):
				t.Fatalf("byte %d bit %d: read as %+v", at, bit, got.entry)
			case err == nil:
				fell++
			}
		}
	}
	// A letter that becomes NUL looks like a torn sector; of nothing else may a
	// flip make a torn append.
	if fell > len(data)/100 {
		t.Errorf("%d flips of %d fell back to the earlier record", fell, 8*len(data))
	}
}

func FuzzDecode(f *testing.F) {
	for _, state := range []State{Begun, Prepared, Gone} {
		data, err := os.ReadFile(filepath.Join("testdata", "v1", string(state)+".json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		f.Add(data[:len(data)-7])
	}
	f.Add([]byte("hearth-claim 1 0 sha256:\n"))
	f.Add(record(2, "{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decode(data)
		if err != nil {
			if !errors.Is(err, errBad) && !errors.Is(err, ErrNewer) {
				t.Fatalf("error of no kind: %v", err)
			}
			return
		}
		if got.whole <= 0 || got.whole > len(data) {
			t.Fatalf("%d bytes of %d", got.whole, len(data))
		}
		again, err := encode(&got.entry)
		if err != nil {
			return // longer than what was read, as escapes can make it
		}
		back, err := decode(again)
		if err != nil || !equal(&back.entry, &got.entry) {
			t.Fatalf("written again it reads %+v, %v", back.entry, err)
		}
	})
}

func FuzzDecodeLine(f *testing.F) {
	f.Add([]byte(`{"v":1,"n":3,"event":"prepared","at":"2026-11-29T12:00:00Z","claim":"u","namespace":"n","name":"c","from":"2026-11-29T12:00:00Z"}` + "\n"))
	f.Add([]byte("\x00\x00{"))
	f.Fuzz(func(t *testing.T, row []byte) {
		if l, err := decodeLine(row); err == nil && (l.Number == 0 || l.Version < 1) {
			t.Fatalf("taken for a line: %+v", l)
		}
	})
}
