package local

import (
	"log/slog"
	"path"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// tellWeights compares what can be claimed with what was told last, and tells
// what is new. Run alone calls it.
func (w *InProcess) tellWeights() {
	next := w.offered()
	if old := w.weights.Load(); old != nil && reflect.DeepEqual(*old, next) {
		return
	}
	w.weights.Store(&next)
	w.changed.notify()
}

// offers reports whether an artifact is among what was told last.
func (w *InProcess) offers(digest artifact.Digest) bool {
	told := w.weights.Load()
	return told != nil && slices.ContainsFunc(told.Artifacts, func(a stock.Artifact) bool { return a.Digest == digest })
}

// offered is what claims may have: each artifact that is Ready and has a view,
// once, under the first of its refs.
func (w *InProcess) offered() stock.Weights {
	offer := stock.Weights{Artifacts: []stock.Artifact{}, Drive: w.drive}
	room, err := w.store.Room()
	if err != nil {
		w.log.Warn("free space of the weights store not read", slog.Any("error", err))
	}
	offer.Drive.Free = room
	seen := map[artifact.Digest]bool{}
	for _, s := range w.puller.List() {
		flat := flatView(s)
		if s.State != weightcache.Ready || flat == "" || seen[s.Digest] {
			continue
		}
		seen[s.Digest] = true
		what, known := w.told[s.Digest]
		if !known {
			what = w.describe(s, flat)
			w.told[s.Digest] = what
		}
		offer.Artifacts = append(offer.Artifacts, stock.Artifact{
			Ref: s.Ref, Digest: s.Digest, Commit: s.Commit, Model: path.Base(s.Ref.Name),
			Format: what.format, Quantization: what.quantization, Size: units.Bytes(s.Size),
		})
	}
	for digest := range w.told {
		if !seen[digest] {
			delete(w.told, digest)
		}
	}
	return offer
}

// flatView is the flat one of an artifact's views; empty where it has none.
func flatView(s weightcache.Status) string {
	for _, dir := range s.Views {
		if filepath.Base(filepath.Dir(dir)) == "flat" {
			return dir
		}
	}
	return ""
}

// describe reads from an artifact's own files what it is.
func (w *InProcess) describe(s weightcache.Status, flat string) description {
	m, found := w.store.ManifestOf(s.Digest)
	if !found {
		return description{}
	}
	d, err := describe(m, flat)
	if err != nil {
		w.log.Warn("artifact does not say what it is", slog.String("artifact", s.Digest.String()),
			slog.String("ref", s.Ref.String()), slog.Any("error", err))
	}
	return d
}
