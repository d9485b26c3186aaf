package kvtier

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

// Whatever a container puts in the place of its socket, the agent starts and the
// socket is there: else one claim would end the service of all others.
func TestAClaimsSocketTakesItsNameFromWhateverAContainerPutThere(t *testing.T) {
	t.Parallel()
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, put := range map[string]func(path string) error{
		"nothing":           func(string) error { return nil },
		"a file":            func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a link":            func(path string) error { return os.Symlink(outside, path) },
		"a link to nowhere": func(path string) error { return os.Symlink("/nowhere/at/all", path) },
		"a directory":       func(path string) error { return os.Mkdir(path, 0o755) },
		"a full directory":  func(path string) error { return os.MkdirAll(filepath.Join(path, "x", "y"), 0o755) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := Open(Options{Dir: t.TempDir(), Budget: Budget{Memory: units.GiB, NVMe: units.GiB}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			dir, err := s.Reserve(t.Context(), Reservation{Claim: "c1", Namespace: "ns", Memory: units.MiB})
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, SocketName)
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			l, err := s.Listen(t.Context(), "c1")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			c, err := (&net.Dialer{}).DialContext(t.Context(), "unix", path)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
			if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 1 {
				t.Errorf("beside the claim's directory are %v, %v", entries, err)
			}
			if text, err := os.ReadFile(outside); err != nil || string(text) != "kept" {
				t.Errorf("what a link leads to holds %q, %v", text, err)
			}
		})
	}
}
