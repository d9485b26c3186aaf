package weightcache

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// flip changes one byte of a committed file behind the store's back.
func flip(t *testing.T, r *rig, m *artifact.Manifest, path string) {
	t.Helper()
	f, _ := m.File(path)
	blob := r.store.blobPath(f.SHA256)
	if err := os.Chmod(blob, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(blob, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := file.ReadAt(b[:], f.Size/2); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := file.WriteAt(b[:], f.Size/2); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(file.Close(), os.Chmod(blob, 0o444)); err != nil {
		t.Fatal(err)
	}
}

func TestFlippedByteTakesTheArtifactOutAndOnlyThatFileIsFetchedAgain(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(3, 2*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	checkFlat(t, r, m)
	if _, err := r.puller.HubView(m); err != nil {
		t.Fatal(err)
	}
	bad := "model-00002-of-00003.safetensors"
	flip(t, r, m, bad)
	before := src.servedBytes()
	result, err := r.puller.Verify(t.Context(), testRef)
	if err != nil || result.OK() || len(result.Bad) != 1 || result.Bad[0] != bad || result.Files != len(m.Files) {
		t.Fatalf("Verify: %+v, %v", result, err)
	}
	if st, _ := r.puller.Status(testRef); st.State != Suspect || r.store.Ready(m.Digest) {
		t.Errorf("state %s, want Suspect", st.State)
	}
	if _, err := os.Stat(filepath.Join(r.store.viewPath(flatKind, m.Digest), bad)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the damaged file is still in the view: %v", err)
	}
	r.ensure(t)
	if got, want := src.servedBytes()-before, int64(len(src.files[bad])); got != want {
		t.Errorf("mending fetched %d bytes, want %d", got, want)
	}
	checkFlat(t, r, m)
	if result, err := r.puller.Verify(t.Context(), testRef); err != nil || !result.OK() {
		t.Errorf("Verify after mending: %+v, %v", result, err)
	}
}

func TestRunFindsDamageByScrubAndMendsIt(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	flip(t, r, m, shard1)
	r.reopen(t, func(_ *Options, p *PullerOptions) {
		p.ScrubEvery = time.Millisecond
		p.ScrubRate = units.Rate(units.GiB)
	})
	changed, end := r.puller.Subscribe()
	defer end()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.puller.Run(ctx) }()
	for r.puller.Stats().Damaged == 0 || !r.store.Ready(m.Digest) {
		select {
		case <-changed:
		case <-time.After(10 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	checkFlat(t, r, m)
}

func TestLeaseForbidsRemovalAndViewsGoWithTheBytes(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, 2*testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	flat, err := r.puller.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := r.store.AcquireFor(m.Digest, "claim")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.puller.Remove(t.Context(), testRef); !errors.Is(err, ErrLeased) {
		t.Errorf("Remove of a leased artifact: %v, want ErrLeased", err)
	}
	lease.Release()
	lease.Release()
	other := testRef
	other.Revision = "other"
	if _, err := r.puller.Ensure(t.Context(), other, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if !r.store.Ready(m.Digest) {
		t.Error("an artifact that another ref means was removed")
	}
	if err := r.puller.Remove(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(flat); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the view is still there: %v", err)
	}
	if u, err := r.store.Usage(); err != nil || u.Used != 0 || u.Reserved != 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	if err := r.puller.Remove(t.Context(), other); !errors.Is(err, ErrUnknown) {
		t.Errorf("Remove of nothing: %v, want ErrUnknown", err)
	}
}

func TestPullEvictsTheLeastRecentlyUsedThatNothingHolds(t *testing.T) {
	t.Parallel()
	sources := map[string]*memSource{}
	now := time.Unix(1e9, 0)
	r := &rig{fs: durable.OS, dir: t.TempDir()}
	var rules []Rule
	for i, name := range []string{"a", "b", "c", "d"} {
		s := newMemSource(map[string][]byte{"m.safetensors": tensorFile("x", 1<<20, uint64(i))})
		s.name = name
		sources[name] = s
		rules = append(rules, Rule{Source: s, Refs: []string{"acme/" + name}})
	}
	r.open(t, func(o *Options, p *PullerOptions) {
		o.Budget = 2*units.MiB + 600*units.KiB
		o.Now = func() time.Time { return now }
		p.Sources = rules
	})
	pull := func(name string) (*artifact.Manifest, error) {
		now = now.Add(time.Hour)
		return r.puller.Ensure(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/" + name, Revision: "main"}, EnsureOptions{})
	}
	ma, errA := pull("a")
	mb, errB := pull("b")
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour)
	lease, err := r.store.Acquire(ma.Digest) // a is now the more recently used
	if err != nil {
		t.Fatal(err)
	}
	mc, err := pull("c")
	if err != nil {
		t.Fatal(err)
	}
	if !r.store.Ready(ma.Digest) || r.store.Ready(mb.Digest) || !r.store.Ready(mc.Digest) {
		t.Error("want b evicted, a and c Ready")
	}
	if st, found := r.puller.Status(mb.Ref); !found || st.State != Absent {
		t.Errorf("evicted ref has state %s, want Absent and still pinned", st.State)
	}
	second, err := r.store.Acquire(mc.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pull("d"); !errors.Is(err, ErrNoSpace) {
		t.Errorf("pull with everything leased: %v, want ErrNoSpace", err)
	}
	lease.Release()
	second.Release()
	if _, err := pull("d"); err != nil {
		t.Errorf("pull after the leases ended: %v", err)
	}
}

func TestEvictionCountsAFileSharedByTwoArtifactsOnce(t *testing.T) {
	t.Parallel()
	d := func(b byte) artifact.Digest { return artifact.Digest{b} }
	sizes := map[artifact.Digest]int64{d(1): 10, d(2): 5, d(3): 5, d(4): 1, d(5): 9}
	// An artifact that may not be evicted uses file 5 too.
	users := map[artifact.Digest]int{d(1): 2, d(2): 1, d(3): 1, d(4): 1, d(5): 2}
	candidates := func() []candidate {
		return []candidate{
			{digest: d(100), lastUsed: 2, files: []artifact.Digest{d(1), d(2)}},
			{digest: d(101), lastUsed: 1, files: []artifact.Digest{d(1), d(3)}},
			{digest: d(102), lastUsed: 9, superseded: true, files: []artifact.Digest{d(4)}},
			{digest: d(103), lastUsed: 0, files: []artifact.Digest{d(5)}},
		}
	}
	plan, enough := planEviction(candidates(), sizes, users, 6)
	if !enough || !slices.Equal(plan, []artifact.Digest{d(102), d(101)}) {
		t.Errorf("plan %v, %v", plan, enough)
	}
	plan, enough = planEviction(candidates(), sizes, users, 7)
	if !enough || len(plan) != 3 {
		t.Errorf("plan %v, %v", plan, enough)
	}
	if plan, enough := planEviction(candidates(), sizes, users, 22); enough {
		t.Errorf("plan %v frees more than there is", plan)
	}
}

func TestHubViewIsACompleteCacheThatAnyUserMayRead(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, testSegment))
	src.noSHA["config.json"] = true
	r := newRig(t, src)
	ref := testRef
	ref.Revision = "pr/1"
	m, err := r.puller.Ensure(t.Context(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	root, err := r.puller.HubView(m)
	if err != nil {
		t.Fatal(err)
	}
	repo := filepath.Join(root, "models--acme--tiny")
	commit, err := os.ReadFile(filepath.Join(repo, "refs/pr/1"))
	if err != nil || string(commit) != src.commit {
		t.Errorf("refs/pr/1 holds %q, %v", commit, err)
	}
	link, err := os.Readlink(filepath.Join(repo, "snapshots", src.commit, "sub/template.json"))
	if err != nil || link != "../../../blobs/"+gitSHA1(src.files["sub/template.json"]) {
		t.Errorf("link %q, %v", link, err)
	}
	shard, _ := m.File("model-00001-of-00002.safetensors")
	if _, err := os.Stat(filepath.Join(repo, "blobs", shard.SHA256.String())); err != nil {
		t.Errorf("a weights blob is not named by its sha256: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(repo, "trees", src.commit+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var tree struct {
		Version int                       `json:"format_version"`
		Files   map[string]map[string]any `json:"files"`
	}
	if err := json.Unmarshal(data, &tree); err != nil || tree.Version != 1 || len(tree.Files) != len(m.Files) {
		t.Errorf("tree %s, %v", data, err)
	}
	if e := tree.Files[shard.Path]; e["lfs_sha256"] != shard.SHA256.String() || e["lfs_size"] != float64(shard.Size) || e["blob_id"] != shard.GitSHA1 {
		t.Errorf("tree entry %v", e)
	}
	if e := tree.Files["config.json"]; len(e) != 2 || e["blob_id"] != gitSHA1(src.files["config.json"]) {
		t.Errorf("tree entry %v", e)
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o444)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			return nil
		case d.IsDir():
			want = 0o755
		case !strings.Contains(path, "/blobs/"):
			want = 0o644
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode().Perm(), want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.HubView(&artifact.Manifest{Ref: artifact.Ref{Scheme: artifact.SchemeDir, Name: "/x"}}); !errors.Is(err, artifact.ErrInvalid) {
		t.Errorf("hub view of a dir ref: %v", err)
	}
}

func TestStoreOfANewerVersionOrAnotherOwnerIsLeftUntouched(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := Open(Options{Dir: dir + "/w"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir + "/w"}); !errors.Is(err, durable.ErrLocked) {
		t.Errorf("second open: %v, want ErrLocked", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/w/FORMAT", []byte("hearth weightcache 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/w/landing/new-thing", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir + "/w"}); !errors.Is(err, ErrNewer) {
		t.Errorf("open of a newer store: %v, want ErrNewer", err)
	}
	if _, err := os.Stat(dir + "/w/landing/new-thing"); err != nil {
		t.Errorf("a newer store was changed: %v", err)
	}
	if err := os.MkdirAll(dir+"/home/photos", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir + "/home"}); err == nil || !strings.Contains(err.Error(), "photos") {
		t.Errorf("open of somebody's directory: %v", err)
	}
}

func TestBadRecordIsQuarantinedAndTheStoreOpens(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	path := r.store.recordPath(testRef)
	if err := os.WriteFile(path, []byte("{broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.reopen(t)
	if len(r.puller.List()) != 0 {
		t.Error("a broken record was believed")
	}
	kept, err := os.ReadDir(r.store.path(quarantineDir))
	if err != nil || len(kept) != 1 {
		t.Errorf("%d files in quarantine, %v", len(kept), err)
	}
	if again := r.ensure(t); again.Digest != m.Digest {
		t.Error("another artifact came of the same source")
	}
}

func TestChunkListsOfCommittedFilesProveThem(t *testing.T) {
	t.Parallel()
	src := newMemSource(map[string][]byte{"m.safetensors": tensorFile("x", artifact.ChunkSize+100, 1)})
	r := newRig(t, src, func(_ *Options, p *PullerOptions) { p.SegmentSize = 8 * units.MiB })
	m := r.ensure(t)
	f := m.Files[0]
	chunks, err := r.store.Chunks(f.SHA256)
	if err != nil || len(chunks) != 2 {
		t.Fatalf("%d chunks, %v", len(chunks), err)
	}
	data := src.files["m.safetensors"]
	for i := range chunks {
		piece := data[i*artifact.ChunkSize : min(len(data), (i+1)*artifact.ChunkSize)]
		if err := artifact.CheckChunk(chunks, f.Size, i, piece); err != nil {
			t.Error(err)
		}
	}
}

func TestStateFollowsFromFacts(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for _, c := range []struct {
		facts stateFacts
		want  State
	}{
		{stateFacts{}, Absent},
		{stateFacts{pulling: true}, Resolving},
		{stateFacts{pulling: true, metadata: true, present: 5}, Metadata},
		{stateFacts{pulling: true, metadata: true, present: 5, weights: 1}, Filling},
		{stateFacts{pulling: true, metadata: true, complete: true, present: 9, weights: 4}, Verifying},
		{stateFacts{complete: true, checked: true, metadata: true, present: 9, weights: 4}, Ready},
		{stateFacts{complete: true, checked: true, failed: boom}, Ready},
		{stateFacts{checked: true, metadata: true, damaged: []string{"x"}, pulling: true}, Suspect},
		{stateFacts{failed: boom, present: 3}, Failed},
		{stateFacts{evicting: true, complete: true, checked: true}, Evicting},
	} {
		if got, _ := c.facts.state(); got != c.want {
			t.Errorf("state of %+v is %s, want %s", c.facts, got, c.want)
		}
	}
}

func FuzzDecodeBits(f *testing.F) {
	sha := artifact.Digest{1}
	l := &landing{s: &Store{}, sha: sha, size: 5 * testSegment, segment: testSegment}
	l.setUp()
	f.Add(l.encodeBits())
	f.Add([]byte(bitsMagicV1))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := decodeBits(data, sha, l.size)
		if err == nil && int64(len(b.written)) != (l.size+b.segment-1)/b.segment {
			t.Errorf("%d segments of %d bytes", len(b.written), b.segment)
		}
		for i, n := range b.written {
			if n < 0 || n > min(b.segment, l.size-int64(i)*b.segment) {
				t.Errorf("segment %d has %d bytes", i, n)
			}
		}
	})
}
