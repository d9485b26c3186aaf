package segment

import (
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

func testAEAD(t testing.TB) cipher.AEAD {
	t.Helper()
	b, err := aes.NewCipher(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCM(b)
	if err != nil {
		t.Fatal(err)
	}
	return aead
}

// variants are kinds of logs that promise the same.
func variants(t testing.TB) map[string]func(*Options) {
	return map[string]func(*Options){
		"OneDrive": nil, "TwoDrives": withDrives(2), "Encrypted": withAEAD(testAEAD(t)),
		"OneSegment": func(o *Options) { o.Bytes = smallSegment }, "TwoSegments": func(o *Options) { o.Bytes = 2 * smallSegment },
		"KeepsAsMuchAsItCan": func(o *Options) { o.SegmentSize, o.Bytes = 2*smallSegment, 8*smallSegment },
	}
}

const testKeys = 60

// play does random work for some steps.
func (c *caller) play(random *rand.Rand, steps int, versions map[int]int) error {
	for range steps {
		i := random.IntN(testKeys)
		var err error
		switch p := random.IntN(100); {
		case p < 45:
			values := map[name][]byte{}
			for range 1 + random.IntN(4) {
				i := random.IntN(testKeys)
				if random.IntN(4) == 0 {
					versions[i]++
				}
				values[keyOf(i)] = valueOf(i, versions[i])
			}
			err = c.put(values)
			if errors.Is(err, ErrFull) && c.log.opts.Bytes <= 2*smallSegment {
				err = nil // more than such a budget takes at once
			}
		case p < 52:
			versions[i]++
			err = c.end(keyOf(i))
		case p < 53:
			err = c.seal()
		default:
			_, err = c.get(keyOf(i))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func TestAReadGivesTheLastValueOrAMissThroughReclaimsAndRestarts(t *testing.T) {
	t.Parallel()
	seeds := 4
	if testing.Short() {
		seeds = 1
	}
	for what, options := range variants(t) {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for seed := range seeds {
				random := rand.New(rand.NewPCG(uint64(seed), 7))
				c := newCaller(options)
				versions := map[int]int{}
				if err := c.open(); err != nil {
					t.Fatal(err)
				}
				for round := range 8 {
					if err := c.play(random, 120, versions); err != nil {
						t.Fatalf("seed %d, round %d: %v", seed, round, err)
					}
					before := len(c.index)
					var err error
					switch random.IntN(3) {
					case 0: // a clean end
						err = c.restart()
					case 1: // killed: the kernel goes on
						c.fs.Revive()
						err = c.open()
					default:
						c = c.on(c.fs.Crash(random))
						before = 0 // what no segment sealed may be lost
						err = c.open()
					}
					if err == nil {
						err = c.check()
					}
					if err != nil {
						t.Fatalf("seed %d, after round %d: %v", seed, round, err)
					}
					if len(c.index) < before {
						t.Fatalf("seed %d, round %d: %d of %d blocks are left after a restart without a power cut", seed, round, len(c.index), before)
					}
				}
				if err := c.close(); err != nil {
					t.Fatal(err)
				}
				if c.found < 30 {
					t.Errorf("seed %d: only %d reads found anything", seed, c.found)
				}
			}
		})
	}
}

func TestWhatACrashLeavesIsTheSameAtEveryLaterStart(t *testing.T) {
	t.Parallel()
	for seed := range 6 {
		random := rand.New(rand.NewPCG(uint64(seed), 8))
		c := newCaller(withDrives(1 + seed%2))
		if err := c.open(); err != nil {
			t.Fatal(err)
		}
		if err := c.play(random, 200, map[int]int{}); err != nil {
			t.Fatal(err)
		}
		c = c.on(c.fs.Crash(random))
		for range 3 {
			if err := c.open(); err != nil {
				t.Fatal(err)
			}
			n := len(c.index)
			// Whatever was seen is durable by then.
			c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Nothing))
			if err := c.open(); err != nil {
				t.Fatal(err)
			}
			if len(c.index) != n {
				t.Errorf("seed %d: %d blocks, and %d at the next start", seed, n, len(c.index))
			}
			if err := c.check(); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
		}
	}
}
