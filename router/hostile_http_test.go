package router

import (
	"math/rand/v2"
	"strconv"
	"strings"
)

const plainChat = `{"model":"m","messages":[]}`

const servedChat = `{"model":"served","messages":[]}`

// hostileHTTP are the named families of heads and framings.
func hostileHTTP() (list []hostile) {
	length := "Content-Length: " + strconv.Itoa(len(plainChat)) + "\r\n"
	const post, kind = "POST /v1/chat/completions HTTP/1.1\r\n", "Host: x\r\nContent-Type: application/json\r\n"
	add := func(family, raw string, want verdict, change ...func(*hostile)) {
		h := hostile{family: family, raw: []byte(raw), want: want}
		if want == mustPass {
			h.body = []byte(servedChat)
		}
		for _, c := range change {
			c(&h)
		}
		list = append(list, h)
	}
	fin := func(h *hostile) { h.fin = true }
	also := func(h *hostile) { h.also++ }
	method := func(m string) func(*hostile) { return func(h *hostile) { h.method = m } }

	whole := post + kind + length + "\r\n" + plainChat
	add("plain", whole, mustPass)
	for n := 1; n < len(whole); n++ {
		want := mustHangUp // a head that ends early is no request
		if n >= strings.Index(whole, "\r\n\r\n")+4 {
			want = mustRefuse
		}
		add("cut request", whole[:n], want, fin)
	}
	add("half-closed behind the request", whole, mustPass, fin)
	// Lengths.
	for _, v := range []string{"-1", "+27", "0x1b", "27 ", "\t27", "27, 27", "27,28", "27 27", "1e3", "27.0", "99999999999999999999", "18446744073709551643", "", "abc", "२७", "27;x", "'27'"} {
		want := mustRefuse
		if strings.TrimSpace(v) == "27" {
			want = mustPass
		}
		add("length "+v, post+kind+"Content-Length: "+v+"\r\n\r\n"+plainChat, want)
	}
	add("two equal lengths", post+kind+length+length+"\r\n"+plainChat, mustPass)
	add("two lengths", post+kind+length+"Content-Length: 5\r\n\r\n"+plainChat, mustRefuse)
	add("no length", post+kind+"\r\n", mustRefuse)
	add("zero length", post+kind+"Content-Length: 0\r\n\r\n", mustRefuse)
	add("length too long", post+kind+"Content-Length: 9999\r\n\r\n"+plainChat, mustRefuse, fin)
	add("length far too long", post+kind+"Content-Length: 999999999999\r\n\r\n"+plainChat, mustRefuse, fin)
	add("length swallows a request", post+kind+"Content-Length: "+strconv.Itoa(len(plainChat)+len(whole))+"\r\n\r\n"+plainChat+whole, mustRefuse)
	add("length too short", post+kind+"Content-Length: 26\r\n\r\n"+plainChat+"\r\n\r\n", mustRefuse, also)
	add("bytes behind the body", whole+"garbage\r\n\r\n", mustPass, also)
	// Transfer encodings.
	body := string(chunked([]byte(plainChat), 10))
	te := func(v string) string { return "Transfer-Encoding: " + v + "\r\n" }
	add("chunked", post+kind+te("chunked")+"\r\n"+body, mustPass)
	add("chunked in capitals", post+kind+"TRANSFER-ENCODING: CHUNKED\r\n\r\n"+body, mustPass)
	for _, v := range []string{"identity", "gzip", "gzip, chunked", "chunked, gzip", "chunked, chunked", "chunked;q=1", "xchunked", "chunkedx", "\"chunked\"", "chunk", "chunked,", ",chunked", "chunked identity", "cow", "c\u212ahunked", ""} {
		add("transfer encoding "+v, post+kind+te(v)+"\r\n"+body, mustRefuse)
		add("transfer encoding and length "+v, post+kind+te(v)+length+"\r\n"+plainChat, mustRefuse)
	}
	for _, v := range []string{"chunked\x0b", "\x00chunked", "chunked\x00", "\x01"} {
		add("control character in an encoding", post+kind+te(v)+"\r\n"+body, mustRefuse)
	}
	for _, line := range []string{"Transfer-Encoding : chunked\r\n", " Transfer-Encoding: chunked\r\n", "Transfer\tEncoding: chunked\r\n", "Transfer-Encoding\r\n: chunked\r\n", "Transfer-Encoding:\r\n"} {
		add("misspelt transfer encoding", post+"Host: x\r\n"+line+"Content-Type: application/json\r\n"+length+"\r\n"+plainChat, mustRefuse)
	}
	add("two transfer encodings", post+kind+te("chunked")+te("identity")+"\r\n"+body, mustRefuse)
	add("two chunked", post+kind+te("chunked")+te("chunked")+"\r\n"+body, mustRefuse)
	smuggled := "GET /v1/smuggled HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\n\r\n"
	for _, v := range []string{"chunked", "Chunked", " chunked", "\tchunked ", "CHUNKED"} {
		add("length and encoding", post+kind+length+te(v)+"\r\n"+body, mustRefuse)
		add("encoding and length", post+kind+te(v)+length+"\r\n"+body, mustRefuse)
		add("CL.TE smuggling", post+kind+"Content-Length: "+strconv.Itoa(5+len(smuggled))+"\r\n"+te(v)+"\r\n0\r\n\r\n"+smuggled, mustRefuse)
		add("TE.CL smuggling", post+kind+"Content-Length: 4\r\n"+te(v)+"\r\n"+strconv.FormatInt(int64(len(smuggled)), 16)+"\r\n"+smuggled+"\r\n0\r\n\r\n", mustRefuse)
		add("encoding in HTTP/1.0", strings.Replace(post, "1.1", "1.0", 1)+kind+te(v)+"Connection: keep-alive\r\n\r\n"+body, mustRefuse)
	}
	// Chunks.
	for _, c := range []string{
		"1b\r\n" + plainChat, "1b\n" + plainChat + "\r\n0\r\n\r\n", "1b\r\n" + plainChat + "0\r\n\r\n", "1b\r\n" + plainChat + "\r\n", "1b\r\n" + plainChat + "\r\n0", "1b\r\n" + plainChat + "\r\n0\r\n",
		"1c\r\n" + plainChat + "\r\n0\r\n\r\n", "1a\r\n" + plainChat + "\r\n0\r\n\r\n", "-1b\r\n" + plainChat + "\r\n0\r\n\r\n", "+1b\r\n" + plainChat + "\r\n0\r\n\r\n", "0x1b\r\n" + plainChat + "\r\n0\r\n\r\n",
		"g\r\n" + plainChat + "\r\n0\r\n\r\n", "\r\n" + plainChat + "\r\n0\r\n\r\n", "ffffffffffffffff\r\n" + plainChat, "10000000000000000\r\n" + plainChat, "1b" + strings.Repeat("0", 20) + "\r\n" + plainChat,
		"1b\r" + plainChat + "\r\n0\r\n\r\n", "1b;" + strings.Repeat("x", 5000) + "\r\n" + plainChat + "\r\n0\r\n\r\n",
		"1 b\r\n" + plainChat + "\r\n0\r\n\r\n", "1b\x00\r\n" + plainChat + "\r\n0\r\n\r\n", " \r\n", "\x00",
	} {
		add("broken chunks", post+kind+te("chunked")+"\r\n"+c, mustRefuse, fin)
	}
	add("chunk extension", post+kind+te("chunked")+"\r\n1b;a=b;c=\"d\"\r\n"+plainChat+"\r\n0\r\n\r\n", mustPass)
	add("trailers", post+kind+te("chunked")+"Trailer: X-T\r\n\r\n1b\r\n"+plainChat+"\r\n0\r\nX-T: 1\r\n\r\n", mustPass)
	add("one byte chunks", post+kind+te("chunked")+"\r\n"+string(chunked([]byte(plainChat), 1)), mustPass)
	add("empty chunks", post+kind+te("chunked")+"\r\n0\r\n\r\n", mustRefuse)
	// Request lines.
	for _, line := range []string{
		" ", "GET", "POST /v1/chat/completions", "POST  /v1/chat/completions HTTP/1.1", "POST /v1/chat/completions HTTP/1.1 ", "POST /v1/chat/completions HTTP/1.1 x", "POST /v1/chat /completions HTTP/1.1",
		"POST /v1/chat/completions HTTP/2.0", "POST /v1/chat/completions HTTP/1.2", "POST /v1/chat/completions HTTP/0.9", "POST /v1/chat/completions HTTP/11", "POST /v1/chat/completions HTTPS/1.1", "POST /v1/chat/completions http/1.1",
		"PO ST /v1/chat/completions HTTP/1.1", "P(ST /v1/chat/completions HTTP/1.1", "\x00POST /v1/chat/completions HTTP/1.1", "POST v1/chat/completions HTTP/1.1", "POST \\v1 HTTP/1.1", "POST /%zz HTTP/1.1", "POST /v1/%x HTTP/1.1",
		"POST http:// HTTP/1.1", "POST :80/v1/chat/completions HTTP/1.1", "POST /v1/\x7f HTTP/1.1", "POST /v1/\x01 HTTP/1.1", "{\"model\":\"m\"}", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "SSH-2.0-x", "GET /\x00 HTTP/1.1", "* * *",
		"POST ? HTTP/1.1", "POST //[::1 HTTP/1.1", "POST http://[x/v1/chat/completions HTTP/1.1", "POST /v1/chat/completions HTTP/1.1\x00", "POST\t/v1/chat/completions\tHTTP/1.1",
	} {
		want := mustRefuse
		if strings.HasSuffix(line, "HTTP/1.2") {
			want = mustPass // a later minor version is spoken to as 1.1
		}
		add("request line", line+"\r\n"+kind+length+"\r\n"+plainChat, want)
	}
	for _, target := range []string{"http://other.example/v1/chat/completions", "HTTP://x/v1/chat/completions?a=1", "/v1/chat/completions?", "/v1/chat/completions?a=%00&b=;;", "/v1/chat/completions#f", "/v1/ch%61t/completions", "/v1/chat%2fcompletions"} {
		add("target form", "POST "+target+" HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustPass)
	}
	for _, path := range []string{"/", "*", "//", "/v1", "/v2/chat/completions", "/V1/chat/completions", "/v1//chat/completions", "/v1/../v1/chat/completions", "/v1/%2e%2e/metrics", "/v1/./models", "//v1/chat/completions", "/v1/..%5cx", "/v1/%00", "/%2f", "/admin", "/v1/models/nope", "/v1/responses/nope"} {
		for _, m := range []string{"GET", "PUT", "DELETE", "BREW", "HEAD"} {
			if path == "*" && m != "GET" {
				continue
			}
			add("path", m+" "+path+" HTTP/1.1\r\nHost: x\r\n\r\n", mustRefuse, method(m))
		}
	}
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize"} {
		for _, m := range []string{"GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "Post", "BREW", "M-SEARCH", "PROPFIND", "X" + strings.Repeat("Y", 500)} {
			add("method", m+" "+path+" HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustRefuse, method(m))
		}
	}
	for _, path := range []string{"/v1/models", "/health", "/metrics"} {
		for _, m := range []string{"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"} {
			add("method", m+" "+path+" HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustRefuse, method(m))
		}
		add("with a body", "GET "+path+" HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustAnswer, method("GET"))
		add("in HTTP/1.0", "GET "+path+" HTTP/1.0\r\n\r\n", mustAnswer, method("GET"))
	}
	for _, m := range []string{"CONNECT", "TRACE"} {
		add("tunnel or echo", m+" /v1/rerank HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustRefuse, method(m))
		add("tunnel or echo", m+" x:80 HTTP/1.1\r\nHost: x\r\n\r\n", mustRefuse, method(m))
	}
	add("server options", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", mustAnswer, method("OPTIONS"))
	add("old protocol", "GET /v1/models\r\n", mustRefuse, method("GET"))
	add("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", mustRefuse, method("PRI"))
	add("in HTTP/1.0", "POST /v1/chat/completions HTTP/1.0\r\n"+kind+length+"\r\n"+plainChat, mustPass)
	add("in HTTP/1.0, kept alive", "POST /v1/chat/completions HTTP/1.0\r\n"+kind+length+"Connection: keep-alive\r\n\r\n"+plainChat, mustPass)
	// Header lines.
	for _, line := range []string{
		"X: a\x00b", "X: a\x01b", "X: a\x7fb", "X\x00: a", "X : a", " X: a", ": a", "X", "X;Y: a", "X(: a", "X\u00e9: a", "X: a\rb: c", "\x0bX: a", "{\"a\":1}",
	} {
		add("header line", post+line+"\r\n"+kind+length+"\r\n"+plainChat, mustRefuse)
	}
	for _, line := range []string{
		"X: " + strings.Repeat("v", 30<<10), "X: \xff\xfe", "X: a\r\n\tfolded", "X: a\r\n  folded: b", "X:", "X:a", "X: \t a \t ", "x-hearth-reason: forged", "Content-Length-X: 5", "Connection: Content-Type, Content-Length, Host", "Connection: close, , ;",
		"Keep-Alive: timeout=9999", "Proxy-Connection: keep-alive", "TE: trailers, deflate", "Expect:", "Forwarded: for=x", "X-Request-Id: " + strings.Repeat("x", 500), "X-Request-Id: a\r\nX-Request-Id: b", "Range: bytes=0-0", "If-None-Match: *",
		"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA", "Cookie: " + strings.Repeat("a=b; ", 1000), "Authorization: \"\"", "Accept-Encoding: gzip", "Accept: */*;q=0", "Content-Encoding: identity", "X-HTTP-Method-Override: DELETE",
		"X: 1\nY: 2", strings.TrimSuffix(strings.Repeat("X: 1\r\n", 500), "\r\n"),
	} {
		add("odd header", post+line+"\r\n"+kind+length+"\r\n"+plainChat, mustPass)
	}
	add("bare line feeds", strings.ReplaceAll(post+kind+length+"\r\n", "\r\n", "\n")+plainChat, mustPass)
	add("empty lines first", "\r\n\r\n"+whole, mustRefuse)
	for _, n := range []int{70 << 10, 200 << 10, 2 << 20} {
		add("long header", post+kind+length+"X: "+strings.Repeat("v", n)+"\r\n\r\n"+plainChat, mustRefuse)
		add("long target", "POST /v1/chat/completions?"+strings.Repeat("v", n)+" HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustRefuse)
		add("many headers", post+kind+length+strings.Repeat("X: v\r\n", n/6)+"\r\n"+plainChat, mustRefuse)
	}
	// Hosts.
	for _, host := range []string{"", "Host: a\r\nHost: b\r\n", "Host: a b\r\n", "Host: a\x00\r\n", "Host: a/b\r\n", "Host: \"<>\"\r\n"} {
		add("host", post+host+"Content-Type: application/json\r\n"+length+"\r\n"+plainChat, mustRefuse)
	}
	// Expectations, upgrades, media types.
	for _, v := range []string{"200-ok", "x", "100-continue;q=1", "101-continue", "200-ok, x"} {
		add("expectation", post+kind+length+"Expect: "+v+"\r\n\r\n"+plainChat, mustRefuse)
	}
	for _, v := range []string{"100-continue", "100-Continue", " 100-CONTINUE ", "100-continue, x"} {
		add("expects to continue", post+kind+length+"Expect: "+v+"\r\n\r\n"+plainChat, mustPass)
	}
	for _, v := range []string{"websocket", "h2c, websocket", "TLS/1.0", "HTTP/2.0", "x"} {
		add("upgrade", post+kind+length+"Connection: Upgrade\r\nUpgrade: "+v+"\r\n\r\n"+plainChat, mustRefuse)
		add("upgrade", "GET /v1/realtime?model=m HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "+v+"\r\nSec-WebSocket-Version: 13\r\n\r\n", mustRefuse, method("GET"))
	}
	for _, v := range []string{"gzip", "br", "zstd", "deflate", "GZIP", "identity, gzip", "x", "aws-chunked", "identity\r\nContent-Encoding: gzip"} {
		add("content encoding", post+kind+length+"Content-Encoding: "+v+"\r\n\r\n"+plainChat, mustRefuse)
		add("content encoding on a path of the engine's own", "POST /v1/rerank HTTP/1.1\r\n"+kind+length+"Content-Encoding: "+v+"\r\n\r\n"+plainChat, mustRefuse)
	}
	for _, v := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", "json", "*/*", "application/json\r\nContent-Type: text/plain", "text/json", ";", "application/octet-stream"} {
		add("content type", post+"Host: x\r\nContent-Type: "+v+"\r\n"+length+"\r\n"+plainChat, mustRefuse)
	}
	for _, v := range []string{"application/json; charset=utf-8", "application/json;charset=utf-16", "APPLICATION/JSON", "application/vnd.x+json", "application/json;", "application/json ; x=\"y\""} {
		add("content type", post+"Host: x\r\nContent-Type: "+v+"\r\n"+length+"\r\n"+plainChat, mustPass)
	}
	add("no content type", post+"Host: x\r\n"+length+"\r\n"+plainChat, mustPass)
	add("a path of the engine's own", "POST /v1/rerank?x=1 HTTP/1.1\r\n"+kind+length+"\r\n"+plainChat, mustPass)
	add("a path of the engine's own, no model", "POST /v1/rerank HTTP/1.1\r\n"+kind+"Content-Length: 2\r\n\r\n{}", mustRefuse)
	add("a form that names no model", "POST /v1/audio HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 2\r\n\r\n{}", mustRefuse)
	add("too long", post+kind+"Content-Length: "+strconv.Itoa(hostileBodyLimit+1)+"\r\n\r\n"+plainChat+strings.Repeat(" ", hostileBodyLimit), mustRefuse)
	add("too long in chunks", post+kind+te("chunked")+"\r\n"+string(chunked([]byte(plainChat+strings.Repeat(" ", hostileBodyLimit)), 1<<16)), mustRefuse)
	add("long and of the wrong type", post+"Host: x\r\nContent-Type: text/plain\r\nContent-Length: 900000\r\n\r\n"+strings.Repeat("x", 900000), mustRefuse)
	add("long to a path that is none", "POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"+strings.Repeat("x", 900000), mustRefuse)
	add("raw bytes that are none of HTTP", strings.Repeat("\x00\xff", 5000)+"\r\n\r\n", mustRefuse)
	add("pipelined", whole+strings.Replace(whole, `"m"`, `"x"`, 1), mustPass, also)
	return list
}

// mutatedHead is a request whose head has lost, doubled or changed a byte. Only
// a head that net/http itself takes for a plain request is told apart by the test.
func mutatedHead(rng *rand.Rand) hostile {
	junk := []string{"\x00", "\x01", "\x0b", "\x7f", "(", "{", "\xff"}
	names := []string{"X-A", "Accept", "User-Agent", "X-Stainless-Lang", "Content-Language"}
	name := names[rng.IntN(len(names))]
	at := rng.IntN(len(name) + 1)
	line := name[:at] + junk[rng.IntN(len(junk))] + name[at:] + ": v"
	if rng.IntN(2) == 0 {
		value := strings.Repeat("v", rng.IntN(50))
		at := rng.IntN(len(value) + 1)
		line = name + ": " + value[:at] + junk[rng.IntN(4)] + value[at:]
	}
	return hostile{family: "mutated head", want: mustRefuse, raw: []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + line +
		"\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(plainChat)) + "\r\n\r\n" + plainChat)}
}
