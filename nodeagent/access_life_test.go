package nodeagent_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// away puts a switch before an origin: while it is on, the origin answers 503.
func away(t *testing.T, url string) (string, *atomic.Bool) {
	t.Helper()
	var off atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if off.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		request, err := http.NewRequestWithContext(r.Context(), r.Method, url+r.URL.RequestURI(), nil)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		request.Header = r.Header
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer func() { _ = response.Body.Close() }()
		maps.Copy(w.Header(), response.Header)
		w.WriteHeader(response.StatusCode)
		_, _ = io.Copy(w, response.Body)
	}))
	t.Cleanup(server.Close)
	return server.URL, &off
}

const (
	gatedFile   = "/org/gated/resolve/main/config.json"
	privateFile = "/org/private/resolve/main/config.json"
	openFile    = "/org/open/resolve/main/config.json"
)

func TestWithTheOriginAwayWhoWasAdmittedStaysAndNobodyGetsAServerError(t *testing.T) {
	t.Parallel()
	origin, url := newGuardedOrigin(t)
	front, off := away(t, url)
	c := newGuardedConfig(t, front)
	// Every request asks the source again, and what it said stands in between.
	c.Access.AcceptedFor, c.Access.RefusedFor = 1, 1
	log := &buffer{}
	r := runWith(t, c, nodeagent.Options{Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	base := "http://" + r.Listeners()["mirror"]
	expect := func(when, token, path, want string) {
		t.Helper()
		if got := (caller{token: token}).reply(t, base, "GET", path); got != want {
			t.Errorf("%s, %q asks for %s: %s, want %s", when, token, path, got, want)
		}
	}
	for _, path := range []string{openFile, gatedFile, privateFile} {
		expect("at first", aliceToken, path, "200")
	}
	expect("at first", bobToken, gatedFile, "403 GatedRepo")
	off.Store(true)
	for _, path := range []string{openFile, gatedFile, privateFile} {
		expect("with the origin away", aliceToken, path, "200")
		expect("with the origin away", labToken, path, "200")
	}
	for _, token := range []string{bobToken, malloryToken} {
		expect("with the origin away", token, openFile, "200")
		expect("with the origin away", token, gatedFile, "404 Unavailable")
		expect("with the origin away", token, privateFile, "404 Unavailable")
	}
	expect("with the origin away", "", gatedFile, "401 GatedRepo")
	expect("with the origin away", "", privateFile, "404 RepoNotFound")
	off.Store(false)
	origin.RemoveToken(aliceToken)
	// A yes stands for some seconds after a question without an answer; a commit
	// that was not asked for meanwhile is judged at once.
	commit, err := origin.Commit("org/gated", "main")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	revoked := "/org/gated/resolve/" + commit + "/config.json"
	for (caller{token: aliceToken}).reply(t, base, "GET", revoked) != "403 GatedRepo" {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatal("a revoked token is still accepted")
		}
	}
	r.stop()
	for _, secret := range secrets {
		if strings.Contains(log.String(), secret) {
			t.Errorf("the log holds token %q", secret)
		}
	}
}

func TestAHundredRequestsOfOneTokenAskTheOriginOnce(t *testing.T) {
	t.Parallel()
	l := newListener(t, "127.0.0.1:0", false, nil)
	before := caller{token: labToken} // what all ask for is on the node
	if got := before.reply(t, l.base, "GET", gatedFile); got != "200" {
		t.Fatal(got)
	}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			path := []string{gatedFile, "/api/models/org/gated/tree/main", "/api/models/org/gated/refs"}[i%3]
			if got := (caller{token: aliceToken}).reply(t, l.base, "GET", path); got != "200" {
				t.Errorf("%s: %s", path, got)
			}
		})
	}
	all.Wait()
	// One question: of the repository, and of a file at the commit.
	if n := l.origin.Asked(aliceToken); n != 2 {
		t.Errorf("the origin saw the token %d times, want 2", n)
	}
}

func TestTheAgentPullsWithItsOwnCredentialWhoeverAsks(t *testing.T) {
	t.Parallel()
	l := newListener(t, "127.0.0.1:0", false, nil)
	if got := (caller{token: aliceToken}).reply(t, l.base, "GET", "/org/private/resolve/main/model-00001-of-00002.safetensors"); got != "200" {
		t.Fatal(got)
	}
	if n := l.origin.Asked(aliceToken); n != 2 {
		t.Errorf("the origin saw the caller's token %d times, want 2: the question alone", n)
	}
	if n := l.origin.Asked(agentToken); n < 4 {
		t.Errorf("the origin saw the agent's token %d times", n)
	}
}

// toVersionOne writes the records of a stopped agent as a release before access
// was recorded wrote them.
func toVersionOne(t *testing.T, dir string) {
	t.Helper()
	records, err := filepath.Glob(filepath.Join(dir, "refs", "*.json"))
	if err != nil || len(records) == 0 {
		t.Fatalf("records %v, %v", records, err)
	}
	for _, path := range records {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]json.RawMessage
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		delete(m, "access")
		m["version"] = json.RawMessage("1")
		if text, err = json.Marshal(m); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRecordsOfBeforeAreRestrictedUntilTheirSourceTells(t *testing.T) {
	t.Parallel()
	_, url := newGuardedOrigin(t)
	front, off := away(t, url)
	c := newGuardedConfig(t, front)
	r := run(t, c)
	for _, name := range []string{"open", "gated"} {
		if _, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: "hub://org/" + name}, nil); err != nil {
			t.Fatal(err)
		}
	}
	r.stop()
	toVersionOne(t, c.Weights.Dir)
	off.Store(true)
	r = run(t, c)
	model := func(name string) admin.Model {
		t.Helper()
		m, err := r.client.Model(t.Context(), "hub://org/"+name+"@main")
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for _, name := range []string{"open", "gated"} {
		if m := model(name); m.Access != "" || len(m.Views) > 0 || m.NoViews == "" || m.State != "Ready" {
			t.Errorf("with the origin away %s is %+v", name, m)
		}
		if got := (caller{}).reply(t, "http://"+r.Listeners()["mirror"], "GET", "/org/"+name+"/resolve/main/config.json"); got != "404 RepoNotFound" {
			t.Errorf("with the origin away %s gives %s", name, got)
		}
	}
	r.stop()
	off.Store(false)
	r = run(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		open, gated := model("open"), model("gated")
		if open.Access == "open" && len(open.Views) == 2 && gated.Access == "gated" {
			if len(gated.Views) > 0 {
				t.Errorf("views of a gated model: %v", gated.Views)
			}
			break
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("still %+v and %+v", open, gated)
		}
	}
	base := "http://" + r.Listeners()["mirror"]
	if got := (caller{}).reply(t, base, "GET", openFile); got != "200" {
		t.Error(got)
	}
	if got := (caller{}).reply(t, base, "GET", gatedFile); got != "401 GatedRepo" {
		t.Error(got)
	}
}

func TestARepositoryThatIsClosedLaterIsClosedHereAtTheNextPull(t *testing.T) {
	t.Parallel()
	origin, url := newGuardedOrigin(t)
	r := run(t, newGuardedConfig(t, url))
	pull := func() admin.Model {
		t.Helper()
		m, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: "hub://org/open", Refresh: true}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	before := pull()
	if len(before.Views) != 2 {
		t.Fatalf("%+v", before)
	}
	origin.SetGated("org/open", "org/gated")
	if m := pull(); m.Access != "gated" || len(m.Views) > 0 || m.NoViews == "" {
		t.Errorf("%+v", m)
	}
	for _, dir := range before.Views {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s still stands: %v", dir, err)
		}
	}
	base := "http://" + r.Listeners()["mirror"]
	if got := (caller{}).reply(t, base, "GET", openFile); got != "401 GatedRepo" {
		t.Error(got)
	}
	if got := (caller{token: aliceToken}).reply(t, base, "GET", openFile); got != "200" {
		t.Error(got)
	}
	origin.SetGated()
	if m := pull(); m.Access != "open" || len(m.Views) != 2 {
		t.Errorf("open again: %+v", m)
	}
}

func TestATokenInAFileIsReadAgainWhenItChanges(t *testing.T) {
	t.Parallel()
	var file string
	l := newListener(t, "127.0.0.1:0", false, func(c *nodeagent.Config) { file = c.Access.Tokens[1].File })
	reply := func(token string) string { return caller{token: token}.reply(t, l.base, "GET", gatedFile) }
	if got := reply(labToken); got != "200" {
		t.Fatal(got)
	}
	if err := os.WriteFile(file, []byte("another_secret_of_lab\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for reply("another_secret_of_lab") != "200" || reply(labToken) != "403 GatedRepo" {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatal("the file's new token is not taken")
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	for reply("another_secret_of_lab") != "403 GatedRepo" {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatal("a token without its file is still taken")
		}
	}
}

func TestTheConfigurationOfAccessIsChecked(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("ab", 32)
	for want, change := range map[string]func(*nodeagent.Access){
		"access.tokens[0].name": func(a *nodeagent.Access) { a.Tokens = []nodeagent.Token{{Name: "a b", SHA256: sum}} },
		"access.tokens[1].name": func(a *nodeagent.Access) {
			a.Tokens = []nodeagent.Token{{Name: "a", SHA256: sum}, {Name: "a", SHA256: sum}}
		},
		"access.tokens[0]:":       func(a *nodeagent.Access) { a.Tokens = []nodeagent.Token{{Name: "a", SHA256: sum, File: "/x"}} },
		"access.tokens[0].sha256": func(a *nodeagent.Access) { a.Tokens = []nodeagent.Token{{Name: "a", SHA256: "hub_plain_secret"}} },
		"access.tokens[0].file":   func(a *nodeagent.Access) { a.Tokens = []nodeagent.Token{{Name: "a", File: "x"}} },
		"access.grants[0].who[0]": func(a *nodeagent.Access) {
			a.Grants = []nodeagent.Grant{{Who: []string{"token/none"}, Refs: []string{"a/*"}}}
		},
		"access.grants[0].who[1]": func(a *nodeagent.Access) {
			a.Grants = []nodeagent.Grant{{Who: []string{"any", "client/"}, Refs: []string{"a/*"}}}
		},
		"access.grants[0].refs":    func(a *nodeagent.Access) { a.Grants = []nodeagent.Grant{{Who: []string{"any"}}} },
		"access.grants[0].refs[0]": func(a *nodeagent.Access) { a.Grants = []nodeagent.Grant{{Who: []string{"any"}, Refs: []string{"["}}} },
		"access.grants[0]:":        func(a *nodeagent.Access) { a.Grants = []nodeagent.Grant{{Refs: []string{"a/*"}}} },
		"access.acceptedFor":       func(a *nodeagent.Access) { a.AcceptedFor = 0 },
		"access.refusedFor":        func(a *nodeagent.Access) { a.RefusedFor = 0 },
		"access.staleFor":          func(a *nodeagent.Access) { a.StaleFor = units.Duration(time.Second) },
	} {
		c := newConfig(t, "http://127.0.0.1:1")
		change(&c.Access)
		err := c.Validate()
		if err == nil || !strings.Contains(err.Error()+" ", want) {
			t.Errorf("%s: %v", want, err)
		}
		if err != nil && strings.Contains(err.Error(), "hub_plain_secret") {
			t.Errorf("the error repeats what may be a secret: %v", err)
		}
	}
}
