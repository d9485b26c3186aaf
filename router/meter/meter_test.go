package meter

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// run opens a meter and runs it until close, which gives Run's error.
func run(t *testing.T, o Options) (m *Meter, stop func() error) {
	t.Helper()
	m, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	return m, func() error {
		cancel()
		return <-done
	}
}

func ids(t *testing.T, path string) (list []string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		var r struct{ Schema, ID string }
		if err := json.Unmarshal([]byte(line), &r); err != nil || r.Schema != Schema {
			t.Fatalf("line %q: %v", line, err)
		}
		list = append(list, r.ID)
	}
	return list
}

func TestTheLineOfARecordStaysAsTheFormatPageSays(t *testing.T) {
	t.Parallel()
	r := Record{
		ID: "a-1", RequestID: "req\n\"1\"", Time: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), Model: "m", ServedModel: "org/m\xff",
		Consumer: "team", Pool: "p", Endpoint: "n/e", Accelerator: "h100", Path: "/v1/completions", PromptTokens: 10, CachedTokens: 8,
		CompletionTokens: 3, Estimated: true, Outcome: "client_gone", Status: 200, Stream: true, TTFT: 1500 * time.Microsecond, Duration: time.Second, Retries: 1,
	}
	const want = `{"schema":"hearth.dev/usage/v1","id":"a-1","requestId":"req\u000a\"1\"","time":"2026-01-02T03:04:05.000006Z","model":"m",` +
		`"servedModel":"org/m` + "\ufffd" + `","consumer":"team","pool":"p","endpoint":"n/e","accelerator":"h100","path":"/v1/completions","promptTokens":10,` +
		`"cachedTokens":8,"completionTokens":3,"estimated":true,"outcome":"client_gone","status":200,"stream":true,"ttftMs":1.5,"durationMs":1000,"retries":1}` + "\n"
	if got := string(r.append(nil)); got != want {
		t.Fatalf("got  %swant %s", got, want)
	}
	if !json.Valid([]byte(want)) {
		t.Fatal("the line is no JSON")
	}
}

func TestRecordsAreWrittenOnceEachAcrossARestart(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "usage", "usage.jsonl")
	m, stop := run(t, Options{Path: path})
	for i := range 1000 {
		m.Add(&Record{ID: fmt.Sprint(i)})
	}
	m.Add(&Record{ID: "7"})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if s := m.Stats(); s.Written != 1000 || s.Duplicates != 1 || s.Dropped != 0 {
		t.Fatalf("stats %+v", s)
	}
	m, stop = run(t, Options{Path: path})
	m.Add(&Record{ID: "999"})
	m.Add(&Record{ID: "1000"})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := ids(t, path); len(got) != 1001 || got[1000] != "1000" {
		t.Fatalf("%d records, last %s", len(got), got[len(got)-1])
	}
	m.Add(&Record{ID: "late"})
	if m.Stats().Dropped != 1 {
		t.Fatal("a record after the end was lost in silence")
	}
}

func TestATornEndIsCutOffAndWholeLinesStay(t *testing.T) {
	t.Parallel()
	whole := string((&Record{ID: "1"}).append(nil))
	for name, torn := range map[string]string{"half a line": `{"schema":"hearth.dev/us`, "zeros": "\x00\x00\x00\n", "nothing": ""} {
		path := filepath.Join(t.TempDir(), "usage.jsonl")
		if err := os.WriteFile(path, []byte(whole+torn), 0o600); err != nil {
			t.Fatal(err)
		}
		m, stop := run(t, Options{Path: path})
		m.Add(&Record{ID: "1"})
		m.Add(&Record{ID: "2"})
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if got := ids(t, path); len(got) != 2 || got[1] != "2" {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestAFullFileIsRotatedWhole(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "usage.jsonl")
	for i := range 3 {
		m, stop := run(t, Options{Path: path, MaxFileBytes: 1000})
		m.Add(&Record{ID: fmt.Sprint(i), Model: strings.Repeat("m", 600)})
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "usage*.jsonl"))
	if err != nil || len(files) != 3 {
		t.Fatalf("files %v, %v", files, err)
	}
	for _, f := range files {
		if len(ids(t, f)) != 1 {
			t.Errorf("%s holds %v", f, ids(t, f))
		}
	}
}

func TestOneRouterOwnsTheFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "usage.jsonl")
	_, stop := run(t, Options{Path: path})
	if _, err := Open(Options{Path: path}); !errors.Is(err, durable.ErrLocked) {
		t.Fatalf("a second router got %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// refusingFS tears the first writes and refuses them, as a full drive does.
type refusingFS struct {
	durable.FS
	left atomic.Int64
}

type refusingFile struct {
	durable.File
	fs *refusingFS
}

func (f *refusingFS) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	file, err := f.FS.OpenFile(path, flag, perm)
	return &refusingFile{file, f}, err
}

func (f *refusingFile) WriteAt(p []byte, off int64) (int, error) {
	if f.fs.left.Add(-1) >= 0 {
		n, err := f.File.WriteAt(p[:len(p)/2], off)
		return n, errors.Join(err, syscall.ENOSPC)
	}
	return f.File.WriteAt(p, off)
}

func TestADriveThatRefusesForAWhileLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "usage.jsonl")
	refusing := &refusingFS{FS: durable.OS}
	refusing.left.Store(2)
	m, stop := run(t, Options{Path: path, FS: refusing})
	for i := range 300 {
		m.Add(&Record{ID: fmt.Sprint(i)})
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for m.Stats().Written < 300 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("stats %+v", m.Stats())
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := ids(t, path); len(got) != 300 || m.Stats().Failures != 2 || m.Stats().Dropped != 0 {
		t.Fatalf("%d records, stats %+v", len(got), m.Stats())
	}
}

func TestAFullQueueDropsAloud(t *testing.T) {
	t.Parallel()
	m, err := Open(Options{Path: filepath.Join(t.TempDir(), "usage.jsonl")})
	if err != nil {
		t.Fatal(err)
	}
	for i := range queueRecords + 1 { // nobody runs it
		m.Add(&Record{ID: fmt.Sprint(i)})
	}
	if s := m.Stats(); s.Dropped != 1 || s.Queued != queueRecords {
		t.Fatalf("stats %+v", s)
	}
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Run(stopped); err != nil || m.Stats().Written != queueRecords {
		t.Fatalf("run: %v, stats %+v", err, m.Stats())
	}
}

func TestTheConsumerIsTakenFromWhatCanBeBelieved(t *testing.T) {
	t.Parallel()
	sum := sha256.Sum256([]byte("secret"))
	c, err := NewConsumers("x-team", []string{"spiffe://d/gateway"}, []Token{{Name: "ci", SHA256: hex.EncodeToString(sum[:])}})
	if err != nil {
		t.Fatal(err)
	}
	gateway := &url.URL{Scheme: "spiffe", Host: "d", Path: "/gateway"}
	for name, x := range map[string]struct {
		cert *x509.Certificate
		auth string
		want string
	}{
		"nothing":           {nil, "", Anonymous},
		"unknown token":     {nil, "Bearer other", Anonymous},
		"token":             {nil, "bearer secret", "ci"},
		"other certificate": {&x509.Certificate{DNSNames: []string{"svc"}}, "Bearer secret", "svc"},
		"listed one":        {&x509.Certificate{URIs: []*url.URL{gateway}}, "", "billing"},
	} {
		r := &http.Request{Header: http.Header{"X-Team": {"billing"}}}
		if x.auth != "" {
			r.Header.Set("Authorization", x.auth)
		}
		if x.cert != nil {
			r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{x.cert}}
		}
		if got := c.Of(r); got != x.want {
			t.Errorf("%s: %q, want %q", name, got, x.want)
		}
	}
	if _, err := NewConsumers("", nil, []Token{{Name: "x", SHA256: "zz"}}); err == nil {
		t.Error("a token that is no hash was taken")
	}
}
