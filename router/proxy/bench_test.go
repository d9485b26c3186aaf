package proxy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/router/pick"
)

// vllmEvent is a chunk as vLLM 0.32 writes it.
func vllmEvent(i int) string {
	return fmt.Sprintf(`data: {"id":"chatcmpl-8f5d2c1b7a6e4d3f9c0b1a2d3e4f5a6b","object":"chat.completion.chunk","created":1764439200,"model":"m",`+
		`"choices":[{"index":0,"delta":{"content":" tok%02d"},"logprobs":null,"finish_reason":null}]}`, i) + "\n\n"
}

func BenchmarkScanStreamOf64Chunks(b *testing.B) {
	var stream strings.Builder
	for i := range 64 {
		stream.WriteString(vllmEvent(i))
	}
	whole := []byte(stream.String())
	piece := make([]byte, 4096)
	b.SetBytes(int64(len(whole)))
	for b.Loop() {
		s := sseScanner{stripUsage: true}
		for rest := whole; len(rest) > 0; {
			n := copy(piece, rest)
			rest = rest[n:]
			s.feed(piece[:n])
		}
	}
}

func BenchmarkScanAndKeysOf400KB(b *testing.B) {
	text := strings.Repeat(`The quick brown fox jumps over the lazy dog.\n`, 400<<10/46)
	body := []byte(`{"messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"` + text + `"}],"model":"m","stream":true}`)
	b.SetBytes(int64(len(body)))
	w := new(walker)
	var f facts
	var req pick.Request
	for b.Loop() {
		if err := scan(body, &f); err != nil {
			b.Fatal(err)
		}
		w.run(body, &f)
		fill(&req, body, &f, w)
	}
}
