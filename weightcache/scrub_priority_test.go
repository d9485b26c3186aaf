package weightcache

import (
	"io/fs"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// priorityFS notes what its calls are done with: the thread's I/O class and its
// niceness.
type priorityFS struct {
	durable.FS
	mu    sync.Mutex
	seen  map[string][]bool // by call: whether its I/O gives way to everyone's
	niced bool              // a thread gave way to others on the processors
}

func (p *priorityFS) note(call string) {
	class, _, _ := syscall.Syscall(syscall.SYS_IOPRIO_GET, ioprioWhoProcess, 0, 0)
	thread, _ := unix.Getpriority(unix.PRIO_PROCESS, unix.Gettid())
	process, _ := unix.Getpriority(unix.PRIO_PROCESS, os.Getpid())
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[call] = append(p.seen[call], class&ioprioIdle == ioprioIdle)
	p.niced = p.niced || thread < process // the kernel tells 20 less the niceness
}

func (p *priorityFS) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	p.note("open")
	f, err := p.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &priorityFile{f, p}, nil
}

func (p *priorityFS) Rename(from, to string) error {
	p.note("rename")
	return p.FS.Rename(from, to)
}

type priorityFile struct {
	durable.File
	fs *priorityFS
}

func (f *priorityFile) Read(b []byte) (int, error) {
	f.fs.note("read")
	return f.File.Read(b)
}

func TestOnlyTheReadsOfAScrubGiveWayAndThoseOfAVerificationDoNot(t *testing.T) {
	t.Parallel()
	fsys := &priorityFS{FS: durable.OS, seen: map[string][]bool{}}
	src := newMemSource(map[string][]byte{"m.safetensors": tensorFile("x", artifact.ChunkSize+100, 1)})
	r := newRig(t, src, func(o *Options, p *PullerOptions) { o.FS, p.SegmentSize = fsys, 8<<20 })
	m := r.ensure(t)
	for name, c := range map[string]struct {
		idle  bool
		check func() error
	}{
		"scrub": {true, func() error {
			_, err := r.puller.checkFile(t.Context(), m.Files[0].SHA256, NewLimiter(0), idly)
			return err
		}},
		"verification": {false, func() error { _, err := r.puller.Verify(t.Context(), testRef); return err }},
	} {
		// Its chunk list is missing: there is something to write after the reading.
		if err := os.Remove(r.store.chunksPath(m.Files[0].SHA256)); err != nil {
			t.Fatal(err)
		}
		fsys.mu.Lock()
		fsys.seen, fsys.niced = map[string][]bool{}, false
		fsys.mu.Unlock()
		if err := c.check(); err != nil {
			t.Fatal(err)
		}
		fsys.mu.Lock()
		seen, niced := fsys.seen, fsys.niced
		fsys.mu.Unlock()
		for _, call := range []string{"open", "read", "rename"} {
			if len(seen[call]) == 0 || slices.Contains(seen[call], !(c.idle && call == "read")) {
				t.Errorf("%s: its calls of %s give way: %v", name, call, seen[call])
			}
		}
		if niced {
			t.Errorf("%s: a thread gives way on the processors", name)
		}
	}
}
