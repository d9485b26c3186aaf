package router

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"unicode/utf16"
)

// hostileCorpus makes the same requests each time: every named family once
// whole, then random ones of the families that never end.
func hostileCorpus() []hostile {
	list := append(hostileBodies(), hostileHTTP()...)
	rng := rand.New(rand.NewPCG(7400, 1))
	for len(list) < corpusSize {
		switch len(list) % 4 {
		case 0:
			list = append(list, chatRequest("mutated body", mutate(rng, []byte(sampleBodies[rng.IntN(len(sampleBodies))]))))
		case 1:
			list = append(list, chatRequest("random body", randomBody(rng)))
		case 2:
			list = append(list, chatRequest("mutated random body", mutate(rng, randomBody(rng))))
		default:
			list = append(list, mutatedHead(rng))
		}
	}
	return list
}

// chatRequest frames a body properly, with a length or in chunks, for
// /v1/chat/completions.
func chatRequest(family string, body []byte) hostile {
	h := hostile{family: family}
	h.want, h.body = expect(body)
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	if len(body)%3 != 0 {
		h.raw = append([]byte(head+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"), body...)
		return h
	}
	h.raw = append([]byte(head+"Transfer-Encoding: chunked\r\n\r\n"), chunked(body, 1+len(body)%97)...)
	return h
}

// chunked is body in chunks of size bytes.
func chunked(body []byte, size int) (out []byte) {
	for len(body) > 0 {
		n := min(size, len(body))
		out = append(append(fmt.Appendf(out, "%x\r\n", n), body[:n]...), "\r\n"...)
		body = body[n:]
	}
	return append(out, "0\r\n\r\n"...)
}

// sampleBodies are requests as clients send them.
var sampleBodies = []string{
	`{"model":"m","messages":[{"role":"user","content":"hi"}]}`,
	`{"model": "n", "messages": [{"role": "system", "content": "You are h\u00e9lpful."}, {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}], "temperature": 2.50, "seed": 12345678901234567890, "stream": true}`,
	`{"stream":true,"stream_options":{"include_usage":false,"x":[]},"model":"m","prompt":["a","b"],"stop":null,"logit_bias":{"5":-1e2}}`,
	"{\n\t\"max_completion_tokens\" : 16 ,\r\n \"model\" :\"\\u006d\", \"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],\"ignore_eos\":true } \n",
}

// brokenValues are what no JSON value may be, each for a production of the grammar.
var brokenValues = []string{
	"", "01", "-01", "00", "+1", "-", ".5", "5.", "1.e5", "1e", "1e+", "1E-", "0x10", "1_000", "1,5", "--1", "1f", "NaN", "nan", "Infinity", "-Infinity", "inf",
	"True", "tru", "truee", "TRUE", "False", "fals", "Null", "nul", "nulll", "undefined", "None", "nil",
	"'x'", `"x`, `x"`, "`x`", `"\x41"`, `"\a"`, `"\'"`, `"\u12"`, `"\u12g4"`, `"\u+123"`, `"\U0041"`, `"\`, `"\"`, "\"\\\n\"", "\"\n\"", "\"\t\"", "\"\x00\"", "\"\x1f\"", "\"\r\"",
	"[", "]", "[1", "[1,", "[1,]", "[,1]", "[,]", "[1 2]", "[1;2]", "[1,,2]", "[1}", "(1)", "[1]]",
	"{", "}", `{"a"}`, `{"a":}`, `{"a":1,}`, `{,"a":1}`, `{"a":1 "b":2}`, `{"a":1;"b":2}`, `{"a"=1}`, `{"a"::1}`, `{a:1}`, `{'a':1}`, `{1:1}`, `{null:1}`, `{"a":1]`, `{"a":1}}`, `{"a" "b"}`,
	"/**/1", "1/**/", "//x\n1", "#x\n1", "\x00", "\x0b1", "\x0c1", "\u00a01", "\u20281", "\ufeff1", "<x/>", "1 1", `"a" "b"`, "@", "\\", "\x7f", "\xff",
}

// oddValues are valid, and odd.
var oddValues = []string{
	"null", "true", "0", "-0", "0.0", "-0.0", "2.50", "1E5", "1e-5", "1e400", "-1e400", "1e-400", "9223372036854775807", "9223372036854775808", "-9223372036854775809",
	"18446744073709551616", "123456789012345678901234567890123456789012345678901234567890", "0.1000000000000000055511151231257827021181583404541015625",
	`""`, `"\u0000"`, `"\ud83d\ude00"`, `"\ud800"`, `"\udc00\ud800"`, `"\/"`, `"\b\f\n\r\t\"\\"`, "\"\x7f\"", "\"\u2028\"", "\"\ufeff\"", "\"\xff\"", "\"\xc0\xaf\"", "\"\xed\xa0\x80\"", "\"\xf5\x80\x80\x80\"",
	"[]", "{}", "[[]]", "[{}]", `{"":""}`, `{"a":1,"a":2}`, `[null,[null],{"x":null}]`, `{"model":"n"}`, `"{\"model\":\"n\"}"`, " \t\r\n1 \t\r\n",
}

var fieldNames = []string{
	"model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens", "tools", "tool_choice", "response_format",
	"cache_salt", "lora_path", "instructions", "previous_response_id", "user", "seed", "x", "", "Model", "MODEL", "mod\\u0065l", "\\u006d\\u006f\\u0064\\u0065\\u006c", "model ", "m\\u00f6del",
}

// hostileBodies are the named families of bodies, each behind proper framing.
func hostileBodies() (list []hostile) {
	add := func(family, body string) { list = append(list, chatRequest(family, []byte(body))) }
	for _, sample := range sampleBodies {
		add("sample", sample)
		for n := range len(sample) {
			add("truncated body", sample[:n])
		}
		for _, tail := range []string{"}", "]", ",", "x", "{}", "null", "\x00", "\n\n", "\ufeff", "//", sample} {
			add("bytes behind", sample+tail)
			add("bytes before", tail+sample)
		}
	}
	for _, v := range brokenValues {
		add("broken value", `{"model":"m","x":`+v+`}`)
		add("broken value deep", `{"model":"m","messages":[{"role":"user","content":[{"a":`+v+`}]}]}`)
		add("broken value first", `{"x":`+v+`,"model":"m"}`)
		add("broken value alone", v)
	}
	for _, name := range fieldNames {
		for _, v := range oddValues {
			add("odd value of "+name, `{"`+name+`":`+v+`,"model":"m"}`)
		}
		for _, other := range fieldNames {
			add("two names", `{"`+name+`":"m","`+other+`":"n"}`)
		}
	}
	for _, v := range oddValues {
		add("odd model", `{"model":`+v+`}`)
		add("odd body", v)
		add("odd usage option", `{"model":"m","stream":true,"stream_options":{"include_usage":`+v+`}}`)
		add("odd stream options", `{"stream_options":`+v+`,"stream":true,"model":"m"}`)
	}
	for _, depth := range []int{10, 100, 510, 511, 512, 513, 1000, 9_999, 10_001, 100_000} {
		add("deep arrays", `{"model":"m","x":`+strings.Repeat("[", depth)+strings.Repeat("]", depth)+`}`)
		add("deep objects", `{"model":"m","x":`+strings.Repeat(`{"a":`, depth)+"1"+strings.Repeat("}", depth)+`}`)
		add("deep and open", `{"model":"m","x":`+strings.Repeat("[", depth))
		add("deep around", strings.Repeat("[", depth)+`{"model":"m"}`+strings.Repeat("]", depth))
		add("long name", `{"`+strings.Repeat("k", depth)+`":1,"model":"m"}`)
		add("long escaped name", `{"`+strings.Repeat(`\u006d`, depth)+`":1,"model":"m"}`)
		add("long model", `{"model":"`+strings.Repeat("m", depth)+`"}`)
		add("long number", `{"model":"m","seed":`+strings.Repeat("9", depth)+`}`)
		add("many members", `{"model":"m"`+strings.Repeat(`,"a":1`, depth)+`}`)
		add("many models", `{"model":"m"`+strings.Repeat(`,"model":"m"`, min(depth, 50))+`}`)
		add("white space", strings.Repeat(" ", depth)+`{"model"`+strings.Repeat("\n", depth)+`:"m"}`)
		add("many messages", `{"model":"m","messages":[`+strings.Repeat(`{"role":"user","content":"x"},`, depth/10)+`{}]}`)
	}
	add("too long", `{"model":"m","x":"`+strings.Repeat("x", hostileBodyLimit)+`"}`)
	add("as long as may be", `{"model":"m","x":"`+strings.Repeat("x", hostileBodyLimit-20)+`"}`)
	for _, sample := range sampleBodies {
		units := utf16.Encode([]rune(sample))
		var le, be, wide []byte
		for _, u := range units {
			le, be = append(le, byte(u), byte(u>>8)), append(be, byte(u>>8), byte(u))
			wide = append(wide, byte(u), byte(u>>8), 0, 0)
		}
		for _, mark := range []string{"", "\xff\xfe", "\xfe\xff", "\xef\xbb\xbf"} {
			add("UTF-16 or UTF-32", mark+string(le))
			add("UTF-16 or UTF-32", mark+string(be))
			add("UTF-16 or UTF-32", mark+string(wide))
		}
		add("byte order mark", "\xef\xbb\xbf"+sample)
	}
	return list
}

// mutate changes a few bytes: flips, cuts, doubles, swaps, and puts in pieces of JSON.
func mutate(rng *rand.Rand, body []byte) []byte {
	body = append([]byte(nil), body...)
	for range 1 + rng.IntN(3) {
		if len(body) == 0 {
			break
		}
		at := rng.IntN(len(body))
		end := min(len(body), at+1+rng.IntN(8))
		switch rng.IntN(6) {
		case 0:
			body[at] ^= 1 << rng.IntN(8)
		case 1:
			body = append(body[:at:at], body[end:]...)
		case 2:
			body = append(body[:end:end], body[at:]...)
		case 3:
			pieces := append(append([]string{`"`, `\`, "{", "}", "[", "]", ",", ":", " ", "\n"}, oddValues...), brokenValues...)
			body = append(body[:at:at], append([]byte(pieces[rng.IntN(len(pieces))]), body[at:]...)...)
		case 4:
			other := rng.IntN(len(body))
			body[at], body[other] = body[other], body[at]
		default:
			body[at] = byte(rng.IntN(256))
		}
	}
	return body
}

// randomBody is valid JSON with random white space, order, escapes and numbers.
func randomBody(rng *rand.Rand) []byte {
	space := func() string { return strings.Repeat(" \n\t\r"[rng.IntN(4):][:1], rng.IntN(3)) }
	text := func(s string) string {
		var b strings.Builder
		for _, c := range []byte(s) {
			if rng.IntN(8) == 0 {
				fmt.Fprintf(&b, `\u%04x`, c)
			} else {
				b.WriteByte(c)
			}
		}
		return `"` + b.String() + `"`
	}
	var value func(depth int) string
	value = func(depth int) string {
		switch n := rng.IntN(8); {
		case n == 0 && depth < 6:
			var items []string
			for range rng.IntN(4) {
				items = append(items, space()+value(depth+1)+space())
			}
			return "[" + strings.Join(items, ",") + "]"
		case n == 1 && depth < 6:
			var items []string
			for range rng.IntN(4) {
				items = append(items, space()+text(fieldNames[rng.IntN(12)])+space()+":"+value(depth+1)+space())
			}
			return "{" + strings.Join(items, ",") + "}"
		case n < 4:
			return text(strings.Repeat("text ", rng.IntN(120)))
		}
		return oddValues[rng.IntN(len(oddValues))]
	}
	members := []string{text("model") + space() + ":" + space() + text([]string{"m", "n", "m", "other"}[rng.IntN(4)])}
	if rng.IntN(2) == 0 {
		members = append(members, text("stream")+":"+space()+[]string{"true", "false", "null"}[rng.IntN(3)])
	}
	if rng.IntN(3) == 0 {
		members = append(members, text("stream_options")+":"+[]string{`{}`, `{ "include_usage" : true}`, `{"x":1}`, "null", `{"include_usage":null}`}[rng.IntN(5)])
	}
	for range rng.IntN(6) {
		name := []string{"messages", "seed", "user", "metadata", "h\u00e9", "stop", "x-y"}[rng.IntN(7)]
		members = append(members, `"`+name+`"`+space()+":"+value(0))
	}
	rng.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	for i := range members {
		members[i] = space() + members[i] + space()
	}
	return []byte(space() + "{" + strings.Join(members, ",") + "}" + space())
}
