package hubmirror

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const weights = "/acme/tiny/resolve/main/weights.bin"

// pattern is n bytes that differ at every offset below 2^16.
func pattern(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(i ^ i>>8)
	}
	return out
}

func TestHeadIsAnsweredFromTheManifestWithoutOpeningTheFile(t *testing.T) {
	t.Parallel()
	opened := 0
	_, s := newSmall(t, Options{}, func() (Content, error) {
		if opened++; opened > 1 {
			return nil, errors.New("opened for a HEAD")
		}
		return newFilling(pattern(1000)), nil
	})
	a := ask(t, http.MethodHead, s.URL+weights, "", "Range", "bytes=0-0")
	if a.StatusCode != http.StatusOK || a.ContentLength != 1000 || a.Header.Get("X-Linked-Size") != "1000" || a.Header.Get("X-Repo-Commit") != testCommit {
		t.Errorf("got %s, %v", a.Status, a.Header)
	}
}

func TestRangesOfCommittedFilesAreExact(t *testing.T) {
	t.Parallel()
	data := pattern(3*pieceBytes + 17)
	_, s := newSmall(t, Options{}, onDisk(t, data))
	size := len(data)
	for _, c := range []struct {
		text     string
		from, to int // to past the end means whole
	}{
		{"", 0, size},
		{"bytes=0-0", 0, 1},
		{"bytes=5-5000000", 5, 5000001},
		{fmt.Sprintf("bytes=%d-", size-1), size - 1, size},
		{"bytes=-70000", size - 70000, size},
		{"bytes=0-1,5-6", 0, size},
	} {
		var header []string
		if c.text != "" {
			header = []string{"Range", c.text}
		}
		a := ask(t, http.MethodGet, s.URL+weights, "", header...)
		if a.err != nil || !bytes.Equal(a.body, data[c.from:c.to]) {
			t.Errorf("%q: %d bytes and %v, want %d", c.text, len(a.body), a.err, c.to-c.from)
		}
		if want := fmt.Sprintf("bytes %d-%d/%d", c.from, c.to-1, size); a.StatusCode == http.StatusPartialContent && a.Header.Get("Content-Range") != want {
			t.Errorf("%q: Content-Range %q, want %q", c.text, a.Header.Get("Content-Range"), want)
		}
	}
	a := ask(t, http.MethodGet, s.URL+weights, "", "Range", fmt.Sprintf("bytes=%d-", size))
	if a.StatusCode != http.StatusRequestedRangeNotSatisfiable || a.Header.Get("Content-Range") != fmt.Sprintf("bytes */%d", size) {
		t.Errorf("past the end: %s, %q", a.Status, a.Header.Get("Content-Range"))
	}
}

func TestEmptyFilesAreServedWholeToWhoeverAsksForTheirBeginning(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	url := s.URL + "/acme/tiny/resolve/main/empty.bin"
	for text, want := range map[string]int{
		"": http.StatusOK, "bytes=0-0": http.StatusOK, "bytes=0-": http.StatusOK, "bytes=-5": http.StatusOK,
		"bytes=1-": http.StatusRequestedRangeNotSatisfiable,
	} {
		var header []string
		if text != "" {
			header = []string{"Range", text}
		}
		a := ask(t, http.MethodGet, url, "", header...)
		if a.StatusCode != want || want == http.StatusOK && (len(a.body) != 0 || a.ContentLength != 0 || a.Header.Get("Etag") == "") {
			t.Errorf("%q: %s with %d bytes, want %d", text, a.Status, len(a.body), want)
		}
		total := "bytes */0"
		if text == "" {
			total = ""
		}
		if got := a.Header.Get("Content-Range"); got != total {
			t.Errorf("%q: Content-Range is %q, want %q", text, got, total)
		}
		if coded := a.Header.Get("X-Error-Code") != ""; coded != (want != http.StatusOK) {
			t.Errorf("%q: X-Error-Code is %q", text, a.Header.Get("X-Error-Code"))
		}
	}
}

func TestConditionsOnTheETagAreHonoured(t *testing.T) {
	t.Parallel()
	data := pattern(100)
	_, s := newSmall(t, Options{}, onDisk(t, data))
	tag := ask(t, http.MethodHead, s.URL+weights, "").Header.Get("Etag")
	for _, c := range []struct {
		header []string
		status int
		bytes  int
	}{
		{[]string{"If-None-Match", tag}, 304, 0},
		{[]string{"If-None-Match", "W/" + tag}, 304, 0},
		{[]string{"If-Match", tag}, 200, 100},
		{[]string{"If-Match", `"other"`}, 412, -1},
		{[]string{"If-Range", tag, "Range", "bytes=0-9"}, 206, 10},
		{[]string{"If-Range", `"other"`, "Range", "bytes=0-9"}, 200, 100},
	} {
		a := ask(t, http.MethodGet, s.URL+weights, "", c.header...)
		if a.StatusCode != c.status || c.bytes >= 0 && len(a.body) != c.bytes {
			t.Errorf("%v: %d with %d bytes, want %d with %d", c.header, a.StatusCode, len(a.body), c.status, c.bytes)
		}
	}
}

// readFromRecorder notes the readers that a handler hands to ReadFrom.
type readFromRecorder struct {
	*httptest.ResponseRecorder
	sources []io.Reader
}

func (r *readFromRecorder) ReadFrom(src io.Reader) (int64, error) {
	r.sources = append(r.sources, src)
	return io.Copy(r.ResponseRecorder, src)
}

func TestCommittedFilesAreHandedOverInTheFormForWhichTheServerUsesSendfile(t *testing.T) {
	t.Parallel()
	data := pattern(pieceBytes + 10)
	m, _ := newSmall(t, Options{}, onDisk(t, data))
	w := &readFromRecorder{ResponseRecorder: httptest.NewRecorder()}
	m.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, weights, nil))
	if !bytes.Equal(w.Body.Bytes(), data) {
		t.Errorf("sent %d bytes, want %d", w.Body.Len(), len(data))
	}
	if len(w.sources) != 2 {
		t.Fatalf("%d pieces, want 2", len(w.sources))
	}
	for _, src := range w.sources {
		limited, ok := src.(*io.LimitedReader)
		if !ok {
			t.Fatalf("source is a %T", src)
		}
		if _, ok := limited.R.(*os.File); !ok {
			t.Errorf("source limits a %T", limited.R)
		}
	}
}

func TestAFileBeingFilledIsServedAsItArrivesAndSwitchesToTheCommittedFile(t *testing.T) {
	t.Parallel()
	data := pattern(3 * bufferBytes)
	name := filepath.Join(t.TempDir(), "whole")
	if err := os.WriteFile(name, data, 0o444); err != nil {
		t.Fatal(err)
	}
	f := newFilling(data)
	_, s := newSmall(t, Options{}, func() (Content, error) { return f, nil })
	resp := begin(t, s.URL+weights)
	defer func() { _ = resp.Body.Close() }()
	got := make([]byte, 0, len(data))
	for _, step := range []int64{1, reserveBytes, reserveBytes + 1, bufferBytes, 2*bufferBytes + 5} {
		f.set(func() { f.front = step })
		piece := make([]byte, max(0, step-reserveBytes)-int64(len(got)))
		if _, err := io.ReadFull(resp.Body, piece); err != nil {
			t.Fatal(err)
		}
		got = append(got, piece...)
	}
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	f.set(func() { f.file, f.front = file, int64(len(data)) })
	rest, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Equal(append(got, rest...), data) {
		t.Errorf("body of %d bytes and %v, want %d", len(got)+len(rest), err, len(data))
	}
}

// begin sends a GET whose answer arrives while its body does not.
func begin(t *testing.T, url string, header ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func TestAMismatchBreaksTheBodyAndLaterRangesRestartAtZero(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	data := pattern(2 * SmallBody)
	f := newFilling(data)
	m, s := newSmall(t, Options{Now: func() time.Time { return now }}, func() (Content, error) { return f, nil })
	resp := begin(t, s.URL+weights)
	defer func() { _ = resp.Body.Close() }()
	f.set(func() { f.front = reserveBytes + 1000 })
	if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	f.set(func() { f.err = fmt.Errorf("check: %w", ErrMismatch) })
	if n, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Fatalf("body ended cleanly after %d further bytes", n)
	}
	f.set(func() { f.err, f.front = nil, int64(len(data)) })
	a := ask(t, http.MethodGet, s.URL+weights, "", "Range", "bytes=1000-")
	if a.StatusCode != http.StatusOK || !bytes.Equal(a.body, data) {
		t.Errorf("range after a mismatch: %s with %d bytes", a.Status, len(a.body))
	}
	if a := ask(t, http.MethodGet, s.URL+weights, "", "Range", "bytes=0-9"); a.StatusCode != http.StatusPartialContent || len(a.body) != 10 {
		t.Errorf("range at 0 after a mismatch: %s with %d bytes", a.Status, len(a.body))
	}
	if got := m.Stats().Broken; got != 1 {
		t.Errorf("counted %d broken bodies, want 1", got)
	}
}

func TestARestOfAFileBreaksOffOnceItsBeginningIsInDoubt(t *testing.T) {
	t.Parallel()
	data := pattern(2 * SmallBody)
	f := newFilling(data)
	m, s := newSmall(t, Options{}, func() (Content, error) { return f, nil })
	rest, whole := begin(t, s.URL+weights, "Range", "bytes=1000-"), begin(t, s.URL+weights)
	for _, resp := range []*http.Response{rest, whole} {
		defer func() { _ = resp.Body.Close() }()
	}
	f.set(func() { f.front = reserveBytes + 3000 })
	for _, resp := range []*http.Response{rest, whole} {
		if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	m.markSuspect(artifact.Digest{1}) // the file of newMirror
	f.set(func() { f.front = int64(len(data)) })
	if n, err := io.Copy(io.Discard, rest.Body); err == nil {
		t.Errorf("the rest ended cleanly after %d further bytes", n)
	}
	if n, err := io.Copy(io.Discard, whole.Body); err != nil || n != int64(len(data))-1000 {
		t.Errorf("the body from 0 has %d further bytes and %v", n, err)
	}
}

// unreadable is a Content whose committed file lies on a broken sector.
type unreadable struct {
	committed
	told chan int64 // offsets that ReadAt was asked for
}

func (u unreadable) Size() int64 { return 1 << 20 }

func (u unreadable) ReadAt(_ context.Context, _ []byte, off int64) (int, error) {
	u.told <- off
	return 0, syscall.EIO
}

func TestAReadErrorOfACommittedFileReachesItsOwner(t *testing.T) {
	t.Parallel()
	told := make(chan int64, 16)
	_, server := newSmall(t, Options{}, func() (Content, error) {
		f, err := os.Open("/proc/self/mem") // reading its start gives EIO
		return unreadable{committed{f}, told}, err
	})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+weights, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The connection may be cut before the answer begins.
	if response, err := http.DefaultTransport.RoundTrip(request); err == nil {
		defer func() { _ = response.Body.Close() }()
		if n, err := io.Copy(io.Discard, response.Body); err == nil {
			t.Errorf("%d bytes came and the body ended well", n)
		}
	}
	select {
	case off := <-told:
		if off != 0 {
			t.Errorf("the owner was asked for byte %d", off)
		}
	default:
		t.Error("the owner of the file was not told")
	}
}

func TestADriveThatLacksAFileIsNotTakenForARepositoryThatDoes(t *testing.T) {
	t.Parallel()
	first := true
	_, server := newSmall(t, Options{}, func() (Content, error) {
		if first {
			first = false // the size is asked first
			return newFilling([]byte("{}")), nil
		}
		return nil, fmt.Errorf("open: %w", fs.ErrNotExist)
	})
	got := ask(t, http.MethodGet, server.URL+weights, "")
	if code := got.Header.Get("X-Error-Code"); got.StatusCode < 400 || code == codeEntry || code == "" {
		t.Errorf("status %d with code %q", got.StatusCode, code)
	}
}

func TestAFileThatIsShorterThanItsManifestBreaksTheBody(t *testing.T) {
	t.Parallel()
	sizes := []int{2000, 1500}
	_, s := newSmall(t, Options{}, func() (Content, error) {
		n := sizes[0]
		sizes = sizes[1:]
		return onDisk(t, pattern(n))()
	})
	if a := ask(t, http.MethodGet, s.URL+weights, ""); a.err == nil || len(a.body) > 1500 {
		t.Errorf("got %d bytes and %v", len(a.body), a.err)
	}
}

func TestStreamsBeyondTheBoundHaveHeadersAndWaitForAPlace(t *testing.T) {
	t.Parallel()
	data := pattern(2 * SmallBody)
	f := newFilling(data)
	m, s := newSmall(t, Options{Streams: 1}, func() (Content, error) { return f, nil })
	f.set(func() { f.front = reserveBytes + 1000 })
	first := begin(t, s.URL+weights)
	defer func() { _ = first.Body.Close() }()
	if _, err := io.ReadFull(first.Body, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	second := begin(t, s.URL+weights)
	defer func() { _ = second.Body.Close() }()
	if second.StatusCode != http.StatusOK {
		t.Fatalf("second stream: %s", second.Status)
	}
	// Small bodies need no place.
	if a := ask(t, http.MethodGet, s.URL+"/acme/tiny/resolve/main/config.json", ""); string(a.body) != "{}" {
		t.Errorf("config: %s, %q", a.Status, a.body)
	}
	f.set(func() { f.front = int64(len(data)) })
	for i, resp := range []*http.Response{first, second} {
		want := int64(len(data))
		if i == 0 {
			want -= 1000
		}
		if n, err := io.Copy(io.Discard, resp.Body); err != nil || n != want {
			t.Errorf("stream %d: %d bytes and %v, want %d", i, n, err, want)
		}
	}
	if got := m.Stats(); got.Streams < 0 || got.Waiting != 0 {
		t.Errorf("stats %+v", got)
	}
}

func TestAClientThatStopsReadingFreesItsPlace(t *testing.T) {
	t.Parallel()
	data := pattern(8 * pieceBytes)
	_, s := newSmall(t, Options{Streams: 1, WriteTimeout: 3 * time.Second}, onDisk(t, data))
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", weights); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(conn).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	// The stuck client holds the only place until its deadline; then the next
	// one is served whole.
	if a := ask(t, http.MethodGet, s.URL+weights, ""); a.err != nil || !bytes.Equal(a.body, data) {
		t.Errorf("next client: %d bytes and %v", len(a.body), a.err)
	}
}

func TestBytesOfBodiesAreCounted(t *testing.T) {
	t.Parallel()
	m, s := newSmall(t, Options{}, onDisk(t, pattern(5000)))
	ask(t, http.MethodGet, s.URL+weights, "", "User-Agent", "vllm/0.32.0")
	ask(t, http.MethodGet, s.URL+weights, "", "Range", "bytes=0-9", "User-Agent", "vllm/0.33.0")
	got := m.Stats()
	if got.Bytes != 5010 || got.Requests["resolve"] != 2 || got.Clients["vllm"] != 2 {
		t.Errorf("stats %+v", got)
	}
}
