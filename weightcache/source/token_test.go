package source_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/source"
)

func TestATokenFileThatCannotBeReadNowIsNoRefusal(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the hub was asked without the token")
	}))
	t.Cleanup(server.Close)
	for _, c := range []struct {
		file    string
		refused bool
	}{
		{"/proc/self/mem", false}, // opens, and reads as EIO
		{filepath.Join(t.TempDir(), "none"), true},
		{t.TempDir(), true},
	} {
		h, err := source.NewHub(source.HubOptions{Name: "test-hub", URL: server.URL, TokenFile: c.file})
		if err != nil {
			t.Fatal(err)
		}
		_, err = h.Resolve(t.Context(), tinyRef)
		if errors.Is(err, source.ErrUnauthorized) != c.refused || errors.Is(err, source.ErrUnavailable) == c.refused {
			t.Errorf("token file %s: %v", c.file, err)
		}
		h.Close()
	}
}
