package proxy

import (
	"bytes"
	"strings"
	"testing"
)

// pass feeds stream in pieces of at most size bytes and gives what came out.
func pass(s *sseScanner, stream string, size int) string {
	var out []byte
	for len(stream) > 0 {
		n := min(size, len(stream))
		head, body := s.feed([]byte(stream[:n]))
		out = append(append(out, head...), body...)
		stream = stream[n:]
	}
	return string(append(out, s.finish()...))
}

func event(content string) string {
	return `data: {"id":"c","choices":[{"index":0,"delta":{"content":"` + content + `"},"finish_reason":null}]}` + "\n\n"
}

const usageEvent = `data: {"id":"c","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"

func TestTheUsageChunkIsTakenOutAndNothingElseChanges(t *testing.T) {
	t.Parallel()
	around := ": hello\n\n" + `data: {"id":"c","choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n" +
		event("a") + event(`say \"usage\": {\"x\"`) + event("c")
	tail := "data: [DONE]\n\n"
	for size := 1; size < 400; size += 7 {
		s := &sseScanner{stripUsage: true}
		if got := pass(s, around+usageEvent+tail, size); got != around+tail {
			t.Fatalf("in pieces of %d the client got %q", size, got)
		}
		if s.content != 3 || !s.done || s.usage != (usage{10, 8, 3, true, true}) || s.failed {
			t.Fatalf("in pieces of %d: content %d, done %v, usage %+v", size, s.content, s.done, s.usage)
		}
	}
}

func TestAClientThatAskedKeepsTheUsageChunk(t *testing.T) {
	t.Parallel()
	s := &sseScanner{}
	stream := event("a") + usageEvent + "data: [DONE]\n\n"
	if got := pass(s, stream, 50); got != stream || !s.usage.known {
		t.Fatalf("got %q, usage %+v", got, s.usage)
	}
}

func TestContinuousUsageIsReadAndCutFromEveryChunk(t *testing.T) {
	t.Parallel()
	with := func(content, extra string) string {
		return `data: {"choices":[{"delta":{"content":"` + content + `"}}]` + extra + "}\n\n"
	}
	s := &sseScanner{stripUsage: true, cutUsage: true}
	stream := with("a", `,"usage":{"prompt_tokens":5,"completion_tokens":1}`) + with("b", ` , "usage" : {"prompt_tokens":5,"completion_tokens":2}`) + with("c", `,"usage":null`)
	if got, want := pass(s, stream, 33), with("a", "")+with("b", " ")+with("c", ""); got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
	if s.usage.completion != 2 || s.content != 3 {
		t.Fatalf("usage %+v, content %d", s.usage, s.content)
	}
}

func TestLineFormsThatEnginesUseAreUnderstood(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]string{
		"no space":       strings.ReplaceAll(event("a")+usageEvent, "data: ", "data:"),
		"CRLF":           strings.ReplaceAll(event("a")+usageEvent, "\n", "\r\n"),
		"no last line":   strings.TrimSuffix(event("a")+usageEvent, "\n\n"),
		"event line":     "event: x\n" + event("a") + usageEvent,
		"spaced JSON":    `data: { "choices" : [ ] , "usage" : { "prompt_tokens" : 10 , "completion_tokens" : 3 , "prompt_tokens_details" : { "cached_tokens" : 8 } } }` + "\n\n" + event("a"),
		"responses API":  `data: {"type":"response.output_text.delta","delta":"a"}` + "\n\n" + `data: {"type":"response.completed","response":{"id":"resp_1","usage":{"input_tokens":10,"output_tokens":3,"input_tokens_details":{"cached_tokens":8}}}}` + "\n\n",
		"completion":     `data: {"choices":[{"text":"a"}],"usage":null}` + "\n\n" + usageEvent,
		"long line kept": event(strings.Repeat("x", 2*maxLineBytes)) + event("a") + usageEvent,
	} {
		for _, size := range []int{1, 17, 1 << 20} {
			s := &sseScanner{wantID: true}
			if got := pass(s, stream, size); got != stream {
				t.Errorf("%s in pieces of %d changed", name, size)
			}
			if s.usage != (usage{10, 8, 3, true, true}) || s.content < 1 {
				t.Errorf("%s in pieces of %d: usage %+v, content %d", name, size, s.usage, s.content)
			}
			if name == "responses API" && (s.id != "resp_1" || !s.done) {
				t.Errorf("response id %q, done %v", s.id, s.done)
			}
		}
	}
}

func TestLinesThatEndInCarriageReturnsAloneAreNotHeldBack(t *testing.T) {
	t.Parallel()
	s := &sseScanner{}
	if _, body := s.feed([]byte("data: a\r\rdata: b")); string(body) != "data: a\r\rdata: b" {
		t.Fatalf("got %q", body)
	}
}

func TestBodyScanFindsUsageWhereverTheReadsCutIt(t *testing.T) {
	t.Parallel()
	body := `{"id":"resp_9","choices":[{"message":{"content":"the \"usage\": {"}}],"usage":{"prompt_tokens":10,"completion_tokens":3,` +
		`"prompt_tokens_details":{"cached_tokens":8}},"more":[` + strings.Repeat("1,", 5000) + `2]}`
	for size := 1; size < 300; size++ {
		s := bodyScan{wantID: size > 20}
		for rest := body; rest != ""; {
			n := min(size, len(rest))
			s.feed([]byte(rest[:n]))
			rest = rest[n:]
		}
		if s.usage != (usage{10, 8, 3, true, true}) || s.wantID && s.id != "resp_9" {
			t.Fatalf("in reads of %d: %+v, id %q", size, s.usage, s.id)
		}
	}
}

func FuzzSSE(f *testing.F) {
	f.Add([]byte(event("a")+usageEvent+"data: [DONE]\n\n"), uint8(7), true)
	f.Add([]byte(": c\r\n\r\ndata:{\"usage\":null,\"choices\":[]}\r\n\r\n"), uint8(3), false)
	f.Add([]byte(`data: {"error":{"message":"x"}}`+"\n\n"), uint8(1), true)
	f.Fuzz(func(t *testing.T, stream []byte, size uint8, strip bool) {
		piece := int(size) + 1
		cut := &sseScanner{stripUsage: strip, cutUsage: strip, wantID: true}
		whole := &sseScanner{stripUsage: strip, cutUsage: strip, wantID: true}
		a, b := pass(cut, string(stream), piece), pass(whole, string(stream), len(stream)+1)
		// Lines ending in CR alone pass unread, which depends on where reads end.
		lone := bytes.Contains(bytes.ReplaceAll(stream, []byte("\r\n"), nil), []byte("\r"))
		if a != b && !lone {
			t.Fatalf("pieces of %d gave %q, whole gave %q", piece, a, b)
		}
		if !strip && a != string(stream) {
			t.Fatalf("changed %q to %q", stream, a)
		}
		var look bodyScan
		for rest := stream; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
			look.feed(rest[:min(piece, len(rest))])
		}
	})
}

func TestWhatTheEndOfAResponseTellsAgainIsNotCounted(t *testing.T) {
	t.Parallel()
	var s sseScanner
	for _, event := range []string{
		`{"type":"response.created","response":{"status":"in_progress"}}`,
		`{"content_index":0,"delta":"a ","type":"response.output_text.delta"}`,
		`{"content_index":0,"delta":"b ","type":"response.output_text.delta"}`,
		`{"delta":"c","type":"response.reasoning_text.delta"}`,
		`{"content_index":0,"text":"a b ","type":"response.output_text.done"}`,
		`{"type":"response.content_part.done","part":{"type":"output_text","text":"a b "}}`,
		`{"item":{"type":"message","content":[{"type":"output_text","text":"a b "}]},"type":"response.output_item.done"}`,
		`{"type":"response.completed","response":{"output":[{"type":"message","content":[{"type":"output_text","text":"a b "}]}]}}`,
	} {
		s.feed([]byte("event: x\ndata: " + event + "\n\n"))
	}
	if s.content != 3 || !s.ended() {
		t.Errorf("%d events with content, ended %t; want 3 and true", s.content, s.ended())
	}
}
