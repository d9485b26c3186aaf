package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// checkSplices holds the promise of the body's way for one body: taking the
// splices out again gives the client's bytes, each splice is one of those that
// are allowed and stands where it may, and a decoder finds the same members but
// for the model and the usage options.
func checkSplices(t *testing.T, body []byte, served string, addModel, meter, continuous bool) {
	t.Helper()
	var f facts
	if scan(body, &f) != nil {
		return
	}
	before := bytes.Clone(body)
	list, _, _ := f.edits(body, served, addModel, meter, continuous)
	out := bytes.Join(splice(nil, body, list), nil)
	if !bytes.Equal(body, before) {
		t.Fatalf("the client's bytes were written to: %q became %q", before, body)
	}
	// Back: what each splice put in goes, what it replaced returns.
	var back []byte
	at, shift := 0, 0
	for _, e := range list {
		start := e.off + shift
		if start < at || !bytes.HasPrefix(out[start:], []byte(e.text)) {
			t.Fatalf("%q with %v gave %q", body, list, out)
		}
		back = append(append(back, out[at:start]...), body[e.off:e.end]...)
		at = start + len(e.text)
		shift += len(e.text) - (e.end - e.off)
		if !allowed(&f, body, e, served) {
			t.Fatalf("%q: the splice %q for %q is none that is allowed", body, e.text, body[e.off:e.end])
		}
	}
	if back = append(back, out[at:]...); !bytes.Equal(back, body) {
		t.Fatalf("%q came back as %q", body, back)
	}
	if len(list) > 3 {
		t.Fatalf("%d splices", len(list))
	}
	client, engine := decoded(t, body), decoded(t, out)
	if served != "" && (f.model.present() || addModel) && engine["model"] != served {
		t.Fatalf("%q went on as %q: the engine reads the model %v", body, out, engine["model"])
	}
	if f.stream && meter && (f.streamOptions.is(body, '{') || !f.streamOptions.present()) {
		options, _ := engine["stream_options"].(map[string]any)
		if options["include_usage"] != true {
			t.Fatalf("%q went on as %q: no usage is asked for", body, out)
		}
		was, _ := client["stream_options"].(map[string]any)
		for _, name := range []string{"include_usage", "continuous_usage_stats"} {
			delete(options, name)
			delete(was, name)
		}
		if len(options)+len(was) > 0 && !reflect.DeepEqual(options, was) {
			t.Fatalf("%q went on as %q: other stream options", body, out)
		}
	}
	for _, name := range []string{"model", "stream_options"} {
		delete(client, name)
		delete(engine, name)
	}
	if !reflect.DeepEqual(client, engine) {
		t.Fatalf("%q went on as %q, which means something else", body, out)
	}
}

func decoded(t *testing.T, b []byte) (m map[string]any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		t.Fatalf("%q is no object to encoding/json: %v", b, err)
	}
	return m
}

// allowed lists what may be put in, and what it may replace.
func allowed(f *facts, body []byte, e edit, served string) bool {
	name, _ := json.Marshal(served)
	old := string(body[e.off:e.end])
	text := strings.TrimSuffix(e.text, ",")
	const usage, continuous = `"include_usage":true`, `"continuous_usage_stats":true`
	options := text == usage || text == continuous || text == usage+","+continuous
	whole := strings.HasPrefix(text, `"stream_options":{`) || strings.HasPrefix(text, "{")
	switch {
	case e.off == f.model.off && e.end == f.model.end:
		return sameText(text, string(name))
	case old == "" && e.off == f.open:
		return strings.HasPrefix(text, `"model":`) && sameText(strings.TrimPrefix(text, `"model":`), string(name)) || whole && strings.Contains(text, usage)
	case old == "" && e.off == f.optionsOpen:
		return options
	case old == "null" && e.off == f.streamOptions.off:
		return whole
	}
	return text == "true" && (e.off == f.includeUsage.off || e.off == f.continuousUsage.off)
}

func sameText(a, b string) bool {
	var x, y string
	return json.Unmarshal([]byte(a), &x) == nil && json.Unmarshal([]byte(b), &y) == nil && x == y
}

var spliceSeeds = []string{
	`{}`, ` { } `, `{"model":"m"}`, `{"model":"m","stream":true}`, `{"stream":true}`, `{"stream":true,"stream_options":null,"model":"x"}`,
	`{"stream_options":{},"stream":true,"model":"m"}`, `{"stream_options":{"include_usage":false},"stream":true}`, `{"stream_options":{"include_usage":true},"stream":true}`,
	`{"stream_options":{"x":1},"stream_options":{"include_usage" : null , "continuous_usage_stats":0},"stream":true}`, `{"stream_options":[],"stream":true}`,
	`{"stream_options":{"include_usage":true},"stream_options":null,"stream":true}`, `{"str\u0065am":true,"\u006dodel":"\u006d"}`, "{\"x\":\"\xff\",\"model\":\"m\",\"temperature\":2.50}",
}

func FuzzSplices(f *testing.F) {
	for i, s := range spliceSeeds {
		f.Add([]byte(s), "served", i%2 == 0, true, i%3 == 0)
	}
	f.Fuzz(func(t *testing.T, body []byte, served string, addModel, meter, continuous bool) {
		if !json.Valid(fmt.Appendf(nil, "%q", served)) {
			served = "served" // a configured name is text
		}
		checkSplices(t, body, served, addModel, meter, continuous)
	})
}

func TestTakingTheSplicesOutGivesTheClientsBytesBackWhateverTheBody(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 7400))
	for range 4_000 {
		body := anyBody(rng)
		if !json.Valid(body) {
			t.Fatalf("the generator made %q", body)
		}
		checkSplices(t, body, []string{"served", "", "a/b:c-1", "m\u00f6\"\\\n", "m"}[rng.IntN(5)], rng.IntN(2) == 0, rng.IntN(4) > 0, rng.IntN(3) == 0)
	}
}

// anyBody is a valid object with random space, order, escapes, numbers and text.
func anyBody(rng *rand.Rand) []byte {
	space := func() string { return strings.Repeat(" \n\t\r"[rng.IntN(4):][:1], max(0, rng.IntN(5)-2)) }
	quoted := func(s string) string {
		var b strings.Builder
		for _, c := range s {
			switch {
			case rng.IntN(6) == 0 && c < 0x10000:
				fmt.Fprintf(&b, `\u%04X`, c)
			case c == '"' || c == '\\':
				b.WriteString(`\` + string(c))
			default:
				b.WriteRune(c)
			}
		}
		return `"` + b.String() + `"`
	}
	numbers := []string{"0", "-0.0", "2.50", "1E+05", "1e400", "12345678901234567890123", "-9223372036854775809", "0.10000000000000000555"}
	texts := []string{"", "a", "h\u00e9llo", "\u65e5\u672c\U0001f600", `"model":"n"`, "\u2028", strings.Repeat("long ", 200), `\`, "{[,:]}"}
	var value func(depth int) string
	value = func(depth int) string {
		var items []string
		switch n := rng.IntN(7); {
		case n == 0 && depth < 5:
			for range rng.IntN(4) {
				items = append(items, space()+value(depth+1)+space())
			}
			return "[" + strings.Join(items, ",") + space() + "]"
		case n == 1 && depth < 5:
			for range rng.IntN(4) {
				items = append(items, space()+quoted([]string{"model", "stream", "x", "include_usage", ""}[rng.IntN(5)])+space()+":"+space()+value(depth+1))
			}
			return "{" + strings.Join(items, ",") + space() + "}"
		case n < 4:
			return quoted(texts[rng.IntN(len(texts))])
		case n == 4:
			return []string{"true", "false", "null"}[rng.IntN(3)]
		}
		return numbers[rng.IntN(len(numbers))]
	}
	var members []string
	add := func(name, value string) {
		members = append(members, space()+quoted(name)+space()+":"+space()+value+space())
	}
	if rng.IntN(4) > 0 {
		add("model", quoted([]string{"m", "served", "\u00e9", ""}[rng.IntN(4)]))
	}
	for range rng.IntN(3) {
		add("stream", []string{"true", "true", "false", "null", "1"}[rng.IntN(5)])
	}
	for range rng.IntN(3) {
		add("stream_options", []string{"{}", "{ }", "null", "[]", `{"include_usage":true}`, `{ "include_usage" : false,"x":2.50}`, `{"include_usag\u0065":null}`, `{"continuous_usage_stats":true}`, `{"x":{}}`, value(0)}[rng.IntN(10)])
	}
	for range rng.IntN(5) {
		add([]string{"messages", "prompt", "seed", "user", "tools", "max_tokens", "metadata", "\u00fc"}[rng.IntN(8)], value(0))
	}
	rng.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	return []byte(space() + "{" + space() + strings.Join(members, ",") + "}" + space())
}
