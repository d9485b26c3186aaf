package cli

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
)

func TestStatusShowsANodeWhoseDataRoleHangsOrIsGone(t *testing.T) {
	t.Parallel()
	for _, hangs := range []bool{true, false} {
		dir := shortDir(t)
		socket, dataSocket := filepath.Join(dir, "a.sock"), filepath.Join(dir, "d.sock")
		if hangs {
			// It takes connections and answers nothing, as a process that is stopped.
			listener, err := identity.ListenSocket(t.Context(), dataSocket)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = listener.Close() }()
		}
		mux := http.NewServeMux()
		for path, body := range map[string]string{
			"/v1/node":      `{"name": "node-1", "roles": ["control"]}`,
			"/v1/endpoints": `{"endpoints": []}`,
			"/v1/devices":   `{"devices": [{"id": "gpu-0", "health": "healthy"}]}`,
		} {
			mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, body)
			})
		}
		mux.Handle("/v1/models", admin.NewPass(dataSocket, nil))
		listener, err := identity.ListenSocket(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Hearth-API", admin.Version)
			mux.ServeHTTP(w, r)
		})}
		done := make(chan error, 1)
		go func() { done <- server.Serve(listener) }()
		for _, command := range []string{"status", "nodes"} {
			out, said, code := hearth(t, command, "--socket", socket)
			if code != 0 || !strings.Contains(out, "node-1") || !strings.Contains(out, "gpu-0") == (command == "nodes") {
				t.Errorf("%s with a data role that hangs (%t) ended with %d: %s%s", command, hangs, code, out, said)
			}
			if command == "status" && !strings.Contains(out, "its models are not known: ") {
				t.Errorf("it does not say what is wrong: %s", out)
			}
		}
		out, _, code := hearth(t, "status", "--json", "--socket", socket)
		if code != 0 || !strings.Contains(out, `"models": []`) || !strings.Contains(out, "the data role does not answer") {
			t.Errorf("with a data role that hangs (%t) it ended with %d: %s", hangs, code, out)
		}
		_ = server.Close()
		if err := <-done; err == nil {
			t.Error("the agent's listener ended by itself")
		}
	}
}
