package fakekubelet_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hearth-dev/hearth/dradriver"
)

// again waits until the driver is served and registers it anew.
func (r *running) again(t *testing.T, m *machine) {
	t.Helper()
	if err := r.kubelet.Close(); err != nil {
		t.Error(err)
	}
	r.kubelet = m.register(t)
	until(t, "the driver to see its registration", func() bool { ok, _ := r.Registered(); return ok })
}

func TestTheSocketsComeBackWhateverIsRemoved(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(dir string) error{
		"registration socket": func(dir string) error { return os.Remove(filepath.Join(dir, "reg", dradriver.Name+"-reg.sock")) },
		"plugin's socket":     func(dir string) error { return os.Remove(filepath.Join(dir, "plugin", "dra.sock")) },
		"plugin's folder": func(dir string) error {
			// A folder that is not there yet is no folder removed.
			if err := os.Remove(filepath.Join(dir, "plugin", "dra.sock")); err != nil {
				return err
			}
			return os.RemoveAll(filepath.Join(dir, "plugin"))
		},
		"what is in plugins_registry": func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, "reg")), os.Mkdir(filepath.Join(dir, "reg"), 0o755))
		},
		"both folders, one moved away": func(dir string) error {
			return errors.Join(os.Rename(filepath.Join(dir, "reg"), filepath.Join(dir, "old")), os.Mkdir(filepath.Join(dir, "reg"), 0o755), os.RemoveAll(filepath.Join(dir, "plugin")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			r := m.start(t)
			c := full("a")
			m.api.Put(c)
			prepared(t, r.kubelet, c)
			for range 2 { // what is served anew is watched as well
				// After a call of the kubelet that took too long a socket is made anew once more.
				until(t, "something to remove", func() bool {
					err := remove(m.dir)
					if err != nil && !errors.Is(err, fs.ErrNotExist) {
						t.Fatal(err)
					}
					return err == nil
				})
				if err := os.RemoveAll(filepath.Join(m.dir, "old")); err != nil {
					t.Fatal(err)
				}
				until(t, "the driver to see that it is not registered", func() bool { ok, why := r.Registered(); return !ok && why != "" })
				r.again(t, m)
			}
			// A kubelet that finds no socket asks again: it may be on its way once more.
			until(t, "the driver to be reached", func() bool {
				_, err := r.kubelet.Prepare(t.Context(), named(c))
				return status.Code(err) != codes.Unavailable
			})
			prepared(t, r.kubelet, c)
			unprepared(t, r.kubelet, c)
			m.wantNothingLeft(t, r.ledger)
			r.stop()
			for _, socket := range []string{"reg/" + dradriver.Name + "-reg.sock", "plugin/dra.sock"} {
				if _, err := os.Lstat(filepath.Join(m.dir, socket)); !os.IsNotExist(err) {
					t.Errorf("%s is left: %v", socket, err)
				}
			}
		})
	}
}

func TestADriverWaitsForTheKubeletsFolderToComeBack(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	r := m.start(t)
	registry := filepath.Join(m.dir, "reg")
	if err := os.RemoveAll(registry); err != nil {
		t.Fatal(err)
	}
	until(t, "the driver to say so", func() bool {
		ok, why := r.Registered()
		return !ok && strings.Contains(why, registry)
	})
	if err := os.Mkdir(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	r.again(t, m)
	c := full("a")
	m.api.Put(c)
	prepared(t, r.kubelet, c)
	unprepared(t, r.kubelet, c)
}

func TestAFolderThatIsGoneUnderItsMountEndsTheDriver(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	registry := filepath.Join(m.dir, "reg")
	open, err := os.Open(registry)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	// A path to an open folder leads to it also when it is removed, as a mount does.
	b, err := m.buildWith(func(o *dradriver.Options) { o.RegistrarDir = fmt.Sprintf("/proc/self/fd/%d", open.Fd()) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.ledger.Close() }()
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { ended <- b.Run(ctx) }()
	kubelet := m.register(t)
	defer func() { _ = kubelet.Close() }()
	if err := os.RemoveAll(registry); err != nil {
		t.Fatal(err)
	}
	if err := within(t, "the driver to end", ended); !errors.Is(err, dradriver.ErrUnmounted) {
		t.Errorf("it ended with %v", err)
	}
}

func TestASecondAgentOfANodeRefusesAndTakesNothingFromTheFirst(t *testing.T) {
	t.Parallel()
	for name, other := range map[string]func(dir string, o *dradriver.Options){
		"the same plugin folder":       func(string, *dradriver.Options) {},
		"a plugin folder of its own":   func(dir string, o *dradriver.Options) { o.PluginDir = filepath.Join(dir, "plugin") },
		"a registry folder of its own": func(dir string, o *dradriver.Options) { o.RegistrarDir = filepath.Join(dir, "reg") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, second := newMachine(t), newMachine(t)
			r := m.start(t)
			c := full("a")
			m.api.Put(c)
			prepared(t, r.kubelet, c)
			// It has stores of its own, and the first one's folders of kubelet and runtime.
			b, err := second.buildWith(func(o *dradriver.Options) {
				o.PluginDir, o.RegistrarDir, o.CDIDir = filepath.Join(m.dir, "plugin"), filepath.Join(m.dir, "reg"), filepath.Join(m.dir, "cdi")
				o.CDI = r.specs
				other(second.dir, o)
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.ledger.Close() }()
			if err := b.Run(t.Context()); !errors.Is(err, dradriver.ErrServed) {
				t.Fatalf("the second driver ended with %v", err)
			}
			if _, err := os.Stat(m.specFile("uid-a")); err != nil {
				t.Errorf("it took the first one's claim: %v", err)
			}
			unprepared(t, r.kubelet, c)
			prepared(t, r.kubelet, c)
			kubelet := m.register(t)
			if err := kubelet.Close(); err != nil {
				t.Error(err)
			}
			if ok, why := r.Registered(); !ok {
				t.Errorf("the first one is not registered any more: %s", why)
			}
			unprepared(t, r.kubelet, c)
		})
	}
}

func TestADriverWhoseNodeAnotherAgentTookMeanwhileEnds(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	b, err := m.build()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.ledger.Close() }()
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { ended <- b.Run(ctx) }()
	kubelet := m.register(t)
	defer func() { _ = kubelet.Close() }()
	// The folders go, and another agent is the first to serve those made again.
	plugin, registry := filepath.Join(m.dir, "plugin"), filepath.Join(m.dir, "reg")
	if err := errors.Join(os.RemoveAll(plugin), os.RemoveAll(registry)); err != nil {
		t.Fatal(err)
	}
	until(t, "the driver to say so", func() bool { ok, why := b.Registered(); return !ok && strings.Contains(why, registry) })
	fresh := filepath.Join(m.dir, "fresh")
	if err := os.Mkdir(fresh, 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(fresh, dradriver.Name+"-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if err := os.Rename(fresh, registry); err != nil {
		t.Fatal(err)
	}
	if err := within(t, "the first driver to end", ended); !errors.Is(err, dradriver.ErrServed) {
		t.Errorf("it ended with %v", err)
	}
}
