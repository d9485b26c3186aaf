package soak

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

// Book keeps what the clients saw. The zero value is empty. It is safe for
// concurrent use.
type Book struct {
	// Drains says for each router from when on it may cut what it has begun; one
	// without an entry never may.
	Drains map[string]time.Time

	mu     sync.Mutex
	sights []Sight
	count  map[string]int
}

func (b *Book) saw(s Sight) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.count == nil {
		b.count = map[string]int{}
	}
	b.sights = append(b.sights, s)
	b.count["all"]++
	b.count[s.What]++
	if s.What == sawRight {
		b.count[s.What+" "+s.Kind]++
	}
}

// Count gives how often each thing was seen: "all", the words for what was
// seen, and "right KIND".
func (b *Book) Count() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.count)
}

// Record is what the comparison reads of a usage record.
type Record struct {
	ID               string
	RequestID        string
	Time             time.Time
	Endpoint         string
	PromptTokens     int
	CachedTokens     int
	CompletionTokens int
	Estimated        bool
	Outcome          string
	Status           int
	Stream           bool
	DurationMs       float64
	Retries          int
	Path             string
}

// ReadRecords reads a usage file and those that were rotated away.
func ReadRecords(path string) ([]Record, error) {
	old, err := filepath.Glob(filepath.Join(filepath.Dir(path), "usage-*.jsonl"))
	if err != nil {
		return nil, fmt.Errorf("list usage files: %w", err)
	}
	var all []Record
	for _, name := range append(old, path) {
		err := eachLine(name, func(line []byte) error {
			var r Record
			err := json.Unmarshal(line, &r)
			all = append(all, r)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read usage records: %w", err)
		}
	}
	return all, nil
}

func eachLine(path string, take func([]byte) error) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for line := range bytes.Lines(text) {
		if err := take(line); err != nil {
			return fmt.Errorf("%s: %w: %.80q", path, err, line)
		}
	}
	return nil
}

// Works are what engines told, by endpoint and request id.
type Works map[workKey][]engine.Work

type workKey struct{ endpoint, request string }

// Tell notes what an endpoint's engine told. An end completes the last begin.
func (w Works) Tell(endpoint string, told engine.Work) {
	key := workKey{endpoint, told.Request}
	list := w[key]
	if n := len(list); told.Phase == engine.WorkEnded && n > 0 && list[n-1].Phase == engine.WorkBegun {
		list[n-1] = told
		return
	}
	w[key] = append(list, told)
}

// ReadWorks reads the work log of an endpoint's engine.
func (w Works) ReadWorks(endpoint, path string) error {
	err := eachLine(path, func(line []byte) error {
		var told engine.Work
		err := json.Unmarshal(line, &told)
		w.Tell(endpoint, told)
		return err
	})
	if err != nil {
		return fmt.Errorf("read work log: %w", err)
	}
	return nil
}
