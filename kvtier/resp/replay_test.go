package resp

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
)

type recording struct {
	Meta struct {
		Name  string            `json:"name"`
		Keys  map[string]string `json:"keys"`
		Value int               `json:"full_chunk_bytes"`
	} `json:"meta"`
	Events []struct {
		Conn  int    `json:"conn"`
		Dir   string `json:"dir"`
		Op    string `json:"op"`
		Bytes int    `json:"bytes"`
		Parts []part `json:"parts"`
	} `json:"events"`
}

type part struct {
	Hex    string `json:"hex"`
	Bulk   int    `json:"bulk"`
	SHA256 string `json:"sha256"`
	Head   string `json:"head"`
	Tail   string `json:"tail"`
}

// payloads gives back the values of recordings, by their digest.
type payloads map[string][]byte

func (p payloads) of(t *testing.T, part part) []byte {
	t.Helper()
	if known := p[part.SHA256]; known != nil {
		return known
	}
	value := make([]byte, part.Bulk)
	for _, seed := range []int{10, 20, 21, 22, 40, 50} {
		for i := range value {
			value[i] = byte(seed + i + 7*(i>>8))
		}
		sum := sha256.Sum256(value)
		if hex.EncodeToString(sum[:]) == part.SHA256 {
			p[part.SHA256] = value
			return value
		}
	}
	// A random payload of the multiprocess server: only its ends are known, and
	// any bytes between them do, as long as the same come back.
	head, tail := unhex(t, part.Head), unhex(t, part.Tail)
	sum := unhex(t, part.SHA256)
	for i := range value {
		value[i] = sum[i%len(sum)] + byte(i>>8)
	}
	copy(value, head)
	copy(value[len(value)-len(tail):], tail)
	p[part.SHA256] = value
	return value
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	raw, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func readRecording(t *testing.T, path string) recording {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var rec recording
	if err := json.Unmarshal(raw, &rec); err != nil {
		t.Fatal(err)
	}
	return rec
}

// Every recorded conversation is spoken again, each connection's bytes in their
// order, and each answer is the recorded one, but for what is a server's own.
func TestRecordedConversationsAreAnsweredByteForByte(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("testdata/traffic_*.json")
	if err != nil || len(paths) != 13 {
		t.Fatalf("there are %d recordings (%v), not 13", len(paths), err)
	}
	for _, path := range paths {
		rec := readRecording(t, path)
		t.Run(rec.Meta.Name, func(t *testing.T) {
			t.Parallel()
			replay(t, rec)
		})
	}
}

func replay(t *testing.T, rec recording) {
	t.Helper()
	tier := newMemory(1 << 30)
	tenant := tenantOf("replayed", tier)
	access := Access{Tenant: tenant}
	if strings.Contains(rec.Meta.Name, "auth") {
		var credentials Credentials
		if err := credentials.Add(tenant, "s3cr3t"); err != nil {
			t.Fatal(err)
		}
		access = Access{Authenticate: credentials.Authenticate}
	}
	s := serve(t, Options{}, access)
	values, open := make(payloads), make(map[int]*client)
	asked := make(map[int][]byte)
	answers, torn := 0, false
	for i, event := range rec.Events {
		c := open[event.Conn]
		where := fmt.Sprintf("event %d, connection %d, %s", i, event.Conn, event.Op)
		if strings.Contains(event.Op, "server evicted it") && !torn {
			torn = true
			tier.drop(block.Key{Hash: block.HashOf([]byte(rec.Meta.Keys["partial"] + "kv_bytes"))})
		}
		var raw []byte
		for _, p := range event.Parts {
			if p.Hex != "" {
				raw = append(raw, unhex(t, p.Hex)...)
			} else {
				raw = append(raw, values.of(t, p)...)
			}
		}
		if len(raw) != event.Bytes {
			t.Fatalf("%s: %d bytes were made of its parts, not %d", where, len(raw), event.Bytes)
		}
		switch event.Dir {
		case "open":
			open[event.Conn] = s.client()
		case "close_c2s":
			_ = c.conn.Close()
		case "close_s2c":
		case "c2s":
			asked[event.Conn] = raw
			if _, err := c.conn.Write(raw); err != nil {
				t.Fatalf("%s: %v", where, err)
			}
		case "s2c":
			answers++
			if strings.Contains(event.Op, "the native worker hangs here") {
				// The plain nil that hung it: ours is as long as the header of a value.
				header := fmt.Sprintf("$%d\r\n", rec.Meta.Value)
				c.expect("$-" + strings.Repeat("0", len(header)-5) + "1\r\n")
				continue
			}
			answered(t, c, where, asked[event.Conn], raw)
		default:
			t.Fatalf("%s: direction %q", where, event.Dir)
		}
	}
	if answers == 0 {
		t.Fatal("the recording has no answer")
	}
	if got := tenant.Stats(); got.Dropped != 0 || got.Refused != 0 {
		t.Errorf("%d SETs were dropped and %d refused", got.Dropped, got.Refused)
	}
}

// answered reads the answer to what was asked and holds it to the recorded one.
func answered(t *testing.T, c *client, where string, asked, recorded []byte) {
	t.Helper()
	first := string(asked[:min(len(asked), 200)])
	switch {
	case strings.Contains(first, "\r\nHELLO\r\n") && recorded[0] == '%':
		got := pairs(t, c)
		want := map[string]string{"proto": "3", "role": "master", "mode": "standalone"}
		for key, value := range want {
			if got[key] != value {
				t.Fatalf("%s: HELLO answers %s %q, not %q", where, key, got[key], value)
			}
		}
		if len(got) != 7 {
			t.Fatalf("%s: HELLO has %d pairs, not 7", where, len(got))
		}
	case strings.Contains(first, "\r\nSETINFO\r\n"):
		// Redis 7.0 did not know it and valkey 9 does.
		for range strings.Count(string(recorded), "\r\n") {
			c.expect("+OK\r\n")
		}
	case strings.Contains(first, "\r\nINFO\r\n"):
		if !bytes.HasPrefix(recorded, []byte("=")) {
			t.Fatalf("%s: INFO was not a verbatim string", where)
		}
		if text := verbatim(t, c); !strings.HasPrefix(text, "txt:# Replication\r\nrole:master\r\n") {
			t.Fatalf("%s: INFO answers %q", where, text)
		}
	default:
		got := make([]byte, len(recorded))
		if n, err := io.ReadFull(c.in, got); err != nil || !bytes.Equal(got, recorded) {
			t.Fatalf("%s: the answer is %.120q (%d bytes, %v), recorded is %.120q", where, got[:n], n, err, recorded)
		}
	}
	if waiting := c.in.Buffered(); waiting > 0 {
		t.Fatalf("%s: %d bytes more than recorded", where, waiting)
	}
}

// pairs reads a map of RESP3 whose keys are bulk strings.
func pairs(t *testing.T, c *client) map[string]string {
	t.Helper()
	count, err := strconv.Atoi(strings.TrimPrefix(c.line(), "%"))
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for range count {
		key := item(t, c)
		all[key] = item(t, c)
	}
	return all
}

// item reads a bulk string, a number or an empty array.
func item(t *testing.T, c *client) string {
	t.Helper()
	line := c.line()
	if line[0] != '$' {
		return line[1:]
	}
	size, err := strconv.Atoi(line[1:])
	if err != nil {
		t.Fatal(err)
	}
	value := make([]byte, size+2)
	if _, err := io.ReadFull(c.in, value); err != nil {
		t.Fatal(err)
	}
	return string(value[:size])
}

func verbatim(t *testing.T, c *client) string {
	t.Helper()
	line := c.line()
	size, err := strconv.Atoi(strings.TrimPrefix(line, "="))
	if err != nil {
		t.Fatalf("%q is no verbatim string: %v", line, err)
	}
	value := make([]byte, size+2)
	if _, err := io.ReadFull(c.in, value); err != nil {
		t.Fatal(err)
	}
	return string(value[:size])
}
