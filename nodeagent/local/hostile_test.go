package local_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// client speaks to a socket as anybody could.
func client(t *testing.T, socket string) *http.Client {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// ask makes one call and gives status and code of its answer.
func ask(t *testing.T, c *http.Client, method, path, version, body string) (status int, code string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "http://data"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if version != "" {
		request.Header.Set(local.VersionHeader, version)
	}
	response, err := c.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.Header.Get(local.VersionHeader) != local.Version {
		t.Errorf("%s %s: the answer names no version", method, path)
	}
	var answer struct {
		Error struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	data, err := io.ReadAll(response.Body)
	if err := errors.Join(err, json.Unmarshal(data, &answer)); err != nil {
		t.Fatalf("%s %s gave %q: %v", method, path, data, err)
	}
	if len(answer.Error.Message) > 20<<10 {
		t.Errorf("%s %s: a message of %d bytes", method, path, len(answer.Error.Message))
	}
	return response.StatusCode, answer.Error.Code
}

func TestHostileCallsOnTheSocketAreRefusedByCode(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	n := newNode(t, url, true, nil)
	c := client(t, n.socket)
	long := strings.Repeat("x", 70<<10)
	for _, call := range []struct {
		method, path, version, body string
		status                      int
		code                        string
	}{
		{"POST", "hold", "", `{}`, 400, "invalid"},
		{"POST", "hold", "2", `{}`, 400, "invalid"},
		{"POST", "hold", long[:2000], `{}`, 400, "invalid"},
		{"POST", "hold", "1", ``, 400, "invalid"},
		{"POST", "hold", "1", `{"digest":"00","claim":"a"}`, 400, "invalid"},
		{"POST", "hold", "1", `{"claim":"a"}`, 409, "not_ready"},
		{"POST", "hold", "1", `{"claim":"../../etc"}`, 400, "invalid"},
		{"POST", "hold", "1", `{"claim":"a","force":true}`, 400, "invalid"},
		{"POST", "hold", "1", `{"claim":"a"}{"claim":"b"}`, 400, "invalid"},
		{"POST", "hold", "1", `{"claim":"` + long + `"}`, 400, "invalid"},
		{"POST", "pull", "1", `{"claim":"a"}`, 400, "invalid"},
		{"POST", "pull", "1", `{"claim":"a","ref":"file:///etc/passwd"}`, 400, "invalid"},
		{"POST", "pull", "1", `{"claim":"","ref":"hub://org/cold"}`, 400, "invalid"},
		{"POST", "lend", "1", `{"holders":{"":"` + strings.Repeat("0", 64) + `"}}`, 400, "invalid"},
		{"POST", "lend", "1", `{"holders":{"` + long[:400] + `":"` + strings.Repeat("0", 64) + `"}}`, 400, "invalid"},
		{"POST", "kv/reserve", "1", `{"claim":"a","namespace":"n","memory":"-1GiB"}`, 400, "invalid"},
		{"POST", "kv/reserve", "1", `{"claim":"a","namespace":"n","memory":"1GiB"}`, 507, "no_space"},
		{"POST", "kv/release", "1", `{"claim":"a/b"}`, 400, "invalid"},
		{"GET", "hold", "1", ``, 404, "invalid"},
		{"POST", "evict", "1", `{}`, 404, "invalid"},
	} {
		status, code := ask(t, c, call.method, local.Prefix+call.path, call.version, call.body)
		if status != call.status || code != call.code {
			t.Errorf("%s %s %.60q gave %d %s, want %d %s", call.method, call.path, call.body, status, code, call.status, call.code)
		}
	}
	if claims, err := n.data.Cache().Holds(t.Context()); err != nil || len(claims) != 0 {
		t.Errorf("after all that %v hold something, %v", claims, err)
	}
}

func TestStreamsOfStateAreBounded(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	n := newNode(t, url, true, nil)
	c := client(t, n.socket)
	open := func() int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://data"+local.Prefix+"state", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(local.VersionHeader, local.Version)
		response, err := c.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = response.Body.Close() })
		return response.StatusCode
	}
	for i := range 3 { // the control role has one
		if status := open(); status != http.StatusOK {
			t.Errorf("stream %d gave %d", i, status)
		}
	}
	if status := open(); status != http.StatusServiceUnavailable {
		t.Errorf("a stream past the limit gave %d", status)
	}
	if _, ok := n.data.Snapshot(); !ok {
		t.Error("the control role lost its stream")
	}
}

// answering serves something on a socket that is no data role.
func answering(t *testing.T, handler http.HandlerFunc) *local.Remote {
	t.Helper()
	n := &node{t: t}
	dir := socketDir(t)
	listener, err := identity.ListenSocket(t.Context(), dir+"/data.sock")
	n.must(err)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	remote := local.NewRemote(local.DialOptions{Socket: dir + "/data.sock"})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- remote.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return remote
}

func TestNoAnswerOfAnotherProgramIsTakenForAState(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]http.HandlerFunc{
		"AnotherProgram":      func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"epoch":1}`+"\n") },
		"AnotherVersion":      version("2", `{"epoch":1}`+"\n"),
		"NoJSON":              version("1", "hello\n"),
		"NoLineThatSaysWhich": version("1", "{}\n"),
		"ALineWithoutEnd": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(local.VersionHeader, local.Version)
			for range 65 {
				if _, err := io.WriteString(w, strings.Repeat(" ", 1<<20)); err != nil || r.Context().Err() != nil {
					return
				}
			}
		},
		"NothingAtAll": func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked := make(chan struct{}, 1000)
			remote := answering(t, func(w http.ResponseWriter, r *http.Request) {
				select {
				case asked <- struct{}{}:
				default:
				}
				handler(w, r)
			})
			for range 3 { // it tries again, so that one answer at least was read
				<-asked
			}
			if state, ok := remote.Snapshot(); ok || state.Epoch != 0 {
				t.Errorf("the state is %+v", state)
			}
			if _, ok := remote.Cache().Weights(); ok {
				t.Error("weights are told")
			}
			if _, ok := remote.KV().Space(); ok {
				t.Error("KV space is told")
			}
			if _, err := remote.Down(); err == nil {
				t.Error("nothing is said to be wrong")
			}
			if err := remote.Cache().Release(t.Context(), "a"); !errors.Is(err, stock.ErrUnavailable) && name != "NoLineThatSaysWhich" {
				t.Errorf("a call gave %v, want ErrUnavailable", err)
			}
		})
	}
}

func version(v, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(local.VersionHeader, v)
		_, _ = io.WriteString(w, body)
	}
}

func TestADataRoleThatHangsHoldsNoCallForLong(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	remote := answering(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-left:
		}
	})
	t.Cleanup(func() { close(left) })
	for name, call := range map[string]func() error{
		"release":    func() error { return remote.Cache().Release(t.Context(), "a") },
		"kv release": func() error { return remote.KV().Release(t.Context(), "a") },
		"hold":       func() error { _, err := remote.Cache().Hold(t.Context(), artifact.Digest{1}, "a"); return err },
	} {
		begun := time.Now()
		if err := call(); !errors.Is(err, stock.ErrUnavailable) || time.Since(begun) > patience/2 {
			t.Errorf("%s gave %v after %v, want ErrUnavailable soon", name, err, time.Since(begun))
		}
	}
}

func TestWithoutADataRoleEveryCallFailsAtOnceAndTheLastStateStands(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	n := newNode(t, url, true, nil)
	n.warm("warm")
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	watcher := local.NewRemote(local.DialOptions{Socket: n.socket})
	done := make(chan error, 1)
	go func() { done <- watcher.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	n.until("the warm model", func() bool {
		w, ok := watcher.Cache().Weights()
		return ok && len(w.Artifacts) == 1
	})
	n.stop()
	n.until("the loss to be seen", func() bool { _, ok := watcher.Snapshot(); return !ok })
	if state, _ := watcher.Snapshot(); len(state.Models) != 1 {
		t.Errorf("the last state is %+v", state)
	}
	if w, ok := watcher.Cache().Weights(); ok || len(w.Artifacts) != 1 {
		t.Errorf("the last weights are %+v, %v", w, ok)
	}
	for name, call := range map[string]func() error{
		"hold":         func() error { _, err := watcher.Cache().Hold(t.Context(), artifact.Digest{1}, "a"); return err },
		"pull":         func() error { _, err := watcher.Cache().Pull(t.Context(), refOf("cold"), "a"); return err },
		"release":      func() error { return watcher.Cache().Release(t.Context(), "a") },
		"holds":        func() error { _, err := watcher.Cache().Holds(t.Context()); return err },
		"reserve":      func() error { _, err := watcher.KV().Reserve(t.Context(), stock.Reservation{}); return err },
		"kv release":   func() error { return watcher.KV().Release(t.Context(), "a") },
		"reservations": func() error { _, err := watcher.KV().Reservations(t.Context()); return err },
		"lend":         func() error { _, err := watcher.Lend(t.Context(), nil); return err },
	} {
		if err := call(); !errors.Is(err, stock.ErrUnavailable) {
			t.Errorf("%s gave %v, want ErrUnavailable", name, err)
		}
	}
	n.start()
	n.until("the data role to be seen again", func() bool { _, ok := watcher.Snapshot(); return ok })
}
