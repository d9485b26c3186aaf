package nodeagent_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// Tokens of the tests. The agent's is admitted to everything at the origin.
const (
	agentToken    = "hub_agent_secret"
	aliceToken    = "hub_alice_secret"   // has an account, admitted
	bobToken      = "hub_bob_secret"     // has an account, not admitted
	malloryToken  = "hub_mallory_secret" // made up
	ciToken       = "mirror_ci_secret"   // the mirror's own, by its hash
	labToken      = "mirror_lab_secret"  // the mirror's own, in a file, granted
	grantedClient = "grace"              // by certificate
	plainClient   = "carol"
)

var secrets = []string{agentToken, aliceToken, bobToken, malloryToken, ciToken, labToken}

// buffer is a log that many write.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// newGuardedOrigin serves org/open, org/gated and org/private.
func newGuardedOrigin(t *testing.T) (*hub.Origin, string) {
	t.Helper()
	dir := t.TempDir()
	for i, name := range []string{"open", "gated", "private"} {
		if err := hub.WriteModel(filepath.Join(dir, "org", name), hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	origin := hub.New(hub.Options{Dir: dir, Token: agentToken, Gated: []string{"org/gated"}, Private: []string{"org/private"}})
	origin.SetToken(aliceToken, "*")
	origin.SetToken(bobToken)
	server := httptest.NewServer(origin)
	t.Cleanup(server.Close)
	return origin, server.URL
}

// newGuardedConfig reads a guarded origin with a credential.
func newGuardedConfig(t *testing.T, url string) nodeagent.Config {
	t.Helper()
	c := newConfig(t, url)
	dir := t.TempDir()
	c.Sources[0].TokenFile = filepath.Join(dir, "token")
	lab := filepath.Join(dir, "lab")
	if err := errors.Join(os.WriteFile(c.Sources[0].TokenFile, []byte(agentToken), 0o600), os.WriteFile(lab, []byte(labToken+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(ciToken))
	c.Access.Tokens = []nodeagent.Token{{Name: "ci", SHA256: hex.EncodeToString(sum[:])}, {Name: "lab", File: lab}}
	c.Access.Grants = []nodeagent.Grant{{Who: []string{"token/lab", "client/" + grantedClient}, Refs: []string{"org/*"}}}
	return c
}

// caller is one who asks the mirror.
type caller struct {
	token string
	cert  *tls.Config // nil: no certificate
}

// reply is what a mirror answered: status and code, such as "200" or "403 GatedRepo".
func (c caller) reply(t *testing.T, base, method, path string) string {
	t.Helper()
	config := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}
	if c.cert != nil {
		config = c.cert
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), method, base+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = response.Body.Close() }()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if response.StatusCode >= 400 && response.Header.Get("X-Error-Code") == "" {
		t.Errorf("%s %s: %s without a code", method, path, response.Status)
	}
	return strings.TrimSpace(fmt.Sprint(response.StatusCode, " ", response.Header.Get("X-Error-Code")))
}

// listener is one way in which the mirror of a test is reached.
type listener struct {
	base    string
	issue   func(role identity.Role, name string) *tls.Config
	running running
	log     *buffer
	origin  *hub.Origin
}

func newListener(t *testing.T, address string, secure bool, change func(*nodeagent.Config)) listener {
	t.Helper()
	origin, url := newGuardedOrigin(t)
	l := listener{origin: origin, log: &buffer{}}
	c := newGuardedConfig(t, url)
	c.Listen.Mirror = address
	scheme := "http://"
	if secure {
		scheme = "https://"
		c.TLS, l.issue = newCertificates(t)
	} else {
		c.Listen.Insecure = true
	}
	if change != nil {
		change(&c)
	}
	l.running = runWith(t, c, nodeagent.Options{Log: slog.New(slog.NewTextHandler(l.log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	_, port, err := net.SplitHostPort(l.running.Listeners()["mirror"])
	if err != nil {
		t.Fatal(err)
	}
	l.base = scheme + "127.0.0.1:" + port
	return l
}

func newCertificates(t *testing.T) (nodeagent.TLS, func(role identity.Role, name string) *tls.Config) {
	t.Helper()
	ca, err := identity.NewCA(identity.Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	issue := func(role identity.Role, name string) identity.Files {
		f := identity.Files{Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key"), CA: filepath.Join(dir, "ca.pem")}
		pair, err := ca.Issue(role, name, identity.IssueOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(identity.WritePair(f.Cert, f.Key, pair), os.WriteFile(f.CA, ca.Cert(), 0o600)); err != nil {
			t.Fatal(err)
		}
		return f
	}
	agent := issue(identity.RoleAgent, "node-a")
	return nodeagent.TLS{Cert: agent.Cert, Key: agent.Key, CA: agent.CA}, func(role identity.Role, name string) *tls.Config {
		config, err := identity.ClientTLS(issue(role, name), identity.RoleAgent)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}
}

// asks are the requests of the matrix; NAME stands for a repository.
var asks = []struct{ name, method, path string }{
	{"info", "GET", "/api/models/org/NAME/revision/main"},
	{"tree", "GET", "/api/models/org/NAME/tree/main?recursive=true"},
	{"refs", "GET", "/api/models/org/NAME/refs"},
	{"auth", "GET", "/api/models/org/NAME/auth-check"},
	{"head", "HEAD", "/org/NAME/resolve/main/config.json"},
	{"file", "GET", "/org/NAME/resolve/main/model-00001-of-00002.safetensors"},
	{"raw", "GET", "/org/NAME/raw/main/config.json"},
}

func TestWhoMayReadWhatThroughTheMirror(t *testing.T) {
	t.Parallel()
	const (
		yes       = "200"
		stranger  = "401 Unauthorized"
		ungated   = "401 GatedRepo"
		notListed = "403 GatedRepo"
		hidden    = "404 RepoNotFound"
	)
	// What a caller gets: of open, of gated's info, of the rest of gated, of private.
	type expected [4]string
	all, admittedOnly := expected{yes, yes, yes, yes}, expected{yes, yes, notListed, hidden}
	nobody := expected{stranger, stranger, stranger, stranger}
	plain := map[string]expected{
		"nobody": nobody, "own token accepted": all, "own token refused": admittedOnly,
		"made-up token": nobody, "token of the mirror": admittedOnly, "token with a grant": all,
	}
	overTLS := map[string]expected{"certificate": admittedOnly, "certificate with a grant": all, "certificate of a router": admittedOnly}
	maps.Copy(overTLS, plain)
	overTLS["certificate and own token"] = all
	for name, c := range map[string]struct {
		address string
		secure  bool
		want    map[string]expected
	}{
		"loopback": {"127.0.0.1:0", false, map[string]expected{
			"nobody": {yes, yes, ungated, hidden}, "own token accepted": all, "own token refused": admittedOnly,
			"made-up token": admittedOnly, "token of the mirror": admittedOnly, "token with a grant": all,
		}},
		"another address, certificates": {"0.0.0.0:0", true, overTLS},
		"another address, plain":        {"0.0.0.0:0", false, plain},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newListener(t, c.address, c.secure, nil)
			callers := map[string]caller{
				"nobody": {}, "own token accepted": {token: aliceToken}, "own token refused": {token: bobToken},
				"made-up token": {token: malloryToken}, "token of the mirror": {token: ciToken}, "token with a grant": {token: labToken},
			}
			if c.secure {
				callers["certificate"] = caller{cert: l.issue(identity.RoleClient, plainClient)}
				callers["certificate with a grant"] = caller{cert: l.issue(identity.RoleClient, grantedClient)}
				callers["certificate of a router"] = caller{cert: l.issue(identity.RoleRouter, grantedClient+"-router")}
				callers["certificate and own token"] = caller{cert: l.issue(identity.RoleClient, plainClient), token: aliceToken}
			}
			for who, want := range c.want {
				for _, ask := range asks {
					for repo, expect := range map[string]string{"open": want[0], "gated": want[2], "private": want[3]} {
						if repo == "gated" && ask.name == "info" {
							expect = want[1]
						}
						if got := callers[who].reply(t, l.base, ask.method, strings.Replace(ask.path, "NAME", repo, 1)); got != expect {
							t.Errorf("%s asks for %s of %s: %s, want %s", who, ask.name, repo, got, expect)
						}
					}
				}
			}
			for _, token := range []string{ciToken, labToken} {
				if n := l.origin.Asked(token); n > 0 {
					t.Errorf("the origin saw a token of the mirror's own %d times", n)
				}
			}
			l.running.stop()
			for _, secret := range secrets {
				if strings.Contains(l.log.String(), secret) {
					t.Errorf("the log holds token %q", secret)
				}
			}
		})
	}
}

func TestNobodyTellsAPrivateRepositoryFromOneThatIsNot(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*nodeagent.Config){
		"loopback":                       func(c *nodeagent.Config) { c.Listen.Mirror = "127.0.0.1:0" },
		"another address":                func(*nodeagent.Config) {},
		"another address, metadata open": func(c *nodeagent.Config) { c.Access.OpenMetadata = true },
		"another address, two sources": func(c *nodeagent.Config) {
			second := c.Sources[0] // either may be the one that has a ref
			second.Name = "second"
			c.Sources = append(c.Sources, second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tellsNothing(t, newListener(t, "0.0.0.0:0", false, change))
		})
	}
}

func tellsNothing(t *testing.T, l listener) {
	t.Helper()
	if got := (caller{token: aliceToken}).reply(t, l.base, "GET", "/api/models/org/private"); got != "200" {
		t.Fatalf("one who is admitted gets %s", got)
	}
	answer := func(token, path string) string {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, l.base+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		response.Header.Del("Date")
		return fmt.Sprint(response.Status, response.Header, string(body))
	}
	for _, token := range []string{"", bobToken, malloryToken, ciToken} {
		for _, path := range []string{
			"/api/models/org/NAME", "/api/models/org/NAME/refs", "/api/models/org/NAME/revision/none", "/api/models/org/NAME/tree/none",
			"/api/models/org/NAME/auth-check", "/org/NAME/resolve/main/config.json", "/org/NAME/resolve/none/config.json",
			"/org/NAME/resolve/main/none.json", "/org/NAME/raw/main/config.json",
		} {
			private, none := answer(token, strings.Replace(path, "NAME", "private", 1)), answer(token, strings.Replace(path, "NAME", "none", 1))
			if private != none {
				t.Errorf("token %q, %s: of a private one\n%s\nof none\n%s", token, path, private, none)
			}
		}
	}
}

func TestMetadataOfOpenArtifactsMayBeOpenedToCallersWithoutIdentity(t *testing.T) {
	t.Parallel()
	l := newListener(t, "0.0.0.0:0", false, func(c *nodeagent.Config) { c.Access.OpenMetadata = true })
	for path, want := range map[string]string{
		"/api/models/org/open/refs": "200", "/api/models/org/open/tree/main?recursive=true": "200", "/api/models/org/open": "200",
		"/org/open/resolve/main/config.json": "401 Unauthorized", "/org/open/raw/main/config.json": "401 Unauthorized",
		"/api/models/org/open/auth-check": "401 Unauthorized", "/api/models/org/gated/refs": "401 GatedRepo",
		"/api/models/org/gated/tree/main": "401 GatedRepo", "/org/gated/resolve/main/config.json": "401 Unauthorized",
		"/api/models/org/private/refs": "404 RepoNotFound", "/api/models/org/private": "404 RepoNotFound",
	} {
		if got := (caller{}).reply(t, l.base, "GET", path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func TestViewsOfRestrictedArtifactsStandOnlyByGrantAndGoWithIt(t *testing.T) {
	t.Parallel()
	_, url := newGuardedOrigin(t)
	c := newGuardedConfig(t, url)
	pulled := func(r running, name string) admin.Model {
		t.Helper()
		m, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: "hub://org/" + name}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if m.State != "Ready" {
			t.Fatalf("%+v", m)
		}
		return m
	}
	r := run(t, c)
	for name, want := range map[string]int{"open": 2, "gated": 0, "private": 0} {
		m := pulled(r, name)
		if len(m.Views) != want || m.Access != name || (m.NoViews == "") != (want > 0) {
			t.Errorf("%s: views %v, access %q, %q", name, m.Views, m.Access, m.NoViews)
		}
	}
	r.stop()
	c.Access.Grants = append(c.Access.Grants, nodeagent.Grant{Refs: []string{"org/gated"}, Views: true})
	r = run(t, c)
	gated := pulled(r, "gated")
	if len(gated.Views) != 2 || gated.NoViews != "" {
		t.Errorf("granted: views %v, %q", gated.Views, gated.NoViews)
	}
	if m := pulled(r, "private"); len(m.Views) > 0 {
		t.Errorf("not granted: views %v", m.Views)
	}
	r.stop()
	c.Access.Grants = c.Access.Grants[:1]
	r = run(t, c)
	if m := pulled(r, "gated"); len(m.Views) > 0 || m.NoViews == "" {
		t.Errorf("no longer granted: views %v, %q", m.Views, m.NoViews)
	}
	for _, dir := range gated.Views {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s still stands: %v", dir, err)
		}
	}
}

func TestAGrantToAnybodyOpensToWhomTheListenerAdmits(t *testing.T) {
	t.Parallel()
	grant := func(c *nodeagent.Config) {
		c.Access.OpenMetadata = true
		c.Access.Grants = []nodeagent.Grant{{Who: []string{"any"}, Refs: []string{"org/gated"}}}
	}
	near, far := newListener(t, "127.0.0.1:0", false, grant), newListener(t, "0.0.0.0:0", true, grant)
	for _, c := range []struct {
		who, base string
		caller    caller
		want      map[string]string
	}{
		{"nobody on loopback", near.base, caller{}, map[string]string{gatedFile: "200", privateFile: "404 RepoNotFound"}},
		{"nobody", far.base, caller{}, map[string]string{
			gatedFile: "401 Unauthorized", "/api/models/org/gated/tree/main": "401 GatedRepo", "/api/models/org/open/tree/main": "200",
		}},
		{"a made-up token", far.base, caller{token: malloryToken}, map[string]string{gatedFile: "401 Unauthorized", openFile: "401 Unauthorized"}},
		{"one with an account", far.base, caller{token: bobToken}, map[string]string{gatedFile: "200", privateFile: "404 RepoNotFound"}},
		{"a certificate", far.base, caller{cert: far.issue(identity.RoleClient, plainClient)}, map[string]string{gatedFile: "200", privateFile: "404 RepoNotFound"}},
	} {
		for path, want := range c.want {
			if got := c.caller.reply(t, c.base, "GET", path); got != want {
				t.Errorf("%s asks for %s: %s, want %s", c.who, path, got, want)
			}
		}
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, near.base+gatedFile, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Two credentials are none: nobody guesses which was meant.
	request.Header["Authorization"] = []string{"Bearer " + aliceToken, "Bearer " + bobToken}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()
	if n := near.origin.Asked(aliceToken) + near.origin.Asked(bobToken); n > 0 {
		t.Errorf("the origin saw one of two tokens %d times", n)
	}
}
