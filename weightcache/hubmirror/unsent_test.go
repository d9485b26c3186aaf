package hubmirror

import (
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestWhatAClientNeverSendsHoldsNoAnswerNorItsConnection(t *testing.T) {
	t.Parallel()
	commit := "26a61535ace4428fedeb9bb839df1dd87bfc70cb"
	for _, c := range []struct{ head, want string }{
		{"GET /acme/tiny-llama/resolve/main/config.json", "200"},
		{"HEAD /acme/tiny-llama/resolve/main/config.json", "200"},
		{"GET /api/models/acme/tiny-llama/tree/" + commit, "200"},
		{"GET /nothing", "404"},
		{"DELETE /api/models/acme/tiny-llama", "405"},
		{"POST /api/models/acme/tiny-llama/paths-info/main", "400"},
	} {
		for _, framing := range []string{"Content-Length: 10", "Transfer-Encoding: chunked"} {
			synctest.Test(t, func(t *testing.T) {
				p, end := NewPipe(New(Options{Library: recordedLibrary(t)}))
				defer end()
				client, server := net.Pipe()
				p.conns <- server
				began := time.Now()
				_ = client.SetDeadline(began.Add(time.Hour))
				go func() { _, _ = io.WriteString(client, c.head+" HTTP/1.1\r\nHost: x\r\n"+framing+"\r\n\r\n") }()
				got, err := io.ReadAll(client)
				if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 "+c.want) {
					t.Errorf("%s with %s: %q, %v, not %s and the connection's end", c.head, framing, got, err, c.want)
				}
				if took := time.Since(began); took > 2*headerWithin {
					t.Errorf("%s with %s took %v", c.head, framing, took)
				}
				_ = client.Close()
			})
		}
	}
}
