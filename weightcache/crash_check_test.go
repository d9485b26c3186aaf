package weightcache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// recover opens the store after a crash and holds it to the ledger: nothing
// promised is lost, nothing there is wrong, space is counted, opening again
// changes nothing, and pulls complete without fetching what is there.
func (w *world) recover() error {
	if err := w.open(); err != nil {
		return fmt.Errorf("open after the crash: %w", err)
	}
	if err := errors.Join(w.checkDrive(), w.checkPromises()); err != nil {
		return errors.Join(err, w.close())
	}
	first, err := w.state()
	if err != nil {
		return err
	}
	if err := errors.Join(w.close(), w.open()); err != nil {
		return fmt.Errorf("open again: %w", err)
	}
	second, err := w.state()
	if err != nil {
		return err
	}
	if diff := diffTrees(first, second); len(diff) > 0 {
		return errors.Join(fmt.Errorf("opening again changed %s", strings.Join(diff, "; ")), w.close())
	}
	return errors.Join(w.converge(), w.close())
}

// state is the drive and what the store says of its refs.
func (w *world) state() (map[string]string, error) {
	list, err := w.tree("/var")
	if err != nil {
		return nil, err
	}
	for _, st := range w.puller.List() {
		list[st.Ref.String()] = fmt.Sprint(st.State, st.Commit, st.Present, st.Views, st.MetadataReady)
	}
	usage, err := w.store.Usage()
	list["usage"] = fmt.Sprint(usage.Used, usage.Reserved)
	return list, err
}

// checkDrive looks at the files themselves.
func (w *world) checkDrive() error {
	tree, err := w.tree("/var")
	if err != nil {
		return err
	}
	named := map[artifact.Digest]bool{}
	for _, r := range w.store.artifacts {
		for _, f := range r.m.Files {
			named[f.SHA256] = true
		}
	}
	var used int64
	var wrong []error
	for path := range tree {
		base := filepath.Base(path)
		if durable.IsTemp(base) {
			wrong = append(wrong, fmt.Errorf("a temporary name is left: %s", path))
		}
		_, isBlob := relative(w.store.path(blobsDir), path)
		_, isLanding := relative(w.store.path(landingDir), path)
		info, err := w.fs.Lstat(path)
		if err != nil {
			return err
		}
		switch {
		case info.IsDir():
		case isBlob:
			used += info.Size()
			data, err := durable.ReadFile(w.fs, path, 1<<30)
			if err != nil {
				return err
			}
			sha := artifact.Digest(sha256.Sum256(data))
			if sha.String() != base && !w.damaged[mustDigest(base)] {
				wrong = append(wrong, fmt.Errorf("stored file %s has digest %s", base, sha))
			}
			if !named[mustDigest(base)] && !w.store.orphans[mustDigest(base)] {
				wrong = append(wrong, fmt.Errorf("stored file %s belongs to no artifact", base))
			}
			if info.Mode() != 0o444 {
				wrong = append(wrong, fmt.Errorf("stored file %s has mode %v", base, info.Mode()))
			}
		case isLanding && strings.HasSuffix(base, partSuffix):
			used += info.Size()
		}
	}
	usage, err := w.store.Usage()
	if err != nil {
		return err
	}
	if int64(usage.Used) != used || usage.Reserved != 0 {
		wrong = append(wrong, fmt.Errorf("the store counts %d bytes and %d reserved, the drive has %d", usage.Used, usage.Reserved, used))
	}
	return errors.Join(wrong...)
}

func mustDigest(hex string) artifact.Digest {
	sha, _ := artifact.ParseDigest(hex)
	return sha
}

// checkPromises compares the store with the ledger.
func (w *world) checkPromises() error {
	var wrong []error
	for ref, p := range w.ledger {
		m, found := w.store.pinned(ref)
		commit := ""
		if found {
			commit = m.Commit
		}
		if !p.may[commit] {
			wrong = append(wrong, fmt.Errorf("%s is pinned to %q, it may be one of %q", ref, commit, slices.Sorted(maps.Keys(p.may))))
			continue
		}
		if found {
			ready := w.store.Ready(m.Digest)
			if p.whole[commit] && !ready {
				wrong = append(wrong, fmt.Errorf("%s at %s was whole and is not Ready", ref, commit))
			}
			if p.before != nil && p.before.commit != commit && !ready {
				wrong = append(wrong, w.checkWhole(ref, p.before, "what the ref meant before"))
			}
			if ready {
				wrong = append(wrong, w.checkWhole(ref, w.origin.known[commit], "a Ready artifact"))
			}
		}
		for kind := range p.views {
			if p.shown != commit {
				continue // it goes with what the ref meant before
			}
			wrong = append(wrong, w.checkView(ref, w.origin.known[commit], kind, true))
		}
	}
	for _, v := range w.origin.known {
		for ref := range w.ledger {
			for _, kind := range []string{flatKind, hubKind} {
				wrong = append(wrong, w.checkView(ref, v, kind, false))
			}
		}
	}
	return errors.Join(wrong...)
}

// checkWhole looks for every file of a version in the store.
func (w *world) checkWhole(ref artifact.Ref, v *version, what string) error {
	for path, want := range v.files {
		sha := artifact.Digest(sha256.Sum256(want))
		got, err := durable.ReadFile(w.fs, w.store.blobPath(sha), 1<<30)
		if err != nil || !bytes.Equal(got, want) && !w.damaged[sha] {
			return fmt.Errorf("%s: %s at %s: file %s has %d bytes, %w", ref, what, v.commit, path, len(got), errors.Join(err, errWrongBytes))
		}
	}
	return nil
}

var errWrongBytes = errors.New("not those of the origin")

// checkView compares the files of a view with the origin's; whole wants each.
func (w *world) checkView(ref artifact.Ref, v *version, kind string, whole bool) error {
	dir := w.store.viewPath(kind, v.digest())
	if kind == hubKind {
		dir = filepath.Join(dir, ref.HubName(), "snapshots", v.commit)
	}
	for path, want := range v.files {
		got, err := durable.ReadFile(w.fs, filepath.Join(dir, path), 1<<30)
		if notExist(err) && !whole {
			continue
		}
		if err != nil || !bytes.Equal(got, want) && !w.damaged[sha256.Sum256(want)] {
			return fmt.Errorf("%s at %s: file %s of the %s view has %d bytes, %w", ref, v.commit, path, kind, len(got), errors.Join(err, errWrongBytes))
		}
	}
	return nil
}

// lacks is how many bytes of a version a pull has to fetch: not those of files
// in the store, nor of segments whose bit on the drive is set, nor what a process
// of this boot wrote.
func (w *world) lacks(v *version) (int64, error) {
	var lacks int64
	for _, data := range v.files {
		sha := artifact.Digest(sha256.Sum256(data))
		size := int64(len(data))
		if w.store.has(sha) {
			continue
		}
		lacks += size
		bits, err := durable.ReadFile(w.fs, w.store.bitsPath(sha), 1<<20)
		if notExist(err) {
			continue
		}
		if err != nil {
			return 0, err
		}
		b, err := decodeBits(bits, sha, size)
		if err != nil {
			continue // torn before its first sync: it promises nothing
		}
		for i := range (size + b.segment - 1) / b.segment {
			if b.bitmap[i/8]&(1<<(i%8)) != 0 {
				lacks -= min(b.segment, size-i*b.segment)
			} else if b.boot == w.store.boot && b.boot != [bootBytes]byte{} {
				lacks -= b.written[i]
			}
		}
	}
	return lacks, nil
}

// converge pulls every ref that is pinned or whose pull was under way and
// checks what comes of it and what it cost. The ledger then says what is there.
func (w *world) converge() error {
	for ref, p := range w.ledger {
		m, found := w.store.pinned(ref)
		if !found && len(p.may) == 1 {
			continue // it was never there, or was removed
		}
		v := w.origin.means[ref.Name]
		if found {
			v = w.origin.known[m.Commit]
		}
		most, err := w.lacks(v)
		if err != nil {
			return err
		}
		before, mismatches := w.origin.bytes(), w.puller.Stats().Mismatches
		if m, err = w.puller.Ensure(context.Background(), ref, EnsureOptions{}); err != nil {
			return fmt.Errorf("pull after the crash: %w", err)
		}
		if got := w.origin.bytes() - before; got > most {
			return fmt.Errorf("%s: the pull after the crash fetched %d bytes where %d were missing", ref, got, most)
		}
		if got := w.puller.Stats().Mismatches - mismatches; got > 0 {
			return fmt.Errorf("%s: a bit was set for bytes that were not there", ref)
		}
		if result, err := w.puller.Verify(context.Background(), ref); err != nil {
			return err
		} else if !result.OK() {
			for _, path := range result.Bad {
				f, _ := m.File(path)
				if !w.damaged[f.SHA256] {
					return fmt.Errorf("%s: file %s is wrong after the pull", ref, path)
				}
				delete(w.damaged, f.SHA256)
			}
			if _, err := w.puller.Ensure(context.Background(), ref, EnsureOptions{}); err != nil {
				return err
			}
		}
		if err := w.view(ref); err != nil {
			return err
		}
		v = w.origin.known[m.Commit]
		if err := errors.Join(w.checkWhole(ref, v, "pulled again"), w.checkView(ref, v, flatKind, true), w.checkView(ref, v, hubKind, true)); err != nil {
			return err
		}
	}
	for ref, p := range w.ledger {
		p.may, p.whole, p.before = map[string]bool{"": true}, map[string]bool{}, nil
		if m, found := w.store.pinned(ref); found {
			p.may = map[string]bool{m.Commit: true}
			p.whole[m.Commit] = w.store.Ready(m.Digest)
			if !p.whole[m.Commit] {
				p.views = map[string]bool{} // it was evicted for another
			}
		}
	}
	return w.checkDrive()
}
